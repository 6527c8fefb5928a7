"""Pages of the site: Markdown files, notebooks and source files of the repository.

Pages have the relative links that work in a checkout and on a code host. On the site the folder
`docs/` is the root, so links are rewritten for the new places of page and target.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE_FOLDERS = ("examples", "studies", "benchmarks")
"""Folders beside docs/ whose Markdown files are pages."""
ROOT_PAGES = {
    "README.md": "overview.md",  # mkdocs would take README.md for the start page
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages in the root of the repository, by their path on the site."""
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml"}
"""Source files that the site shows as pages of code if a page links them, with the language."""
LINK = re.compile(r"(\]\()((?!https?:|mailto:|data:|#)[^)\s#]+)(#[^)\s]*)?(\))")
FENCE = "`````"
"""Delimits shown code. Docstrings and outputs may contain fences of three backticks."""
NOT_IN_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"
"""Head of pages of code: a result shows a complete page, so code would hide the documents."""


def markdown_files() -> list[Path]:
    """Returns the Markdown pages in the order of their paths."""
    pages = [ROOT / name for name in ROOT_PAGES]
    for folder in ("docs", *PAGE_FOLDERS):
        pages += (ROOT / folder).rglob("*.md")
    return sorted(pages)


def linked_files() -> list[Path]:
    """Returns the files that pages link or show and that are no Markdown files."""
    targets = set()
    for page in markdown_files():
        for match in LINK.finditer(page.read_text()):
            target = (page.parent / match[2]).resolve()
            if target.is_file() and target.suffix != ".md":
                targets.add(target)
    return sorted(targets)


def site_path(path: Path) -> str:
    """Returns the place on the site of a file of the repository, as mkdocs names sources."""
    name = path.relative_to(ROOT).as_posix()
    if name in ROOT_PAGES:
        return ROOT_PAGES[name]
    if path.suffix == ".ipynb":
        return name.removesuffix(".ipynb") + ".md"
    if path.suffix in LANGUAGES:
        return f"source/{name}.md"
    return name.removeprefix("docs/")


def document_texts() -> dict[str, str]:
    """Returns the Markdown of every document, by its place on the site."""
    texts = {}
    for path in markdown_files():
        texts[site_path(path)] = with_site_links(path.read_text(), path)
    for path in linked_files():
        if path.suffix == ".ipynb":
            texts[site_path(path)] = with_site_links(notebook_text(path), path)
    return texts


def source_texts() -> dict[str, str]:
    """Returns a page with the code of each linked source file, by its place on the site."""
    texts = {}
    for path in linked_files():
        if path.suffix in LANGUAGES:
            name = path.relative_to(ROOT).as_posix()
            code = _fenced(path.read_text(), LANGUAGES[path.suffix])
            texts[site_path(path)] = f"{NOT_IN_SEARCH}# {path.name}\n\n`{name}`\n{code}"
    return texts


def notebook_text(path: Path) -> str:
    """Returns a notebook with its outputs as Markdown; pictures are embedded."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source + "\n")
            continue
        parts.append(_fenced(source, "python"))
        for output in cell["outputs"]:
            parts.append(_output_text(output))
    return "\n".join(parts)


def with_site_links(markdown: str, path: Path) -> str:
    """Returns a page's text with links to the places of their targets on the site.

    Args:
        markdown: The text of the page.
        path: The file in the repository. Links to files that do not exist stay as they are, so
            that mkdocs reports them.
    """
    folder = posixpath.dirname(site_path(path)) or "."

    def replaced(match: re.Match[str]) -> str:
        target = (path.parent / match[2]).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            return match[0]
        link = posixpath.relpath(site_path(target), folder)
        fragment = match[3] or ""
        return f"{match[1]}{link}{fragment}{match[4]}"

    return LINK.sub(replaced, markdown)


def _fenced(text: str, language: str) -> str:
    """Returns a block of code."""
    return f"\n{FENCE}{language}\n{text.rstrip()}\n{FENCE}\n"


def _output_text(output: dict[str, Any]) -> str:
    """Returns an output of a cell: printed text or a picture, "" for other kinds."""
    data = output.get("data", {})
    if "image/png" in data:
        picture = data["image/png"].replace("\n", "")
        return f"![output of the cell](data:image/png;base64,{picture})\n"
    text = "".join(output.get("text", data.get("text/plain", "")))
    if not text:  # a frame with a file that the cell wrote
        return ""
    return _fenced(text, "text")
