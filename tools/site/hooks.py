"""Hooks of mkdocs: pages from outside docs/, diagrams without a network, and llms.txt."""

import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from tools.site.llms import llms_text
from tools.site.repository_pages import (
    ROOT,
    document_texts,
    linked_files,
    site_path,
    source_texts,
    with_site_links,
)

MERMAID = "assets/mermaid.min.js"
"""Place of mermaid on the site. The theme would load it from a content delivery network."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and the linked files that are not in docs/."""
    texts = document_texts() | source_texts()
    for uri, text in texts.items():
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=text))
    for path in linked_files():
        uri = site_path(path)
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of the pages in docs/; those of generated pages are written already."""
    path = page.file.abs_src_path
    if path is None:
        return markdown
    return with_site_links(markdown, Path(path))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Loads mermaid from the site on pages with a diagram, before the theme looks for it."""
    if '<pre class="mermaid">' not in output:
        return output
    depth = page.url.count("/")
    script = f'<script src="{"../" * depth}{MERMAID}"></script>'
    return output.replace("</head>", f"{script}</head>", 1)


def on_post_build(config: Any) -> None:
    """Writes llms.txt, the Markdown of every document beside its HTML, and mermaid."""
    site = Path(config.site_dir)
    texts = document_texts()
    for name, text in texts.items():
        copy = site / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    (site / "llms.txt").write_text(llms_text(config.nav, texts))
    shutil.copy(ROOT / config.extra["mermaid"], site / MERMAID)
