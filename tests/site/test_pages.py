"""Which files are pages of the site, and where their links lead; llms.txt."""

import json

import pytest

from tools.site.llms import llms_text
from tools.site.repository_pages import (
    ROOT,
    document_texts,
    notebook_text,
    site_path,
    source_texts,
    with_site_links,
)

LINKS = {
    "a page beside it": ("docs/math.md", "flags.md", "flags.md"),
    "a fragment": ("docs/math.md", "verl.md#the-functions", "verl.md#the-functions"),
    "a study": ("docs/math.md", "../studies/README.md", "studies/README.md"),
    "from a study": ("studies/collapse/README.md", "../../docs/math.md", "../../math.md"),
    "the README": ("docs/start/slime.md", "../../README.md#limits", "../overview.md#limits"),
    "code": ("docs/gpu.md", "../tools/gpu/carry.py", "source/tools/gpu/carry.py.md"),
    "a notebook": ("docs/start/trl.md", "../../examples/notebooks/trl.ipynb",
                   "../examples/notebooks/trl.md"),
    "a table": ("examples/sort_digits_moe/README.md", "mismatch.csv", "mismatch.csv"),
    "a picture": ("README.md", "docs/report.png", "report.png"),
    "the web": ("docs/math.md", "https://arxiv.org/abs/2110.00641",
                "https://arxiv.org/abs/2110.00641"),
    "this page": ("docs/math.md", "#6-losses", "#6-losses"),
    "a missing file": ("docs/math.md", "../missing.md", "../missing.md"),
    "outside the repository": ("docs/math.md", "../../../etc/hosts", "../../../etc/hosts"),
}  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_links_lead_to_the_place_on_the_site(name):
    page, link, expected = LINKS[name]
    assert with_site_links(f"[text]({link})", ROOT / page) == f"[text]({expected})"


def test_an_embedded_picture_is_no_link():
    text = f"![picture](data:image/png;base64,{'A' * 5000})"
    assert with_site_links(text, ROOT / "examples/notebooks/library.ipynb") == text


def test_indexing_in_code_is_no_link():
    text = "```python\nweights[row](column)\n```"
    assert with_site_links(text, ROOT / "docs/math.md") == text


def test_every_document_of_the_repository_is_a_page():
    folders = ("docs", "examples", "studies", "benchmarks")
    expected = {"overview.md", "contributing.md", "changelog.md"}
    for folder in folders:
        expected |= {site_path(path) for path in (ROOT / folder).rglob("*.md")}
    pages = set(document_texts())
    assert pages >= expected
    assert pages - expected == {
        f"examples/notebooks/{name}.md" for name in ("library", "demo", "trl")
    }


def test_linked_code_is_shown_with_its_language():
    text = source_texts()["source/examples/minimal/grpo.py.md"]
    assert "\n# grpo.py\n\n`examples/minimal/grpo.py`\n\n`````python\n" in text
    assert "slime_tis.correct(" in text


def test_a_notebook_keeps_text_code_output_picture(tmp_path):
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["0.25\n"]},
        {"output_type": "display_data", "data": {"image/png": "QUJD\n", "text/plain": ["<x>"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["print(0.25)"], "outputs": outputs},
    ]
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    lines = [line for line in notebook_text(path).splitlines() if line]
    code = ["`````python", "print(0.25)", "`````"]
    printed = ["`````text", "0.25", "`````"]
    picture = "![output of the cell](data:image/png;base64,QUJD)"
    assert lines == ["# Title", *code, *printed, picture]


def test_llms_txt_lists_sections_titles_first_sentences():
    navigation = [{"Start": ["index.md", {"Logs": "logs.md"}]}, {"Method": [{"M": ["math.md"]}]}]
    texts = {
        "index.md": "# Home\n\nRun `pip install .` first. More.\n",
        "logs.md": "<!-- a note -->\n# My `logs`\n\n```\nls\n```\n\n**See** [this](x.md): so.\n",
        "math.md": "# Formulas\n\n| a | b |\n|---|---|\n",
    }
    assert llms_text(navigation, texts).splitlines()[3:] == [
        "",
        "## Start",
        "",
        "- [Home](index.md): Run pip install . first.",
        "- [My logs](logs.md): See this: so.",
        "",
        "## Method",
        "",
        "- [Formulas](math.md): Formulas",
    ]
