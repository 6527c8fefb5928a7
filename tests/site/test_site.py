"""The built site: strict, complete, and without any other host.

`make test-site` runs these tests in the environment of the site, which has no torch.
"""

import ast
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from tools.site.repository_pages import ROOT, document_texts

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")
# the theme announces its successor, a Rust program, in every build
ENVIRONMENT = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
ELSEWHERE = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=[\"']?https?:")


def build(*options: str) -> subprocess.CompletedProcess[str]:
    """Runs mkdocs in the root of the repository."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *options]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site") / "html"
    ended = build("--site-dir", str(folder))
    assert ended.returncode == 0, ended.stderr
    return folder


def public_names(module: str) -> list[str]:
    """The names in `__all__`, by the source; nothing is imported."""
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{source} has no __all__")


REFERENCE = {
    "library": [f"slime_tis.{name}" for name in public_names("slime_tis")],
    "integrations": [
        "slime_tis.integrations.trl.RolloutCorrectionMixin",
        "slime_tis.integrations.tinker.corrected_loss",
        "slime_tis.integrations.losses.NemoLoss",
        "slime_tis.integrations.arguments.add_rollout_correction_arguments",
        "slime_tis.integrations.verl_plugin",
        "slime_tis.integrations.verl.compute_rollout_correction_and_rejection_mask",
        "slime_tis.integrations.verl_config.RolloutCorrectionConfig.to_config",
    ],
    "custom_tis": [
        "custom_tis.template.soft_tis",
        "custom_tis.tis.vanilla_tis",
        "custom_tis.mis.compute_mis_weights_with_cp",
        "custom_tis.icepop.icepop",
        "slime_tis.integrations.slime.config_from_args",
    ],
    "user_functions": [
        "slime_tis.trainer.data.sample.Sample.weight_versions",
        "slime_tis.user_functions.table.Signature",
        "slime_tis.user_functions.load_function",
    ],
    "policy": ["slime_tis.policy.losses.ppo_clip", "slime_tis.policy.advantages.grpo"],
    "dumps": [
        "slime_tis.analysis.dumps.readers.read",
        "slime_tis.analysis.dumps.table.TokenTable.rollout_log_prob",
        "slime_tis.analysis.dumps.table.TOKEN_COLUMNS",
        "slime_tis.analysis.dumps.what_if.what_if",
    ],
}


@pytest.mark.parametrize("page", REFERENCE)
def test_the_reference_has_every_name(site, page):
    html = (site / "reference" / f"{page}.html").read_text()
    missing = [name for name in REFERENCE[page] if f'id="{name}"' not in html]
    assert missing == []


def test_docstrings_of_options_are_in_the_reference(site):
    html = (site / "reference" / "library.html").read_text()
    option = html.split('id="slime_tis.RolloutCorrectionConfig.tis_upper_bound"')[1]
    assert "Upper bound" in option[:3000]


def test_no_page_loads_anything_from_elsewhere(site):
    pages = [page for page in site.rglob("*.html") if ELSEWHERE.search(page.read_text())]
    assert pages == []


def test_pages_of_studies_are_in_the_search(site):
    index = (site / "search" / "search_index.json").read_text()
    for place in ("studies/collapse/index.html", "examples/notebooks/library.html", "flags.html"):
        assert f'"location":"{place}' in index


def test_code_is_not_in_the_search(site):
    assert (site / "source/examples/minimal/grpo.py.html").exists()
    assert '"location":"source/' not in (site / "search" / "search_index.json").read_text()


def test_llms_txt_links_the_markdown_of_every_page(site):
    lines = (site / "llms.txt").read_text()
    links = re.findall(r"^- \[.+?\]\(([^)]+)\): .", lines, re.M)
    assert sorted(links) == sorted(document_texts())
    assert (site / "studies/collapse/README.md").read_text().startswith("# Collapse study")


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("missing.md", "contains a link 'missing.md', but the target is not found"),
        ("#missing", "contains a link '#missing', but there is no such anchor"),
        ("other.md#missing", "does not contain an anchor '#missing'"),
        ("folder", "contains an unrecognized relative link 'folder'"),
    ],
    ids=["page", "anchor", "anchor of another page", "folder"],
)
def test_a_broken_link_ends_the_build(tmp_path, link, message):
    """The rules of mkdocs.yml, on two pages."""
    rules = yaml.safe_load(re.search(r"^validation:\n(?:  .+\n)+", CONFIG, re.M)[0])
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text(f"# Home\n\n[text]({link})\n")
    (pages / "other.md").write_text("# Other\n")
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump({"site_name": "two pages", **rules}))
    ended = build("-f", str(tmp_path / "mkdocs.yml"))
    assert ended.returncode == 1
    assert message in ended.stderr


CONFIG = (ROOT / "mkdocs.yml").read_text()


@pytest.fixture(scope="module")
def address(site):
    """The address of a server of the site on this machine."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=[1280, 390], ids=["desktop", "phone"])
def tab(browser, address, request):
    """A tab of a width; no page may write to the console or load from another host."""
    opened = browser.new_page(viewport={"width": request.param, "height": 844})
    troubles = []
    opened.on("console", lambda message: troubles.append(message.text))
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("request", lambda made: troubles.append(made.url) if _is_foreign(made.url) else None)
    opened.address = address
    yield opened
    assert troubles == []
    opened.close()


def _is_foreign(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1", "data:", "blob:"))


SHOWN = [
    "index",
    "start/slime",
    "gallery",
    "reference/library",
    "papers",
    "examples/notebooks/library",
]


@needs_browser
@pytest.mark.parametrize("name", SHOWN)
def test_a_page_is_not_wider_than_the_screen(tab, name):
    tab.goto(f"{tab.address}/{name}.html")
    root = "document.documentElement"
    assert tab.evaluate(f"{root}.scrollWidth - {root}.clientWidth") == 0


@needs_browser
def test_both_diagrams_are_drawn(tab):
    tab.goto(f"{tab.address}/architecture.html")
    # the theme replaces the text of a diagram by an element with the drawing
    tab.wait_for_function("document.querySelectorAll('div.mermaid').length == 2")
    heights = tab.evaluate(
        "[...document.querySelectorAll('div.mermaid')].map(each => each.clientHeight)"
    )
    assert min(heights) > 40


@needs_browser
def test_the_search_answers(tab):
    tab.goto(f"{tab.address}/index.html")
    if tab.viewport_size["width"] < 960:  # the theme hides the field behind a button
        tab.click("label[for=__search].md-header__button")
    tab.fill(".md-search__input", "veto")
    tab.wait_for_selector(".md-search-result__link")
    assert tab.locator(".md-search-result__link").count() >= 3
