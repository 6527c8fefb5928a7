"""What GPU machines run, and the whole-step benchmark: arithmetic, tables, and that command lines
are accepted."""

import csv
import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_steps
from slime_tis.trainer.cli.train_arguments import configure

ROOT = Path(__file__).parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(
        f"gpu_{name}", ROOT / "tools" / "gpu" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run, carry = load("run"), load("carry")


def make_wheel(directory, name, version, requires=()):
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {x}" for x in requires),
    ]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "answer = 42\n")
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(
            f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    return path


def test_every_stage_runs_something_that_exists():
    assert [stage.name for stage in run.STAGES] == ["engines", "train", "library", "smollm2"]
    for stage in run.STAGES:
        module = stage.command[1]
        assert module == "pytest" or (ROOT / (module.replace(".", "/") + ".py")).is_file()
        assert all((ROOT / word).exists() for word in stage.command if word.startswith("tests/"))
        assert 5 < stage.limit <= run.TOTAL < 600


def test_without_a_gpu_nothing_is_run(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.endswith("sees no GPU; nothing was run.\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Where the runner takes wheels from and writes to, with a torch that sees no GPU."""
    machine = {
        "gpu": None,
        "python": "3.12.3",
        "versions": {"torch": "2.11.0", "pytest-xdist": None},
    }
    monkeypatch.setattr(run, "probe", lambda python, environment: machine)
    monkeypatch.setattr(run, "CARRIED", tmp_path / ".gpu")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path


def test_without_wheels_nothing_is_run(machine, capsys):
    assert run.main(["--device", "cpu"]) == 2
    assert "run `make gpu-wheels` where there is an index" in capsys.readouterr().err


def stage(name, code, **options):
    return run.Stage(name=name, about="", limit=60, command=("-c", code), **options)


def test_stages_fail_alone(machine, monkeypatch):
    make_wheel(machine / ".gpu" / "wheels", "carried", "1.0")
    stages = (
        stage("fails", "import sys; print('it fails'); sys.exit(3)"),
        stage("skipped", "", needs=run.ROOT / "no such directory"),
        stage("imports", "import carried; assert carried.answer == 42"),
        stage("more", "import sys; assert sys.argv[1:] == ['--few']", rehearsal=("--few",)),
    )
    monkeypatch.setattr(run, "STAGES", stages)
    assert run.main(["--device", "cpu"]) == 1
    (log,) = (machine / "out").glob("gpu-*.log")
    assert "it fails\n" in log.read_text() and "1 of 5 stages failed" in log.read_text()
    rows = list(csv.DictReader((machine / "out" / "summary.csv").open()))
    assert [(row["stage"], row["result"], row["message"]) for row in rows] == [
        ("wheels", "passed", ""),
        ("fails", "failed", "exit status 3"),
        ("skipped", "skipped", "no such directory is not there"),
        ("imports", "passed", ""),
        ("more", "passed", ""),
    ]
    assert {(row["gpu_name"], row["torch"]) for row in rows} == {
        ("none, rehearsal on a CPU", "2.11.0")
    }
    assert run.main(["--device", "cpu", "--stages", "imports"]) == 0


@pytest.mark.parametrize("model", gpu_steps.MODELS)
def test_the_flags_of_the_runs_are_accepted(model, task):
    flags = [
        *task[:4],
        "--num-rollout",
        "1",
        *gpu_steps.COMMON.split(),
        *gpu_steps.MODELS[model].split(),
    ]
    arguments = configure(flags, {})
    assert arguments.megatron.bf16 and arguments.correction.use_tis
    assert arguments.rollout.rollout_precision == "bf16"


def test_finite_metrics_give_no_message():
    run = gpu_steps.Run(rows=[{"train/loss": 0.5, "step": 1}], peak_bytes=0)
    assert gpu_steps.nonfinite_metrics("a", run) == []


def test_a_nonfinite_metric_is_named_with_its_step():
    rows = [{"train/kl": 0.0}, {"train/kl": float("nan")}]
    run = gpu_steps.Run(rows=rows, peak_bytes=0)
    assert gpu_steps.nonfinite_metrics("b", run) == ["b: train/kl of step 2 is nan"]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location(
        "whole_step", ROOT / "benchmarks" / "whole_step.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(ROOT / "benchmarks")
        spec.loader.exec_module(module)
    return module


def timed_run(module, seconds, **options):
    steps = [9.0] * 5 + [seconds - 0.1, seconds, seconds + 0.2]
    return module.Run(
        steps=steps,
        parts={"generate": seconds / 4},
        reward=0.5,
        response_len=11.5,
        warm_up=5,
        **options,
    )


def setting(module, name="sort_digits", **options):
    return module.Setting(name=name, data=Path("data"), threads=2, steps=8, clock="wall", **options)


def test_rows_have_the_medians_and_their_ratio_to_trl(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "TABLE", tmp_path / "whole_step.csv")
    ours = "slime_tis, --use-rollout-logprobs"
    runs = {
        benchmark.TRL: [
            timed_run(benchmark, seconds, versions={"torch": "2", "trl": "1"}, peak_memory=memory)
            for seconds, memory in ((0.4, 2000), (0.5, 1600), (0.9, 1000))
        ],
        ours: [timed_run(benchmark, seconds, peak_memory=800) for seconds in (0.3, 0.2, 0.25)],
    }
    for _ in range(2):
        benchmark.append_rows(runs, setting(benchmark))
    with open(tmp_path / "whole_step.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == [benchmark.TRL, ours] * 2
    assert [row["median_step_s"] for row in rows[:2]] == ["0.5000", "0.2500"]
    assert [row["times_trl"] for row in rows[:2]] == ["1.000", "0.500"]
    assert (
        rows[0]["versions"] == "torch==2 trl==1" and rows[0]["rounds"] == "3" and rows[0]["machine"]
    )
    assert [row["peak_memory_mb"] for row in rows[:2]] == ["1600", "800"]
    assert [row["memory_times_trl"] for row in rows[:2]] == ["1.000", "0.500"]
    assert [rows[0][name] for name in ("task", "clock", "response_len")] == [
        "sort_digits",
        "wall",
        "11.5",
    ]
    benchmark.report(runs, setting(benchmark))
    assert "× 0.50" in capsys.readouterr().out.splitlines()[2]


@pytest.fixture
def contenders(benchmark, tmp_path, monkeypatch, request):
    """Our contenders of the task that the test names: the arguments of train.py, by name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    config = json.dumps({"architectures": ["Qwen3ForCausalLM"]})
    (tmp_path / "checkpoint" / "config.json").write_text(config)
    (tmp_path / "train.jsonl").write_text('{"prompt": "21>", "label": "12"}\n')
    # The task names its reward relative to the repository.
    peers = tmp_path / "benchmarks" / "peers"
    peers.mkdir(parents=True)
    (peers / "task.py").write_text((ROOT / "benchmarks" / "peers" / "task.py").read_text())
    flags = "--hf-checkpoint checkpoint --prompt-data train.jsonl --num-rollout 40 --num-threads 2"
    line = [*benchmark.our_flags(benchmark.TASKS[request.param]), *flags.split()]
    return {
        name: configure([*line, *correction.split()], {})
        for name, correction in benchmark.OURS.items()
    }


BOTH_TASKS = pytest.mark.parametrize("contenders", ["sort_digits", "smollm2"], indirect=True)


@BOTH_TASKS
def test_our_contenders_have_the_sizes_of_the_task(benchmark, contenders, request):
    task = benchmark.TASKS[request.node.callspec.params["contenders"]]
    for arguments in contenders.values():
        assert arguments.loop.global_batch_size == task.prompts * task.group
        assert arguments.megatron.micro_batch_size == task.micro_batch


@BOTH_TASKS
def test_the_decoupled_contender_corrects(contenders):
    correction = contenders["slime_tis, decoupled TIS + RS + veto"].correction
    assert correction.use_tis
    assert correction.rs_veto_threshold == 1e-4


@BOTH_TASKS
def test_the_bf16_contender_differs_only_in_precision(contenders):
    bf16 = contenders["slime_tis, the same in bf16"]
    fp32 = contenders["slime_tis, decoupled TIS + RS + veto"]
    assert (bf16.megatron.precision, bf16.rollout.rollout_precision) == ("bf16", "bf16")
    assert (fp32.megatron.precision, fp32.rollout.rollout_precision) == ("fp32", "fp32")
    assert bf16.correction == fp32.correction


@BOTH_TASKS
def test_the_bypass_contender_corrects_nothing(contenders):
    correction = contenders["slime_tis, --use-rollout-logprobs"].correction
    assert correction.use_rollout_logprobs
    assert not correction.corrects
