"""Draws one-line mutants of the core and runs the tests of their files.

A mutant that no test notices survives.

    .venv/bin/python tools/mutation/run.py --sample 200 --out mutants.jsonl

The tree is copied, and only the copy is changed. One process imports torch, transformers and pytest
and is forked for each mutant, one after another. `equivalent.toml` lists mutants that change
nothing that can be observed.
"""

import argparse
import collections
import contextlib
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import mutants

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
MEMORY = 16 << 30
"""Bytes of address space of a mutant's tests."""

SAMPLE_TESTS = [
    "tests/rollout/test_sample.py",
    "tests/rollout/test_dump.py",
    "tests/rollout/test_custom_generate.py",
]
RUN_TESTS = [
    "tests/test_rollout_hooks.py",
    "tests/test_asynchronous.py",
    "tests/test_truncated_sampling.py",
]
CHECKPOINT_TESTS = ["tests/storage/test_checkpoints.py", "tests/megatron/test_checkpoint.py"]
AGENT_TESTS = ["tests/test_agents.py", "tests/rollout/sglang/test_functions.py"]
SGLANG_TESTS = [
    "tests/rollout/sglang/test_schema.py",
    "tests/rollout/sglang/test_client.py",
    "tests/rollout/sglang/test_generation.py",
    "tests/rollout/sglang/test_sampling_masks.py",
    "tests/rollout/sglang/test_functions.py",
    "tests/rollout/sglang/test_experts.py",
    "tests/rollout/sglang/test_dispatch.py",
]

POLICY_TESTS = [
    "tests/policy/test_losses.py",
    "tests/policy/test_policy_loss.py",
    "tests/policy/test_advantages.py",
    "tests/policy/test_custom_loss.py",
    "tests/policy/test_extreme_ratios.py",
    "tests/policy/test_losses_2026.py",
    "tests/test_custom.py",
    "tests/integrations/test_losses.py",
    "tests/correction/test_config.py",
]

TESTS = {
    "slime_tis/correction/*.py": [
        "tests/correction/test_methods.py",
        "tests/correction/test_mean.py",
        "tests/correction/test_divergence.py",
        "tests/correction/test_metrics.py",
        "tests/correction/test_config.py",
        "tests/correction/test_dispatch.py",
        "tests/correction/test_trimming.py",
        "tests/correction/test_context_parallel.py",
        "tests/policy/test_losses.py",
        "tests/integrations/test_losses.py",
        "tests/correction/test_safety.py",
        "tests/correction/test_reference.py",
    ],
    "slime_tis/correction/reference.py": ["tests/correction/test_reference.py"],
    "slime_tis/policy/*.py": POLICY_TESTS,
    "slime_tis/policy/config.py": [*POLICY_TESTS, "tests/test_docs.py"],
    "slime_tis/trainer/sample_pipeline.py": [
        *SAMPLE_TESTS,
        "tests/reporting/test_progress.py",
        *RUN_TESTS,
    ],
    "slime_tis/trainer/data/sample.py": [
        *SAMPLE_TESTS,
        "tests/rollout/test_routing.py",
        *SGLANG_TESTS,
        *RUN_TESTS,
    ],
    "slime_tis/trainer/engines/servers/answers.py": SGLANG_TESTS,
    "slime_tis/trainer/engines/sglang/sglang_answers.py": SGLANG_TESTS,
    "slime_tis/trainer/engines/sglang/sglang_api.py": SGLANG_TESTS,
    "slime_tis/trainer/engines/servers/client.py": SGLANG_TESTS,
    "slime_tis/trainer/engines/servers/responses.py": SGLANG_TESTS,
    "slime_tis/trainer/agents/custom_generate.py": [*SAMPLE_TESTS, *AGENT_TESTS],
    "slime_tis/trainer/agents/sampled_tokens.py": [
        *SAMPLE_TESTS,
        *AGENT_TESTS,
        "tests/rollout/sglang/test_experts.py",
    ],
    "slime_tis/trainer/storage/*.py": [
        "tests/storage",
        "tests/megatron/test_checkpoint.py",
        "tests/cli",
    ],
    "slime_tis/trainer/checkpointer.py": [
        *CHECKPOINT_TESTS,
        "tests/test_custom_documentation.py",
        "tests/faults/test_checkpoints.py",
        "tests/test_stop_signals.py",
        "tests/test_train.py",
    ],
    "slime_tis/trainer/megatron/sharded_checkpoint.py": [
        *CHECKPOINT_TESTS,
        "tests/test_stop_signals.py",
    ],
}
"""Files or folders of tests for each file of the core, the fast ones first; the last pattern that
matches counts."""


def main() -> None:
    """Runs the sample, writes one line of JSON per mutant, and prints survivors and rates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sample", type=int, default=200, help="number of mutants, at most one per line"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draw, which edits elsewhere do not change"
    )
    parser.add_argument(
        "--only", default="", help="only mutants whose path, code or change contains this text"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="file of results; a second run first tries the test that failed here",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        copy = Path(directory)
        copy_tree(copy)
        preload(copy)
        sample = draw(options.sample, options.seed, options.only)
        results = run_sample(sample, copy, options.out)
    print_summary(results)


def draw(count: int, seed: int, only: str) -> list[tuple[mutants.Mutant, list[str]]]:
    """Returns the drawn mutants and their tests; unchanged lines of code keep their mutants."""
    tests_of = {}
    for pattern, tests in TESTS.items():
        for path in ROOT.glob(pattern):
            tests_of[path.relative_to(ROOT)] = tests
    candidates = []
    for path, tests in tests_of.items():
        candidates += [(mutant, tests) for mutant in mutants.mutants_of(ROOT, path)]
    candidates.sort(key=lambda candidate: candidate[0].rank(seed))
    one_per_line: dict[tuple[Path, int], tuple[mutants.Mutant, list[str]]] = {}
    for mutant, tests in candidates:
        one_per_line.setdefault((mutant.path, mutant.line), (mutant, tests))
    matching = [candidate for candidate in one_per_line.values() if only in candidate[0].name]
    print(
        f"{len(candidates)} possible mutants, {len(matching)} lines, {min(count, len(matching))}"
        " drawn",
        flush=True,
    )
    # In the order of the source, so that the printed results are easy to read.
    return sorted(
        matching[:count], key=lambda candidate: (str(candidate[0].path), candidate[0].line)
    )


def run_sample(
    sample: list[tuple[mutants.Mutant, list[str]]], copy: Path, out: Path | None
) -> list[dict]:
    """Returns the result of each mutant."""
    equivalent = {entry["name"] for entry in tomllib.loads(EQUIVALENT.read_text())["mutant"]}
    killers = {}
    if out is not None and out.exists():
        earlier = [json.loads(line) for line in out.read_text().splitlines()]
        killers = {result["name"]: result["killer"] for result in earlier if result["killer"]}
    limits: dict[str, float] = {}
    results = []
    for mutant, tests in sample:
        start = time.monotonic()
        status, killer = "equivalent", ""
        if mutant.name not in equivalent:
            first = [killers[mutant.name]] if mutant.name in killers else []
            status, killer = run_mutant(mutant, [*first, *tests], copy, limits)
        results.append(
            {"name": mutant.name, "line": mutant.line, "status": status, "killer": killer}
        )
        seconds = time.monotonic() - start
        print(
            f"{status:10} {seconds:5.1f} s  {mutant.path}:{mutant.line}: {mutant.change}",
            flush=True,
        )
        if out is not None:
            out.write_text(
                "".join(json.dumps(result, ensure_ascii=False) + "\n" for result in results)
            )
    return results


def run_mutant(
    mutant: mutants.Mutant, tests: list[str], copy: Path, limits: dict[str, float]
) -> tuple[str, str]:
    """Runs files of tests with one fault in the copy until one notices it: (status, that file)."""
    file = copy / mutant.path
    source = file.read_bytes()
    for test in tests:
        if test not in limits:
            limits[test] = time_limit(test, copy)
        if not limits[test]:
            continue
        file.write_bytes(mutant.mutate(source))
        status = run_tests(test, copy, limits[test])
        file.write_bytes(source)
        if status != "survived":
            return status, test
    return "survived", ""


def time_limit(test: str, copy: Path) -> float:
    """Returns four times a test file's seconds without a fault, plus 20; 0 if the file fails."""
    start = time.monotonic()
    if run_tests(test, copy, limit=900) != "survived":
        print(
            f"{test} is not used, because it fails without a mutant:\n{(copy / 'log').read_text()}",
            file=sys.stderr,
        )
        return 0.0
    seconds = time.monotonic() - start
    print(f"{'baseline':10} {seconds:5.1f} s  {test}", flush=True)
    return 4 * seconds + 20


def run_tests(test: str, copy: Path, limit: float) -> str:
    """Returns killed, survived or timeout."""
    end = time.monotonic() + limit
    child = os.fork()
    if child == 0:
        _run_pytest(test, copy)
    status = "timeout"
    while time.monotonic() < end:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            status = "survived" if code == 0 else "killed"
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also processes that the tests have left
    if status == "timeout":
        os.waitpid(child, 0)
    return status


def _run_pytest(test: str, copy: Path) -> None:
    """Becomes a pytest process in the copy; never returns."""
    os.setsid()
    with open(copy / "log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(copy)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[0] = str(copy)
    import pytest

    arguments = [
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--tb=line",
        "--hypothesis-seed=0",
    ]
    arguments.append(f"--basetemp={copy / 'pytest'}")
    code = 3
    try:
        code = int(pytest.main([*arguments, test]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def copy_tree(copy: Path) -> None:
    """Copies the tracked files and compiles them, so that changes are noticed by content."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in names.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    # By default Python compares times and sizes, which a mutant of the same length may share with
    # its original.
    compiled = [
        sys.executable,
        "-m",
        "compileall",
        "-q",
        "--invalidation-mode",
        "checked-hash",
        "slime_tis",
    ]
    subprocess.run(compiled, cwd=copy, check=True)


def preload(copy: Path) -> None:
    """Imports the packages of other projects that the trainer imports, which no mutant changes."""
    listing = "import sys, hypothesis, pytest, slime_tis.trainer.train; print(*sys.modules)"
    command = [sys.executable, "-c", listing]
    names = subprocess.run(
        command, cwd=copy, check=True, capture_output=True, text=True
    ).stdout.split()
    for name in names:
        # slime_tis patches megatron-core before it imports it, and is what the mutants change.
        if name.partition(".")[0] in ("slime_tis", "megatron", "__main__"):
            continue
        with contextlib.suppress(ImportError, AttributeError):
            importlib.import_module(name)
    gc.freeze()


def print_summary(results: list[dict]) -> None:
    """Prints counts by folder, and the survivors."""
    print("\ndrawn killed survived equivalent timeout  files")
    folders: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        path = result["name"].partition(":")[0]
        for folder in (path if "/trainer/" in path else str(Path(path).parent), "all"):
            folders[folder][result["status"]] += 1
    for folder, counts in folders.items():
        print(f"{counts.total():5} {counts['killed']:6} {counts['survived']:8} ", end="")
        print(f"{counts['equivalent']:10} {counts['timeout']:7}  {folder}")
    for result in results:
        if result["status"] == "survived":
            print(f"survived, line {result['line']}: {result['name']}")


if __name__ == "__main__":
    main()
