"""The whole-step benchmark's own arithmetic, its table, and that its command lines are accepted."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from slime_tis.cli.arguments import configure

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("whole_step", ROOT / "benchmarks" / "whole_step.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(ROOT / "benchmarks")
        spec.loader.exec_module(module)
    return module


def run(module, seconds, **options):
    steps = [9.0] * module.WARM_UP + [seconds - 0.1, seconds, seconds + 0.2]
    return module.Run(steps=steps, parts={"generate": seconds / 4}, reward=0.5, **options)


def test_median_leaves_the_warm_up_out(benchmark):
    assert run(benchmark, 0.3).median == 0.3


def test_rows_have_the_medians_and_their_ratio_to_trl(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "TABLE", tmp_path / "whole_step.csv")
    ours = "slime_tis, --use-rollout-logprobs"
    runs = {
        benchmark.TRL: [run(benchmark, seconds, versions={"torch": "2", "trl": "1"}) for seconds in (0.4, 0.5, 0.9)],
        ours: [run(benchmark, seconds) for seconds in (0.3, 0.2, 0.25)],
    }
    for _ in range(2):
        benchmark.append_rows(runs, threads=2, steps=8)
    with open(tmp_path / "whole_step.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == [benchmark.TRL, ours] * 2
    assert [row["median_step_s"] for row in rows[:2]] == ["0.5000", "0.2500"]
    assert [row["times_trl"] for row in rows[:2]] == ["1.000", "0.500"]
    assert rows[0]["versions"] == "torch==2 trl==1" and rows[0]["rounds"] == "3" and rows[0]["machine"]
    benchmark.report(runs, threads=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split("  ") == ["", ours, "0.250", "(0.300 0.200 0.250)", "× 0.50"]
    assert lines[-1] == f"  {ours}  generate 62.5, rest 187.5"


def test_our_command_lines_are_accepted(benchmark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (tmp_path / "train.jsonl").write_text('{"prompt": "21>", "label": "12"}\n')
    line = [*benchmark.TASK_FLAGS.split(), "--hf-checkpoint", "checkpoint", "--prompt-data", "train.jsonl"]
    decoupled, bypass = (
        configure([*line, *flags.split(), "--num-rollout", "40", "--num-threads", "2"], {})
        for flags in benchmark.OURS.values()
    )
    assert decoupled.loop.global_batch_size == bypass.loop.global_batch_size == 256
    assert decoupled.correction.use_tis and decoupled.correction.rs_veto_threshold == 1e-4
    assert bypass.correction.use_rollout_logprobs and not bypass.correction.corrects
