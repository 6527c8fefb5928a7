"""The whole-step benchmark's own arithmetic, its table, and that its command lines are accepted."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from slime_tis.trainer.cli.arguments import configure

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
    steps = [9.0] * 5 + [seconds - 0.1, seconds, seconds + 0.2]
    return module.Run(steps=steps, parts={"generate": seconds / 4}, reward=0.5, response_len=11.5, warm_up=5, **options)


def setting(module, name="sort_digits", **options):
    return module.Setting(name=name, data=Path("data"), threads=2, steps=8, clock="wall", **options)


def test_rows_have_the_medians_and_their_ratio_to_trl(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "TABLE", tmp_path / "whole_step.csv")
    ours = "slime_tis, --use-rollout-logprobs"
    runs = {
        benchmark.TRL: [
            run(benchmark, seconds, versions={"torch": "2", "trl": "1"}, peak_memory=memory)
            for seconds, memory in ((0.4, 2000), (0.5, 1600), (0.9, 1000))
        ],
        ours: [run(benchmark, seconds, peak_memory=800) for seconds in (0.3, 0.2, 0.25)],
    }
    for _ in range(2):
        benchmark.append_rows(runs, setting(benchmark))
    with open(tmp_path / "whole_step.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == [benchmark.TRL, ours] * 2
    assert [row["median_step_s"] for row in rows[:2]] == ["0.5000", "0.2500"]
    assert [row["times_trl"] for row in rows[:2]] == ["1.000", "0.500"]
    assert rows[0]["versions"] == "torch==2 trl==1" and rows[0]["rounds"] == "3" and rows[0]["machine"]
    assert [row["peak_memory_mb"] for row in rows[:2]] == ["1600", "800"]
    assert [row["memory_times_trl"] for row in rows[:2]] == ["1.000", "0.500"]
    assert [rows[0][name] for name in ("task", "clock", "response_len")] == ["sort_digits", "wall", "11.5"]
    benchmark.report(runs, setting(benchmark))
    assert "× 0.50" in capsys.readouterr().out.splitlines()[2]


@pytest.mark.parametrize("name", ["sort_digits", "smollm2"])
def test_our_command_lines_are_accepted(benchmark, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (tmp_path / "train.jsonl").write_text('{"prompt": "21>", "label": "12"}\n')
    task = benchmark.TASKS[name]
    reward = tmp_path / "benchmarks" / "peers"  # relative to the repository, where contenders run
    reward.mkdir(parents=True)
    (reward / "task.py").write_text((ROOT / "benchmarks" / "peers" / "task.py").read_text())
    line = [*benchmark.our_flags(task), "--hf-checkpoint", "checkpoint", "--prompt-data", "train.jsonl"]
    decoupled, bypass = (
        configure([*line, *flags.split(), "--num-rollout", "40", "--num-threads", "2"], {})
        for flags in benchmark.OURS.values()
    )
    assert decoupled.loop.global_batch_size == bypass.loop.global_batch_size == task.prompts * task.group
    assert decoupled.megatron.micro_batch_size == task.micro_batch
    assert decoupled.correction.use_tis and decoupled.correction.rs_veto_threshold == 1e-4
    assert bypass.correction.use_rollout_logprobs and not bypass.correction.corrects
