"""All Markdown pages: links lead somewhere, code parses, commands and flags exist, diagrams are well formed."""

import re

import pytest
import yaml

from slime_tis.trainer.cli.run_options import ALIASES, OPTIONS
from slime_tis.trainer.cli.slime_flags import ADVICE, FIXED, RENAMED, RESTATED
from tests.runs import ROOT

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page, language):
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.M | re.S)
    return [text for name, text in fenced if name == language]


def anchors(page):
    """The fragments of a page's headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


@each_page
def test_python_and_yaml_parse(page):
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")
    for text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)


@each_page
def test_commands_name_targets_scripts_and_modules_that_are_there(page):
    text = page.read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.M)) <= targets
    for script in re.findall(r"(?:python|bash) ((?:[\w.]+/)*\w+\.(?:py|sh))\b", text):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"python -m ((?:examples|slime_tis|benchmarks)[\w.]*)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


OTHER_PROGRAMS = """
--index-url --logdir --nnodes --no-build-isolation --nproc-per-node --shutdown-timeout --signal --signals-to-handle
--enable-deterministic-inference --enable-return-routed-experts --moe-runner-backend --log-ratio-scale --dtype
--compare --json --out --seeds --without-checkpoint --experts --prompts --steps --every --held-out --plant-at --engines
--device --stages --model --other-checkpoint --fail-on --demo
--world-size --gpu-memory --bandwidth --master-port --master-addr --node-rank
"""
"""Flags of tensorboard, pip, torchrun, Slurm, SGLang, pytest, examples/, benchmarks/, tools/, other `slime-tis …`."""


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent in (ROOT, ROOT / "docs") and page.name != "flags.md"],
    ids=lambda page: page.name,
)
def test_every_flag_exists(page):
    known = {"--" + name.replace("_", "-") for name in (*OPTIONS, *ALIASES)} | {"--help", *OTHER_PROGRAMS.split()}
    known |= {*FIXED, *RESTATED, *RENAMED, *(flag for flags in ADVICE for flag in flags.split())}
    known |= {f"--no-{name[2:]}" for name in known}
    found = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page.read_text()))
    assert {name for name in found - known if not name.startswith("--sglang-")} == set()  # those go to the servers


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_files_that_the_recipes_name_exist():
    paths = re.findall(r"`((?:slime_tis|docs|tests)/[\w/.]*)`", CONTRIBUTING)
    assert len(paths) > 20 and [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


def test_every_shape_suffix_is_in_the_notation_table():
    table = CONTRIBUTING.split("## Notation")[1].split("Lists of tensors")[0]
    known = set(re.findall(r"`_([A-Z]+)`", table))
    for path in (ROOT / "slime_tis").rglob("*.py"):
        found = set(re.findall(r"\b_?[a-z][a-z0-9_]*_([A-Z]{1,3})\b(?!\w)", path.read_text()))
        assert found <= known, f"{path}: {found - known}"
