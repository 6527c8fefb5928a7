"""One address, one version, one list of suites, and workflows without surplus rights."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from slime_tis import __version__
from tools.release.check import (
    Failed,
    Smoke,
    check_contents,
    check_ready_to_publish,
    check_smoke,
    version_of,
    with_absolute_links,
)

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = PROJECT["urls"]["Source"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SUITES = [line.split() for line in (ROOT / ".ci/suites").read_text().splitlines() if line[0] != "#"]


def tracked_texts():
    """Path and text of every tracked file of text."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, names):
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".csv"):
            yield name, path.read_text(errors="replace")


def test_every_address_of_the_repository_is_that_of_pyproject():
    pattern = re.compile(r"https://github\.com/[\w.-]+/slime_tis\b")
    wrong = []
    for name, text in tracked_texts():
        wrong += [(name, address) for address in pattern.findall(text) if address != SOURCE]
    assert wrong == []


@pytest.mark.parametrize("name", ["Source", "Documentation", "Issues", "Changelog"])
def test_urls_of_the_project_are_in_the_repository(name):
    assert PROJECT["urls"][name].startswith(SOURCE)


def test_the_version_is_the_newest_of_the_changelog():
    (first, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first == __version__ == version_of(ROOT)


def test_the_citation_names_the_authors_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["authors"] == PROJECT["authors"] == [{"name": "slime_tis contributors"}]
    assert citation["repository-code"] == SOURCE
    # It would be a second place of the version.
    assert "version" not in citation


def test_every_suite_is_a_make_target():
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [suite for suite, when in SUITES if suite not in targets] == []


def test_every_suite_runs_on_pushes_or_at_night():
    assert {when for suite, when in SUITES} == {"push", "nightly"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_commits(path):
    actions = re.findall(r"uses: (\S+)", path.read_text())
    pattern = re.compile(r"[\w./-]+@[0-9a-f]{40}|\./\.github/workflows/\w+\.yml")
    assert [action for action in actions if not pattern.fullmatch(action)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_grants_nothing_that_its_jobs_do_not_name(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    assert all("permissions" in job for job in workflow["jobs"].values())


def test_only_publishing_jobs_have_more_than_reading_rights():
    rights = {}
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            if job["permissions"] != {"contents": "read"}:
                rights[f"{path.stem}.{name}"] = job["permissions"]
    assert rights == {
        "documentation.publish": {"pages": "write", "id-token": "write"},
        "release.publish": {"id-token": "write"},
    }


def test_workflows_call_existing_make_targets():
    targets = re.findall(r"^([.\w/-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = []
    for path in WORKFLOWS:
        called += re.findall(r"^\s*(?:- run: )?make ([.\w/-]+)$", path.read_text(), re.MULTILINE)
    assert sorted(called) == [".venv-release/.installed", "site"]
    assert [name for name in called if name not in targets] == []


def repository(directory, *, owner="somebody", heading="1.2.0 (2027-01-31)"):
    """The files that a release is checked by."""
    (directory / "slime_tis").mkdir()
    (directory / "slime_tis/__init__.py").write_text('__version__ = "1.2.0"\n')
    (directory / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## {heading}\n\n## 1.1.0 (2026-12-01)\n"
    )
    (directory / "pyproject.toml").write_text(
        f'[project.urls]\nSource = "https://github.com/{owner}/slime_tis"\n'
    )
    return directory


def test_a_release_with_its_tag_is_accepted(tmp_path):
    check_ready_to_publish(repository(tmp_path), "v1.2.0")


OTHER = SOURCE.replace(SOURCE.split("/")[3], "somebody")
"""The address of `repository`."""
LINKS = {
    "page": ("[a](docs/a.md#b)", f"[a]({OTHER}/blob/v1.2.0/docs/a.md#b)"),
    "image": ("![a](b.png)", f"![a]({OTHER}/raw/v1.2.0/b.png)"),
    "address": ("[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)"),
    "section": ("[a](#limits)", "[a](#limits)"),
}


@pytest.mark.parametrize(("text", "expected"), LINKS.values(), ids=LINKS)
def test_links_of_the_page_on_the_index(text, expected, tmp_path):
    assert with_absolute_links(text, repository(tmp_path)) == expected


UNREADY = {
    "placeholder": ({"owner": "OWNER"}, "v1.2.0", "has the placeholder"),
    "other tag": ({}, "v1.2.1", "the tag is 'v1.2.1', but .* the version 1.2.0"),
    "tag without v": ({}, "1.2.0", "the tag is '1.2.0'"),
    "unreleased": ({"heading": "1.2.0 (unreleased)"}, "v1.2.0", "give 1.2.0 its date"),
    "older heading": ({"heading": "1.1.9 (2027-01-31)"}, "v1.2.0", "begins with '1.1.9"),
}


@pytest.mark.parametrize(("changes", "tag", "message"), UNREADY.values(), ids=UNREADY)
def test_what_must_not_be_published_is_refused(changes, tag, message, tmp_path):
    with pytest.raises(Failed, match=message):
        check_ready_to_publish(repository(tmp_path, **changes), tag)


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("slime_tis/__init__.py", "")
    return path


def test_files_outside_the_package_are_not_expected_in_the_wheel(wheel):
    check_contents(wheel, [Path("slime_tis/__init__.py"), Path("docs/math.md")])


def test_a_wheel_without_a_file_of_the_package_is_refused(wheel):
    files = [Path("slime_tis/__init__.py"), Path("slime_tis/page.css")]
    with pytest.raises(Failed, match=r"the wheel lacks \['slime_tis/page.css'\]"):
        check_contents(wheel, files)


SMOKE_FAULTS = {
    "status": Smoke(("python", "-c", "print(1); exit(1)"), "1"),
    "output": Smoke(("python", "-c", "print(2)"), "1"),
}


@pytest.mark.parametrize("smoke", SMOKE_FAULTS.values(), ids=SMOKE_FAULTS)
def test_a_command_with_another_status_or_output_fails(smoke, tmp_path):
    with pytest.raises(Failed, match="instead of 0, or without '1'"):
        check_smoke(smoke, Path(sys.executable).parent, tmp_path)


def test_a_command_as_expected_passes(tmp_path):
    smoke = Smoke(("python", "-c", "print(1); exit(2)"), "1", status=2)
    check_smoke(smoke, Path(sys.executable).parent, tmp_path)
