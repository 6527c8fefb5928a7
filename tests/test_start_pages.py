"""The start pages of the site: one screen each, with a result that the program gives."""

import contextlib
import io
import json
import re

import pytest
import yaml

from slime_tis import RolloutCorrectionConfig
from slime_tis.main import main
from tests.runs import ROOT
from tools.site.repository_pages import document_texts

START = ROOT / "docs" / "start"
PAGES = ["slime", "verl", "trl", "own_loop", "logs"]
SCREEN = 50
"""Lines of a page; code and outputs are counted too."""


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a start page in a language, "" for plain ones."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (START / f"{page}.md").read_text(), re.M | re.S)
    return [text for name, text in fenced if name == language]


def lines_in_order(shown: str, output: str) -> bool:
    """Whether the output has the shown lines in their order; … stands for left out lines."""
    remaining = iter(output.splitlines())
    lines = [line for line in shown.splitlines() if line.strip() != "…"]
    return all(line in remaining for line in lines)


@pytest.mark.parametrize("page", PAGES)
def test_a_start_page_is_one_screen(page):
    assert len((START / f"{page}.md").read_text().splitlines()) <= SCREEN


@pytest.mark.parametrize("page", PAGES)
def test_the_home_page_links_a_start_page(page):
    assert f"](start/{page}.md)" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("page", ["verl", "own_loop"])
def test_the_python_of_a_start_page_prints_its_result(page):
    (code,) = blocks(page, "python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() in blocks(page, "")


def test_port_prints_the_command_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (script,) = blocks("slime", "bash")
    (tmp_path / "run.sh").write_text(script)
    assert main(["port", "run.sh"]) == 0
    assert lines_in_order(blocks("slime", "")[-1], capsys.readouterr().out)


@pytest.mark.parametrize("command", ["diagnose", "recommend"])
def test_the_commands_on_logs_print_the_page(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = (START / "logs.md").read_text()
    (line,) = re.findall(rf"slime-tis ({command} examples/notebooks/\S+[^`\n]*)", text)
    assert main(line.split()) == 0
    shown = {"diagnose": blocks("logs", "")[1], "recommend": blocks("logs", "")[-1]}
    assert lines_in_order(shown[command], capsys.readouterr().out)


def test_the_overrides_for_verl_are_options():
    (overrides,) = [block for block in blocks("verl", "") if block.startswith("+algorithm")]
    options = {}
    for line in overrides.splitlines():
        name, value = line.removeprefix("+algorithm.rollout_correction.slime_tis.").split("=")
        options[name] = yaml.safe_load(value)
    assert RolloutCorrectionConfig(**options).rs_z_score == 3.0


def test_the_result_of_trl_is_that_of_its_example():
    (result,) = [block for block in blocks("trl", "") if block.startswith("held-out")]
    before, after = re.findall(r"\d\.\d+", result)
    example = (ROOT / "examples" / "trl" / "README.md").read_text()
    assert f"| {before} | {after} |" in example


def test_the_example_file_is_what_the_page_says():
    path = ROOT / "examples" / "notebooks" / "log_probs.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == 384
    ages = {sample["step"] - sample["weight_versions"][0] for sample in samples}
    assert ages == {0, 1, 2}
    assert path.stat().st_size < 200_000


def test_every_page_is_in_the_navigation():
    """`make site` refuses a page that mkdocs.yml does not name."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1])
    named = re.findall(r"[\w/]+\.md", str(navigation))
    assert sorted(named) == sorted(document_texts())


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 175
