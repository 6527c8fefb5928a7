"""train.py as a whole, on a tiny model: algorithms, resuming, stale weights, masks, and one message for bad input."""

import json
import signal

import pytest
import yaml
from transformers import AutoModelForCausalLM

from slime_tis.trainer.storage import checkpoint_files as checkpoint_files
from tests.runs import read_metrics, run_here, start_apart, training_metrics

TWO_STEPS = ("--num-rollout", "2", "--num-steps-per-rollout", "2")
BYPASSED_BASELINE = (
    *(
        "--advantage-estimator",
        "optimal_token_baseline",
        "--use-rollout-logprobs",
        "--policy-loss",
        "reinforce",
    ),
)
ALGORITHMS = {
    # flags: forward passes for the old log-probs, with one optimizer step per rollout and with two
    (): (0, 1),
    ("--use-rollout-logprobs",): (0, 0),
    ("--use-rs", "--rs-level", "sequence"): (0, 1),
    ("--use-tis", "--tis-mode", "mask", "--use-rs", "--rs-veto-threshold", "1e-4"): (0, 1),
    ("--use-tis", "--tis-level", "geometric", "--tis-batch-normalize"): (1, 1),
    ("--use-rollout-logprobs", "--use-rs"): (0, 0),
    (
        "--use-rollout-logprobs",
        "--policy-loss",
        "reinforce",
        "--use-tis",
        "--tis-level",
        "sequence",
    ): (0, 0),
    ("--get-mismatch-metrics",): (0, 1),
    ("--rollout-rs", "token_k1,seq_max_k3", "--rollout-rs-threshold", "0.5_2.0,0.01"): (0, 1),
    ("--use-tis", "--policy-loss", "gspo", "--eps-clip", "3e-4", "--eps-clip-high", "4e-4"): (0, 1),
    ("--use-tis", "--use-opsm"): (0, 1),
    ("--policy-loss", "clip_cov", "--cov-ratio", "0.1", "--clip-cov-lower-bound", "0.1"): (1, 1),
    ("--use-tis", "--tis-level", "prefix", "--tis-batch-normalize"): (1, 1),
    ("--use-rs", "--rs-level", "segment", "--reject-before-advantage"): (1, 1),
    ("--use-rollout-logprobs", "--use-rs", "--rs-level", "sequence", "--reject-before-advantage"): (
        1,
        1,
    ),
    ("--rs-second-moment-bound", "3e-4"): (1, 1),
    ("--advantage-estimator", "optimal_token_baseline", "--use-tis"): (1, 1),
    (*BYPASSED_BASELINE, "--use-tis", "--use-rs", "--reject-before-advantage"): (1, 1),
    ("--use-tis", "--old-logprobs", "interpolate", "--update-weights-interval", "2"): (0, 0),
}


@pytest.mark.parametrize("flags", ALGORITHMS, ids=" ".join)
def test_every_algorithm_trains_and_skips_the_forward_pass_it_can(flags, run):
    once, twice = ALGORITHMS[flags]
    rows = run(*flags, "--num-rollout", "2", name="one")
    assert [row["train/old_log_prob_forwards"] for row in rows] == [once] * 2
    rows = run(*flags, *TWO_STEPS, name="two")
    assert [row["train/old_log_prob_forwards"] for row in rows] == [
        2 * twice,
        0,
    ] * 2  # before the first step
    for row in rows:
        assert row["train/grad_norm"] > 0
        assert all(value is not None for value in row.values())  # nothing that was not finite
        if (
            "interpolate" not in flags
        ):  # at a staleness of one step or none the interpolated π_old is π_rollout
            assert (
                row["train/train_rollout_logprob_abs_diff"] > 0
            )  # int8 weights: the mismatch is real


@pytest.mark.parametrize(
    "base", [(), ("--use-rollout-logprobs",), TWO_STEPS], ids=["one", "bypass", "two"]
)
def test_metrics_only_leaves_training_as_it_is_to_the_bit(base, run):
    plain = run(*base, name="plain")
    measured = run(*base, "--get-mismatch-metrics", name="measured")
    for row, other in zip(plain, measured, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/pg_clipfrac", "rollout/raw_reward"):
            assert row.get(name) == other.get(name)


def test_the_first_step_of_a_rollout_takes_no_pass_twice(run):
    """What is known of π_old is known of π_θ, too, as long as no step was made: the loss is the same to the bit."""
    flags = (
        "--use-rollout-logprobs",
        "--policy-loss",
        "reinforce",
        "--use-tis",
        "--tis-batch-normalize",
        *TWO_STEPS,
    )
    plain = run(*flags, name="plain")
    measured = run(*flags, "--get-mismatch-metrics", name="measured")
    assert [row["train/old_log_prob_forwards"] for row in plain] == [1, 1, 1, 1]
    assert [row["train/old_log_prob_forwards"] for row in measured] == [
        2,
        1,
        2,
        1,
    ]  # both steps', and the second anew
    for row, other in zip(plain, measured, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/mis_batch_norm_factor"):
            assert row[name] == other[name]


def test_stale_rollouts_by_the_update_interval(run):
    rows = run(
        "--update-weights-interval", "3", "--num-rollout", "5", "--rollout-precision", "fp32"
    )
    assert [row["rollout/weight_staleness"] for row in rows] == [0, 1, 2, 0, 1]
    differences = [row["train/train_rollout_logprob_abs_diff"] for row in rows]
    assert (
        max(differences[0], differences[3])
        < 1e-5
        < min(differences[1], differences[2], differences[4])
    )


def test_one_step_and_several_micro_batches_give_the_same_step(run):
    flags = (
        "--use-rollout-logprobs",
        "--policy-loss",
        "kl_cov",
        "--cov-ratio",
        "0.2",
        "--kl-cov-coef",
        "10",
    )
    (whole,) = run(*flags, "--num-rollout", "1", name="whole")
    (split,) = run(*flags, "--num-rollout", "1", "--micro-batch-size", "4", name="split")
    assert training_metrics(split) == pytest.approx(training_metrics(whole), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputed_activations_give_the_same_step_to_the_bit(granularity, run):
    layers = (
        ("--recompute-method", "uniform", "--recompute-num-layers", "1")
        if granularity == "full"
        else ()
    )
    (plain,) = run("--use-tis", "--num-rollout", "1", name="plain")
    (again,) = run(
        "--use-tis",
        "--num-rollout",
        "1",
        "--recompute-granularity",
        granularity,
        *layers,
        name="again",
    )
    assert training_metrics(again) == training_metrics(plain)


SIGNED = ("--divergence-mask", "binary_tv", "--tis-upper-bound-negative", "1.001")
TRIMMING = ("--rs-second-moment-bound", "3e-4")
ADAPTIVE = ("--use-rs", "--rs-level", "sequence", "--rs-target-fraction", "0.375")


@pytest.mark.parametrize(
    "mode",
    [
        (*TRIMMING, "--use-tis", "--tis-batch-normalize"),
        (*TRIMMING, "--use-tis", "--tis-batch-normalize", *SIGNED),
        (*TRIMMING, "--use-rollout-logprobs"),
        (*TRIMMING, "--old-logprobs", "interpolate"),
        (*ADAPTIVE, "--use-tis"),
        (*ADAPTIVE, "--use-rollout-logprobs"),
    ],
    ids=[
        "trimmed, decoupled",
        "by the advantage",
        "trimmed, bypass",
        "trimmed, interpolated",
        "adaptive, decoupled",
        "adaptive, bypass",
    ],
)
def test_limits_follow_the_whole_step(mode, run):
    """One limit for all micro-batches, from one forward pass before them."""
    flags = (*mode, *TWO_STEPS, "--update-weights-interval", "2")
    whole, split = run(*flags, name="whole"), run(*flags, "--micro-batch-size", "2", name="split")
    for one, other in zip(whole, split, strict=True):
        assert training_metrics(other) == pytest.approx(training_metrics(one), rel=1e-4, abs=1e-5)
    forwards = [row["train/old_log_prob_forwards"] for row in whole]
    assert forwards == ([2, 0, 2, 0] if "--use-tis" in mode else [1, 1, 1, 1])
    if "--rs-target-fraction" in mode:  # 3 of every step's 8 samples
        assert [row["train/mis_rs_seq_masked_fraction"] for row in whole] == [0.375] * 4
    else:
        assert any(0 < row["train/mis_second_moment_masked_fraction"] < 0.9 for row in whole)


def test_rejected_siblings_shift_no_baseline(run, tmp_path):
    """With the reward of a rejected sample made huge, nothing that is trained on changes."""
    data = tmp_path / "rollout.jsonl"
    bounds = (
        "--use-rs",
        "--rs-level",
        "geometric",
        "--rs-lower-bound",
        "0.99",
        "--rs-upper-bound",
        "1.01",
    )
    flags = (
        *bounds,
        "--reject-before-advantage",
        "--num-rollout",
        "1",
        "--rollout-batch-size",
        "2",
    )
    (row,) = run(*flags, "--save-debug-rollout-data", str(data), name="sample")
    assert 0 < row["train/mis_rs_seq_masked_fraction"] < 1
    samples = [json.loads(line) for line in data.read_text().splitlines()]
    losses = []
    for index, sample in enumerate(samples):
        changed = [{**other, "reward": 1e6} if other is sample else other for other in samples]
        (tmp_path / "changed.jsonl").write_text(
            "".join(json.dumps(other) + "\n" for other in changed)
        )
        (found,) = run(
            *flags,
            "--load-debug-rollout-data",
            str(tmp_path / "changed.jsonl"),
            name=f"run_{index}",
        )
        losses.append(found["train/grad_norm"])
    unchanged = sum(loss == row["train/grad_norm"] for loss in losses)
    rejected = round(row["train/mis_rs_seq_masked_fraction"] * len(samples))
    assert (
        rejected <= unchanged < len(samples)
    )  # an accepted sample without accepted siblings shifts nothing either


def test_everything_rejected_makes_no_step(run, tmp_path):
    rows = run(
        "--use-rs",
        "--rs-level",
        "token",
        "--rs-lower-bound",
        "8",
        "--rs-upper-bound",
        "9",
        name="none",
    )
    assert [row["train/skipped_steps"] for row in rows] == [1, 1, 1]
    assert rows[-1]["train/gradient_kept_fraction"] == 0
    unchanged = run("--lr", "1e-30", "--weight-decay", "0", name="still")
    assert rows[-1]["train/mismatch_training_log_ppl"] == pytest.approx(
        unchanged[-1]["train/mismatch_training_log_ppl"]
    )


def test_a_run_killed_and_resumed_gives_the_same_metrics(task, tmp_path):
    flags = [*task, "--use-tis", "--use-kl-loss", "--kl-loss-coef", "0.1", "--rollout-shuffle"]
    flags += ["--update-weights-interval", "3", "--lr-decay-style", "cosine", "--num-rollout", "6"]
    flags += ["--save-interval", "2"]
    uninterrupted = run_here([*flags, "--save", str(tmp_path / "other")], tmp_path / "whole")

    flags += ["--load", str(tmp_path / "saved"), "--save", str(tmp_path / "saved")]
    killed = start_apart(flags, tmp_path / "run")
    printed = tmp_path / "run.out"
    killed.until(lambda: printed.exists() and "step 5/6" in printed.read_text())
    killed.kill()
    assert killed.wait().statuses == [-signal.SIGKILL]

    run_here(flags, tmp_path / "run")
    resumed = read_metrics(tmp_path / "run")
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
    expected = [training_metrics(row) for row in uninterrupted]
    assert [training_metrics(row) for row in resumed] == expected


def test_a_checkpoint_counts_once_its_steps_are_reported_and_dumped(task, tmp_path, monkeypatch):
    found, finish = [], checkpoint_files.finish

    def observed(unfinished, checkpoint, run):
        rows = [row["step"] for row in read_metrics(tmp_path / "out")]
        found.append(
            (checkpoint.name, rows, sorted(path.name for path in (tmp_path / "dump").iterdir()))
        )
        finish(unfinished, checkpoint, run)

    monkeypatch.setattr(checkpoint_files, "finish", observed)
    flags = [*task, *TWO_STEPS, "--save-interval", "1", "--save", str(tmp_path / "save")]
    flags += ["--save-debug-train-data", str(tmp_path / "dump" / "{rollout_id}.parquet")]
    rows = run_here(flags, tmp_path / "out")
    assert found == [
        ("iter_0000002", [1, 2], ["0.parquet"]),
        ("iter_0000004", [1, 2, 3, 4], ["0.parquet", "1.parquet"]),
    ]
    assert rows[1]["perf/save_time"] > 0 and rows[3]["perf/save_time"] > 0


def test_a_finished_run_has_left_everything(task, tmp_path):
    prompts = tmp_path / "eval.jsonl"
    prompts.write_text(
        '{"prompt": "<bos>31>", "label": "13"}\n{"prompt": "<bos>52>", "label": "25"}\n'
    )
    output = tmp_path / "run"
    flags = [*task, "--eval-prompt-data", str(prompts), "--use-tensorboard", "--eval-interval", "2"]
    flags += ["--save", str(output / "checkpoints"), "--save-hf", str(output / "hf")]
    rows = run_here(flags, output)
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 3]
    config = yaml.safe_load((output / "config.yaml").read_text())
    assert config["lr"] == 1e-3 and config["rollout_precision"] == "int8"
    assert list((output / "tensorboard").rglob("events.out.tfevents.*"))
    assert (output / "checkpoints" / "iter_0000003" / "metadata.json").exists()
    AutoModelForCausalLM.from_pretrained(output / "hf")


def test_evaluation_is_of_the_training_policy(task, tmp_path):
    """With weights that never reach the sampler, evaluation still follows training."""
    flags = [
        *task,
        "--update-weights-interval",
        "99",
        "--lr",
        "3e-2",
        "--eval-interval",
        "1",
        "--num-rollout",
        "2",
    ]
    prompts = tmp_path / "eval.jsonl"
    prompts.write_text('{"prompt": "<bos>31>", "label": "13"}\n')
    rows = run_here([*flags, "--eval-prompt-data", str(prompts)], tmp_path / "run")
    assert (
        len({row["eval/accuracy"] for row in rows}) > 1
    )  # the reward of the task grades any answer


@pytest.mark.parametrize(
    ("changed", "is_compared"),
    [([], True), (["--n-samples-per-eval-prompt", "2"], False)],
    ids=["same evaluation", "another evaluation"],
)
def test_a_resumed_run_compares_with_the_accuracy_before_training(
    changed, is_compared, task, tmp_path, capsys
):
    prompts = tmp_path / "eval.jsonl"
    prompts.write_text('{"prompt": "<bos>31>", "label": "13"}\n')
    flags = [*task, "--eval-prompt-data", str(prompts), "--save", str(tmp_path / "save")]
    run_here([*flags, "--num-rollout", "1"], tmp_path / "run")
    assert "->" in capsys.readouterr().out.rpartition("mean eval reward: ")[2]
    run_here(
        [*flags, *changed, "--load", str(tmp_path / "save"), "--num-rollout", "2"],
        tmp_path / "resumed",
    )
    assert ("->" in capsys.readouterr().out.rpartition("mean eval reward: ")[2]) == is_compared


def test_tool_tokens_are_neither_trained_on_nor_measured(task, run, tmp_path):
    """Multi-turn samples: whatever the log-probs under a loss mask of 0 are, nothing changes."""
    plain = tmp_path / "plain.jsonl"
    run("--save-debug-rollout-data", str(plain), "--num-rollout", "1", name="sample")
    samples = [json.loads(line) for line in plain.read_text().splitlines()]
    found = []
    for name, garbage in (("zero", 0.0), ("null", None), ("huge", 1e30)):
        data = tmp_path / f"{name}.jsonl"
        with data.open("w") as lines:
            for sample in samples:
                masked = {
                    **sample,
                    "loss_mask": [int(i % 3 != 1) for i in range(len(sample["loss_mask"]))],
                }
                masked["rollout_log_probs"] = [
                    value if keep else garbage
                    for value, keep in zip(
                        sample["rollout_log_probs"], masked["loss_mask"], strict=True
                    )
                ]
                lines.write(json.dumps(masked) + "\n")
        flags = ("--use-tis", "--use-rs", "--rs-level", "geometric", "--rs-veto-threshold", "1e-4")
        rows = run(*flags, "--load-debug-rollout-data", str(data), "--num-rollout", "1", name=name)
        found.append(training_metrics(rows[0]))
    assert found[0] == found[1] == found[2]
    assert found[0]["train/nonfinite_token_fraction"] == 0
    assert found[0]["train/gradient_kept_fraction"] > 0.5
