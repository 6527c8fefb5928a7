"""Logs of other programs, written by them or in their format, in the analysis commands."""

import csv
import gzip
import json
import math
import os
import time
import tracemalloc

import pytest
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerState

from slime_tis.analysis.diagnosis.metric_rules import SERIES
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.logs.log_table import KEPT_NAMES, LogTable
from slime_tis.analysis.logs.peer_metrics import PEER_METRICS
from slime_tis.analysis.logs.read_log import read_log
from slime_tis.analysis.report.overview import PANELS
from slime_tis.analysis.report.report_commands import LimitExceeded, diagnosis
from slime_tis.analysis.report.report_inputs import open_source
from slime_tis.health import METRIC_PREFIXES
from slime_tis.main import main
from tests.report.dumps import make_table

STEPS = 12
VALUES = [0.004 * 1.4**step for step in range(STEPS)]
"""Mean abs(Δ) of a run whose rollout engine misses every update."""
ABS = "train/train_rollout_logprob_abs_diff"
K3 = "train/mismatch_k3_kl"


def tensorboard(directory):
    writer = SummaryWriter(directory)
    for step, value in enumerate(VALUES):
        writer.add_scalar("policy/rollout_train_logprobs_abs_diff_mean", value, step)
    writer.close()
    return directory


def tensorboard_with_new_summaries(directory):
    """Scalars as tensors, which TensorFlow 2 and `new_style` write."""
    writer = SummaryWriter(directory)
    for step, value in enumerate(VALUES):
        writer.add_scalar(
            "policy/rollout_train_logprobs_abs_diff_mean", value, step, new_style=True
        )
    writer.close()
    return directory


def trainer_state(directory):
    rows = [
        {"step": i, "sampling/sampling_logp_difference/mean": value}
        for i, value in enumerate(VALUES)
    ]
    TrainerState(log_history=rows).save_to_json(str(directory / "trainer_state.json"))
    return directory


def last_checkpoint(directory):
    """As TRL leaves a run directory: the state is in its checkpoints."""
    for step in (10, 20):
        (directory / f"checkpoint-{step}").mkdir()
        trainer_state(directory / f"checkpoint-{step}")
        (directory / f"checkpoint-{step}" / "optimizer.pt").write_bytes(b"no dump")
    return directory


def console(directory):
    """As verl's LocalLogger prints, with Ray's prefix and with numpy's numbers."""
    path = directory / "train.log"
    lines = [
        f"(TaskRunner pid=7) step:{step} - global_seqlen/mean:1.0e+02 -"
        f" train/token_mult_prob_error:{form(math.exp(v))}"
        for step, (v, form) in enumerate(
            zip(VALUES, 6 * [str, "np.float64({})".format], strict=True)
        )
    ]
    path.write_text("\n".join(["Epoch 1: step:none", *lines, "step:99 - cut"]) + "\n")
    return path


def table(directory):
    path = directory / "export.csv"
    rows = [f"{step},{value},text" for step, value in enumerate(VALUES)]
    path.write_text("\n".join(["_step,debug/vllm_vs_local_logprob_diff_mean,name", *rows]) + "\n")
    return path


def chart_of_wandb(directory):
    """As W&B's page exports a chart, with the mark that Excel adds."""
    name = "run-1 - new - sampling/sampling_logp_difference/mean"
    path = directory / "wandb_export.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["Step", name, f"{name}__MIN", f"{name}__MAX"])
        writer.writerows([step, value, 9.0, 9.0] for step, value in enumerate(VALUES))
    return path


def chart_of_tensorboard(directory):
    path = directory / "run-a-tag-policy_rollout_train_logprobs_abs_diff_mean.csv"
    rows = [f"1732600000.{step},{step},{value}" for step, value in enumerate(VALUES)]
    path.write_text("\n".join(["Wall time,Step,Value", *rows]) + "\n")
    return path


WRITERS = (
    tensorboard,
    tensorboard_with_new_summaries,
    trainer_state,
    last_checkpoint,
    console,
    table,
    chart_of_wandb,
    chart_of_tensorboard,
)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_log_of_another_program_is_diagnosed(writer, tmp_path):
    path = writer(tmp_path)
    log = read_log(path)
    assert log is not None and [row["step"] for row in log.rows] == list(range(STEPS))
    assert [row[ABS] for row in log.rows] == pytest.approx(VALUES, rel=1e-6)
    text = diagnosis(str(path))
    assert "weights not updated" in text and "rollout/weight_staleness" in text


@pytest.mark.parametrize("name", PEER_METRICS)
def test_the_metrics_of_each_framework_are_known(name, tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(f"step,{name}\n" + "".join(f"{step},2.0\n" for step in range(STEPS)))
    log = read_log(path)
    assert log is not None and log.framework == PEER_METRICS[name].framework
    assert log.rows[0][PEER_METRICS[name].metric] == PEER_METRICS[name].convert(2.0)


def test_a_log_keeps_what_the_rules_read():
    names = {
        name if "/" in name else prefix + name for name in SERIES for prefix in METRIC_PREFIXES
    }
    assert names <= KEPT_NAMES


def test_a_log_keeps_what_the_report_draws():
    drawn = {name for _, _, _, labels in PANELS for name in labels if not name.endswith("/")}
    assert {name.replace("*", prefix) for name in drawn for prefix in METRIC_PREFIXES} <= KEPT_NAMES


NO_METRICS = {
    "empty": ("export.csv", ""),
    "no step": ("export.csv", "a,b\n1,2\n"),
    "NUL": ("export.csv", "\x00\n\x00"),
    "a list": ("trainer_state.json", "[]"),
    "a number as history": ("trainer_state.json", '{"log_history": 3}'),
    "numbers in the history": ("trainer_state.json", '{"log_history": [3]}'),
    "no events": ("events.out.tfevents.1", "nothing that is an event"),
    "no lines of steps": ("train.log", "no metrics"),
    "only a header": ("run-1.wandb", ":W&B"),
    "no header": ("run-1.wandb", "W&B:"),
}


@pytest.mark.parametrize(("name", "content"), NO_METRICS.values(), ids=NO_METRICS)
@pytest.mark.parametrize("command", ["diagnose", "report", "recommend", "what-if"])
def test_a_log_without_metrics_is_refused(command, name, content, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    for path in (tmp_path, tmp_path / name):
        assert main([command, str(path)]) == 2
        message = capsys.readouterr().err.strip()
        assert name in message and len(message.splitlines()) == 1


def healthy_log(directory):
    lines = [f"step:{step} - rollout_corr/k3_kl:0.0000001" for step in range(20)]
    (directory / "train.log").write_text("\n".join(lines) + "\n")


def own_checkpoint(directory):
    (directory / "iter_0000002").mkdir()
    (directory / "iter_0000002" / "trainer_state.json").write_text('{"consumed": 3}')
    (directory / "trainer_state.json").write_text('{"consumed": 3}')


OTHER_FILES = {
    "a healthy log": healthy_log,
    "TRL's state": lambda directory: trainer_state(directory),
    "notes": lambda directory: (directory / "notes.txt").write_text("step 3 was odd\n"),
    "results": lambda directory: (directory / "results.csv").write_text("method,accuracy\na,1\n"),
    "a server's log": (
        lambda directory: (directory / "sglang.log").write_text("[2026] Decode batch\n")
    ),
    "a checkpoint": own_checkpoint,
    "a pipe": lambda directory: os.mkfifo(directory / "pipe.csv"),
}


CONSOLE_LINE = "step:1 - rollout_corr/k3_kl:0.001\n"
NOT_UTF_8 = {
    "UTF-16": ("train.log", CONSOLE_LINE.encode("utf-16"), "convert it to UTF-8"),
    "CSV in UTF-16": ("metrics.csv", "step,loss\n1,2\n".encode("utf-16"), "convert it to UTF-8"),
    "gzip": ("train.log", gzip.compress(CONSOLE_LINE.encode()), "unpack it"),
}


@pytest.mark.parametrize(("name", "content", "advice"), NOT_UTF_8.values(), ids=NOT_UTF_8)
def test_a_log_that_is_no_utf_8_is_refused(name, content, advice, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    assert main(["diagnose", str(tmp_path / name)]) == 2
    message = capsys.readouterr().err.strip()
    assert advice in message and len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "advice"), [("export.csv", "a column step"), ("train.log", "step:3")]
)
def test_the_message_says_what_a_log_must_have(name, advice, tmp_path, capsys):
    (tmp_path / name).write_text("a;b\n1;2\n")
    assert main(["diagnose", str(tmp_path / name)]) == 2
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize("write_other", OTHER_FILES.values(), ids=OTHER_FILES)
def test_dumps_win_over_other_files(write_other, tmp_path):
    write(tmp_path / "step_0.parquet", make_table())
    write_other(tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 0
    source = open_source(str(tmp_path))
    assert source.table is not None and not source.metrics


# A log is the one file that a command could read instead, and a pipe would block it.
@pytest.mark.parametrize("other", ["a healthy log", "a pipe"])
@pytest.mark.parametrize("command", ["report", "recommend", "what-if"])
def test_every_command_reads_dumps_beside_other_files(command, other, tmp_path):
    write(tmp_path / "step_0.parquet", make_table())
    OTHER_FILES[other](tmp_path)
    assert main([command, str(tmp_path)]) == 0


@pytest.mark.parametrize("write_other", list(OTHER_FILES.values())[2:], ids=list(OTHER_FILES)[2:])
def test_files_without_metrics_are_passed_over(write_other, tmp_path):
    trained = tmp_path / "run"
    trained.mkdir()
    console(trained)
    write_other(trained)
    log = read_log(trained)
    assert log is not None and log.file.name == "train.log" and log.rows.has_mismatch


def test_a_log_below_the_directory_is_not_read(tmp_path, capsys):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    console(below)
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "has no dumps of tokens" in capsys.readouterr().err


def test_a_damaged_log_beside_a_good_one_is_named(tmp_path):
    console(tmp_path)
    (tmp_path / "run-1.wandb").write_bytes(b"no header")
    text = " ".join(diagnosis(str(tmp_path)).split())
    assert "Passed over:" in text and "run-1.wandb" in text


def test_an_unreadable_log_is_passed_over(tmp_path):
    """As root may read every file, the refusal is the operating system's for a loop of links."""
    console(tmp_path)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "run-1.wandb").symlink_to("run-1.wandb")
    log = read_log(tmp_path)
    assert log is not None and log.file.name == "train.log"


SPECIAL = {
    "a pipe": lambda path: os.mkfifo(path),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": lambda path: path.mkdir(),
    "a broken link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize(
    "name", ["x.csv", "x.log", "x.wandb", "trainer_state.json", "events.out.tfevents.1"]
)
def test_only_regular_files_are_read(make, name, tmp_path, capsys):
    make(tmp_path / name)
    began = time.monotonic()
    assert main(["diagnose", str(tmp_path / name)]) in (1, 2)
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert time.monotonic() - began < 5


def test_a_large_table_takes_little_memory(tmp_path):
    path = tmp_path / "large.csv"
    # Memory per byte of the file is the same at 2,000 and at 40,000 rows; tracing is slow.
    steps = 4_000
    names = [f"metric_{index}" for index in range(40)] + [ABS, K3, "rollout/raw_reward"]
    with path.open("w") as file:
        file.write(",".join(["step", *names]) + "\n")
        for step in range(steps):
            file.write(",".join([str(step), *["0.5"] * len(names)]) + "\n")
    tracemalloc.start()
    log = read_log(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert log is not None and len(log.rows) == steps
    assert peak < 3 * path.stat().st_size, f"{peak >> 20} MiB"


LIMITS = {
    "k3 below": ("k3=0.01", 0.001, ""),
    "k3 above": ("k3=0.01", 0.1, "k3 is 0.1, the limit 0.01"),
    "k3 of NaN": ("k3=0.01", math.nan, "k3 is not known"),
    "k3 below 0": ("k3=0.01", -1.0, "k3 is not known"),
    "abs missing": ("abs=9", 0.001, "abs is neither in a dump nor in the log"),
}


@pytest.mark.parametrize(("limits", "value", "words"), LIMITS.values(), ids=LIMITS)
def test_a_limit_is_checked_on_the_metrics_of_the_log(limits, value, words, tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(f"step,{K3}\n" + "".join(f"{step},{value}\n" for step in range(STEPS)))
    if not words:
        assert diagnosis(str(path), fail_on=limits)
        return
    with pytest.raises(LimitExceeded, match=words):
        diagnosis(str(path), fail_on=limits)


def test_a_log_without_a_mismatch_metric_fails_every_limit(tmp_path, capsys):
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n1,0.1\n2,0.1\n")
    for limits in ("cause", "k3=1e9", "abs=1e9"):
        assert main(["diagnose", str(path), "--fail-on", limits]) == 1
    assert "not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    "limits", [",", "k3", "k3=nan", "k3=inf", "cause=1", "loss=1", "k3=0.1,,abs=1"]
)
def test_limits_that_check_nothing_are_refused(limits, tmp_path, capsys):
    path = table(tmp_path)
    assert main(["diagnose", str(path), "--fail-on", limits]) == 2
    assert "give a list of" in capsys.readouterr().err


ADVICE = {
    "TRL": ("sampling/sampling_logp_difference/mean", "dump_dir=DIR"),
    "our mixin in TRL": ("correction/mismatch_k3_kl", "dump_dir=DIR"),
    "verl": ("rollout_corr/k3_kl", "trainer.rollout_data_dir"),
    "NeMo-RL": ("train/gen_kl_error", "train_data_step"),
    "SkyRL": ("policy/rollout_train_logprobs_abs_diff_mean", "trainer.dump_data_batch"),
    "AReaL": ("ppo_actor/update/behave_approx_kl/avg", "JSONL"),
    "unknown": ("loss", "train_log_probs"),
}


@pytest.mark.parametrize(("name", "words"), ADVICE.values(), ids=ADVICE)
@pytest.mark.parametrize("command", ["recommend", "what-if"])
def test_the_limits_of_a_log_are_in_the_framework_s_words(command, name, words, tmp_path, capsys):
    path = tmp_path / "log.csv"
    path.write_text(f"step,{name}\n" + "".join(f"{step},0.1\n" for step in range(STEPS)))
    assert main([command, str(path)]) == 2
    message = capsys.readouterr().err
    assert (
        "is a log of metrics" in message
        and words in message
        and "--save-debug-train-data" not in message
    )


def test_pickles_are_refused_with_a_converter(tmp_path, capsys):
    (tmp_path / "dumped_data").mkdir()
    (tmp_path / "dumped_data" / "global_step_1_training_input.pkl").write_bytes(b"\x80")
    for path in (tmp_path, tmp_path / "dumped_data" / "global_step_1_training_input.pkl"):
        assert main(["what-if", str(path)]) == 2
        message = capsys.readouterr().err
        assert "SkyRL" in message and "write JSONL with train_log_probs" in message


def test_rollout_files_of_areal_are_named(tmp_path, capsys):
    folder = tmp_path / "rollout" / "3"
    folder.mkdir(parents=True)
    row = {"head_version": 3, "tail_version": 3, "reward": 1.0, "prompt": "1", "completion": "2"}
    (folder / "7.jsonl").write_text(json.dumps(row) + "\n")
    for path in (tmp_path, folder):
        assert main(["diagnose", str(path)]) == 2
        assert "AReaL's rollout files have no log-probs" in capsys.readouterr().err


def test_of_equal_steps_the_first_value_counts():
    rows = LogTable()
    for step, value in ((2, 0.2), (1, 0.1), (2, 0.9)):
        rows.add(step, K3, value)
    assert [dict(row) for row in rows] == [{"step": 1.0, K3: 0.1}, {"step": 2.0, K3: 0.2}]


@pytest.mark.parametrize("step", [math.nan, math.inf, -math.inf, 1e300])
def test_steps_that_are_no_numbers_of_steps_are_refused(step):
    with pytest.raises(ValueError, match="no number of steps"):
        LogTable().add(step, K3, 0.1)


def test_curves_of_several_runs_are_refused(tmp_path):
    path = tmp_path / "export.csv"
    path.write_text('"Step","a - loss","b - loss"\n1,2,3\n')
    with pytest.raises(ValueError, match="curves of 2 runs"):
        read_log(path)
