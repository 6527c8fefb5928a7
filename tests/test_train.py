"""train.py on a tiny model: algorithms, resuming, stale weights, masks, and bad input."""

import json
import signal

import pytest
import yaml
from transformers import AutoModelForCausalLM

from slime_tis.trainer.storage import checkpoint_files as checkpoint_files
from tests.runs import read_metrics, run_apart, run_here, start_apart, training_metrics

TWO_STEPS = ("--num-rollout", "2", "--num-steps-per-rollout", "2")
BYPASSED_BASELINE = (
    "--advantage-estimator",
    "optimal_token_baseline",
    "--use-rollout-logprobs",
    "--policy-loss",
    "reinforce",
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


@pytest.fixture(scope="module", params=ALGORITHMS, ids=" ".join)
def algorithm(request, task, tmp_path_factory):
    """The flags of an algorithm, and metrics with one step and with two steps per rollout."""
    directory = tmp_path_factory.mktemp("algorithm")
    flags = [*task, *request.param]
    one = run_here([*flags, "--num-rollout", "2"], directory / "one")
    two = run_here([*flags, *TWO_STEPS], directory / "two")
    return request.param, one, two


def test_every_algorithm_skips_forward_passes_that_it_can(algorithm):
    flags, one, two = algorithm
    with_one_step, with_two_steps = ALGORITHMS[flags]
    assert [row["train/old_log_prob_forwards"] for row in one] == [with_one_step] * 2
    # the passes of both steps are before the first step
    assert [row["train/old_log_prob_forwards"] for row in two] == [2 * with_two_steps, 0] * 2


def test_every_algorithm_trains(algorithm):
    _, _, two = algorithm
    for row in two:
        assert row["train/grad_norm"] > 0
        assert None not in row.values()  # values that are not finite


def test_every_algorithm_measures_the_mismatch_of_int8_weights(algorithm):
    flags, _, two = algorithm
    if "interpolate" in flags:
        pytest.skip("with at most one stale step, the interpolated π_old is the rollout's policy")
    assert all(row["train/train_rollout_logprob_abs_diff"] > 0 for row in two)


@pytest.mark.parametrize(
    "base", [(), ("--use-rollout-logprobs",), TWO_STEPS], ids=["one", "bypass", "two"]
)
def test_measuring_mismatch_leaves_training_to_the_bit(base, run):
    plain = run(*base, name="plain")
    measured = run(*base, "--get-mismatch-metrics", name="measured")
    names = ("train/loss", "train/grad_norm", "train/pg_clipfrac", "rollout/raw_reward")
    expected = [[row.get(name) for name in names] for row in plain]
    assert [[row.get(name) for name in names] for row in measured] == expected


@pytest.fixture(scope="module")
def batch_normalized(task, tmp_path_factory):
    """Metrics of two steps per rollout without and with --get-mismatch-metrics."""
    directory = tmp_path_factory.mktemp("batch_normalized")
    flags = [*task, *TWO_STEPS, "--use-rollout-logprobs", "--policy-loss", "reinforce"]
    flags += ["--use-tis", "--tis-batch-normalize"]
    plain = run_here(flags, directory / "plain")
    measured = run_here([*flags, "--get-mismatch-metrics"], directory / "measured")
    return plain, measured


def test_the_first_step_of_a_rollout_takes_no_pass_twice(batch_normalized):
    """Before the first step, the pass for π_old also gives log-probs of π_θ."""
    plain, measured = batch_normalized
    assert [row["train/old_log_prob_forwards"] for row in plain] == [1, 1, 1, 1]
    # the passes for π_old of both steps, and another one for the second step
    assert [row["train/old_log_prob_forwards"] for row in measured] == [2, 1, 2, 1]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "mis_batch_norm_factor"])
def test_a_pass_for_old_log_probs_leaves_the_step_to_the_bit(batch_normalized, name):
    plain, measured = batch_normalized
    expected = [row[f"train/{name}"] for row in plain]
    assert [row[f"train/{name}"] for row in measured] == expected


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


def test_several_micro_batches_give_the_step_of_one(run):
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


LIMITS = {
    "trimmed, decoupled": (*TRIMMING, "--use-tis", "--tis-batch-normalize"),
    "by the advantage": (*TRIMMING, "--use-tis", "--tis-batch-normalize", *SIGNED),
    "trimmed, bypass": (*TRIMMING, "--use-rollout-logprobs"),
    "trimmed, interpolated": (*TRIMMING, "--old-logprobs", "interpolate"),
    "adaptive, decoupled": (*ADAPTIVE, "--use-tis"),
    "adaptive, bypass": (*ADAPTIVE, "--use-rollout-logprobs"),
}


@pytest.fixture(scope="module", params=LIMITS.values(), ids=list(LIMITS))
def limited(request, task, tmp_path_factory):
    """The flags of a limit, and metrics with one and with several micro-batches per step."""
    directory = tmp_path_factory.mktemp("limited")
    flags = [*task, *request.param, *TWO_STEPS, "--update-weights-interval", "2"]
    rows = run_here(flags, directory / "one")
    split = run_here([*flags, "--micro-batch-size", "2"], directory / "split")
    return request.param, rows, split


def test_all_micro_batches_have_one_limit(limited):
    _, rows, split = limited
    for row, other in zip(rows, split, strict=True):
        assert training_metrics(other) == pytest.approx(training_metrics(row), rel=1e-4, abs=1e-5)


def test_a_limit_needs_one_forward_pass_per_step(limited):
    flags, rows, _ = limited
    expected = [2, 0, 2, 0] if "--use-tis" in flags else [1, 1, 1, 1]
    assert [row["train/old_log_prob_forwards"] for row in rows] == expected


def test_a_limit_rejects_some_tokens_of_a_step(limited):
    flags, rows, _ = limited
    if "--rs-target-fraction" in flags:  # 3 of every step's 8 samples
        assert [row["train/mis_rs_seq_masked_fraction"] for row in rows] == [0.375] * 4
    else:
        assert any(0 < row["train/mis_second_moment_masked_fraction"] < 0.9 for row in rows)


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
    [
        ([], True),
        (["--n-samples-per-eval-prompt", "2"], False),
        (["--rollout-stop", "5"], False),
        (["--rollout-stop-token-ids", "5"], False),
    ],
    ids=["same evaluation", "more answers", "stop text", "stop token"],
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


@pytest.mark.parametrize(("threshold", "status"), [("1", 0), ("1e-6", 1)], ids=["below", "above"])
def test_a_mismatch_above_the_threshold_ends_the_run(threshold, status, task, tmp_path):
    gate = ["--ci-train-rollout-logprob-abs-diff-threshold", threshold, "--num-rollout", "1"]
    ended = run_apart([*task, *gate], tmp_path / "run")
    assert ended.returncode == status
    assert ("above --ci-train-rollout-logprob-abs-diff" in ended.stderr) == bool(status)
    # The row that exceeds the threshold is logged.
    (row,) = read_metrics(tmp_path / "run")
    assert 1e-6 < row["train/train_rollout_logprob_abs_diff"] < 1


def test_pass_rates_of_samples_with_their_held_out_answers(task, tmp_path):
    (tmp_path / "reward.py").write_text("def reward(args, sample):\n    return sample.index % 2\n")
    prompts = tmp_path / "eval.jsonl"
    prompts.write_text('{"prompt": "<bos>31>", "label": "13"}\n' * 2)
    flags = ["--custom-rm-path", f"{tmp_path / 'reward.py'}:reward", "--log-passrate"]
    flags += ["--eval-prompt-data", str(prompts), "--n-samples-per-eval-prompt", "2"]
    row = run_here([*task, *flags, "--num-rollout", "1"], tmp_path / "run")[-1]
    rates = {name: value for name, value in row.items() if "pass@" in name}
    # Two of four samples and one of two answers have a reward of 1.
    assert rates == pytest.approx(
        {
            "passrate/pass@1": 1 / 2,
            "passrate/pass@2": 1 - 1 / 6,
            "passrate/pass@4": 1.0,
            "eval/accuracy-pass@1": 1 / 2,
            "eval/accuracy-pass@2": 1.0,
        }
    )


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_kl_in_the_rewards_begins_with_the_second_rollout(estimator, run):
    flags = ["--advantage-estimator", estimator, "--num-rollout", "2"]
    plain = run(*flags, name="plain")
    with_kl = run(*flags, "--kl-coef", "10", "--kl-loss-type", "k3", name="kl")
    norms = [row["train/grad_norm"] for row in plain]
    kl_norms = [row["train/grad_norm"] for row in with_kl]
    # The policy is the reference until the first step.
    assert kl_norms[0] == pytest.approx(norms[0], rel=1e-4)
    assert kl_norms[1] != pytest.approx(norms[1], rel=1e-2)
    assert [row["train/old_log_prob_forwards"] for row in with_kl] == [1, 1]


def test_a_discount_of_almost_1_changes_almost_nothing(run):
    flags = ["--advantage-estimator", "reinforce_plus_plus", "--num-rollout", "1"]
    plain = run(*flags, name="plain")
    near_1 = run(*flags, "--gamma", "0.999999", name="near_1")
    half = run(*flags, "--gamma", "0.5", name="half")
    assert near_1[0]["train/grad_norm"] == pytest.approx(plain[0]["train/grad_norm"], rel=1e-3)
    assert half[0]["train/grad_norm"] != pytest.approx(plain[0]["train/grad_norm"], rel=1e-2)


def test_reinforce_plus_plus_trains_on_one_sample_per_prompt(run):
    flags = ["--advantage-estimator", "reinforce_plus_plus", "--n-samples-per-prompt", "1"]
    (row,) = run(*flags, "--num-rollout", "1")
    assert row["train/grad_norm"] > 0


@pytest.fixture(scope="module")
def moving_reference(task, tmp_path_factory):
    """Flags, a run of four rollouts, and the same run resumed after three.

    Both replace the reference after the second rollout.
    """
    directory = tmp_path_factory.mktemp("reference")
    flags = [*task, "--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-update-interval", "2"]
    whole = run_here([*flags, "--num-rollout", "4"], directory / "whole")
    saved = [*flags, "--save", str(directory / "save")]
    run_here([*saved, "--num-rollout", "3"], directory / "first")
    resumed = [*saved, "--load", str(directory / "save"), "--num-rollout", "4"]
    return whole, run_here(resumed, directory / "second")


def test_the_policy_is_the_reference_after_an_update(moving_reference):
    whole, _ = moving_reference
    distances = [abs(row["train/kl_loss"]) for row in whole]
    assert max(distances[0], distances[2]) < 1e-6
    assert min(distances[1], distances[3]) > 1e-4


def test_a_resumed_run_has_the_updated_reference(moving_reference):
    whole, resumed = moving_reference
    assert training_metrics(resumed[-1]) == training_metrics(whole[-1])


def test_a_rollout_that_ends_the_run_updates_the_reference(task, tmp_path):
    reward = tmp_path / "reward.py"
    flags = [*task, "--custom-rm-path", f"{reward}:reward", "--disable-grpo-std-normalization"]
    flags += ["--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-update-interval", "1"]
    flags += [*TWO_STEPS, "--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    # The first step changes the weights; the gradient of the second step is not finite.
    reward.write_text(
        "def reward(args, sample):\n"
        "    scale = 1e30 if sample.group_index >= 2 else 1.0\n"
        "    return scale * sample.response_ids[0]\n"
    )
    stopped = run_apart(flags, tmp_path / "first")
    assert "the gradient of step 2 is not finite" in stopped.stderr
    reward.write_text("def reward(args, sample):\n    return sample.response_ids[0]\n")
    first, second = run_here(flags, tmp_path / "second")
    assert abs(first["train/kl_loss"]) < 1e-6
    assert abs(second["train/kl_loss"]) > 1e-4


def test_a_response_ends_with_its_first_stop_text(task, tmp_path):
    data = tmp_path / "{rollout_id}.jsonl"
    flags = ["--rollout-stop", "5", "31", "--rollout-max-response-len", "40", "--num-rollout", "1"]
    run_here([*task, *flags, "--save-debug-rollout-data", str(data)], tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    responses = [row["response"] for row in rows]
    assert sum(response.endswith(("5", "31")) for response in responses) > 4
    for response in responses:
        assert "5" not in response[:-1] and "31" not in response[:-1]


def test_held_out_sets_have_their_own_limits_with_rewards(task, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def reward(args, sample):\n    return float(sample.metadata.get('rm_type') == 'math')\n"
    )
    prompts = tmp_path / "eval.jsonl"
    prompts.write_text('{"question": "<bos>31>", "label": "13"}\n')
    sets = [
        {"name": "short", "path": str(prompts), "max_response_len": 1},
        {"name": "long", "path": str(prompts), "max_response_len": 4, "rm_type": "math"},
    ]
    config = {"defaults": {"input_key": "question", "temperature": 1.0}, "datasets": sets}
    (tmp_path / "eval.json").write_text(json.dumps(config))
    flags = ["--custom-rm-path", f"{tmp_path / 'reward.py'}:reward", "--num-rollout", "1"]
    flags += ["--eval-config", str(tmp_path / "eval.json")]
    row = run_here([*task, *flags], tmp_path / "run")[-1]
    assert (row["eval/short/response_length"], row["eval/long/response_length"]) == (1.0, 4.0)
    assert (row["eval/short"], row["eval/long"]) == (0.0, 1.0)


ENTROPY = """
import json


def from_entropy(args, rollout_data):
    rollout_data["advantages"] = rollout_data["entropy"]
    means = [values.mean().item() for values in rollout_data["entropy"]]
    with open(args.entropy_file, "w") as file:
        json.dump(means, file)
"""


def test_a_user_function_gets_the_entropy_of_the_old_policy(task, tmp_path):
    (tmp_path / "advantage.py").write_text(ENTROPY)
    (tmp_path / "run.yaml").write_text(f"entropy_file: {tmp_path / 'entropy.json'}\n")
    flags = ["--custom-advantage-function-path", f"{tmp_path / 'advantage.py'}:from_entropy"]
    flags += ["--use-rollout-entropy", "--custom-config-path", str(tmp_path / "run.yaml")]
    (row,) = run_here([*task, *flags, "--num-rollout", "1"], tmp_path / "run")
    means = json.loads((tmp_path / "entropy.json").read_text())
    assert len(means) == 16
    # With one step the trained policy is the old policy.
    assert sum(means) / 16 == pytest.approx(row["train/entropy_loss"], rel=1e-5)
    assert row["train/old_log_prob_forwards"] == 1
