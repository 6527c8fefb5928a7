"""What a row of a benchmark was measured on."""

import datetime
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CARRIED = ROOT / ".gpu"
"""What `make gpu-wheels` made for a machine without a network, where the checkout arrives without
.git."""
SOURCES = ("slime_tis", "custom_tis", "benchmarks", "tools/gpu", "tests")


def machine() -> str:
    """The processor's name; with its family and model, which generations of one name differ in."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    fields: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.machine())
    if "cpu family" not in fields:
        # Processors of Arm have none.
        return name
    return f"{name} (family {fields['cpu family']}, model {fields['model']})"


def provenance(model: str, rounds: int) -> dict[str, object]:
    """The first columns of a row: what was measured, when, on what; on one thread."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "threads": 1,
        "rounds": rounds,
        "torch": importlib.metadata.version("torch"),
        "model": model,
    }


@cache
def commit() -> str:
    """The commit of this checkout, short; where there is no git, of the one it was carried from."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        found = ""
    carried = CARRIED / "source.json"
    if found or not carried.is_file():
        return found
    source: dict[str, str] = json.loads(carried.read_text(encoding="utf-8"))
    return source["commit"] + ("" if source["digest"] == source_digest() else " with changes")


def source_digest() -> str:
    """Of all Python files whose results rows report."""
    digest = hashlib.sha256()
    for path in sorted(path for name in SOURCES for path in (ROOT / name).rglob("*.py")):
        digest.update(
            path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return digest.hexdigest()[:16]
