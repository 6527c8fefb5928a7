"""train.py --save-debug-train-data: the files on every layout, and what-if against train.py."""

from itertools import chain

import numpy as np
import pytest
import torch

from slime_tis.analysis.diagnosis import diagnose
from slime_tis.analysis.dumps.readers import read
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.dumps.what_if import what_if
from slime_tis.analysis.report.mismatch_plots import summary
from slime_tis.analysis.report.recommend import measured
from slime_tis.correction import RolloutCorrectionConfig, correct
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.data.sample_file import load_samples, save_samples
from tests.runs import make_task, run_apart, run_here

CORRECTION = (
    "--use-tis",
    "--tis-upper-bound",
    "1.01",
    "--use-rs",
    "--rs-upper-bound",
    "1.03",
    "--rs-veto-threshold",
    "0.96",
    "--rs-veto-upper-threshold",
    "1.05",
)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """Flags of a run with one rollout and two steps, its directory with `dump`, and its rows."""
    directory = tmp_path_factory.mktemp("dumped")
    flags = [*make_task(directory), "--num-rollout", "1", *CORRECTION]
    rows = run_here(
        [*flags, "--num-steps-per-rollout", "2", "--dump-details", str(directory / "dump")],
        directory / "out",
    )
    yield flags, directory, rows


@pytest.fixture(scope="module")
def table(dumped) -> TokenTable:
    """The dump of the run."""
    _, directory, _ = dumped
    return read(directory / "dump" / "train_data" / "0_0.parquet")


@pytest.fixture(scope="module")
def samples(dumped) -> list[Sample]:
    """The samples of the rollout."""
    _, directory, _ = dumped
    groups = load_samples(directory / "dump" / "rollout_data" / "0.jsonl", 4, 4)
    return list(chain.from_iterable(groups))


def test_the_dump_has_the_samples_of_both_steps(table, samples):
    assert table.sample_index.tolist() == [sample.index for sample in samples]
    assert table.group.tolist() == [sample.group_index for sample in samples]
    assert table.step.tolist() == [0] * 8 + [1] * 8


def test_the_dump_has_the_tokens_of_the_rollout(table, samples):
    responses = [sample.response_ids for sample in samples]
    assert table.token.tolist() == list(chain.from_iterable(responses))
    prompts = [list(sample.row.token_ids) for sample in samples]
    assert [ids.tolist() for ids in table.prompt] == prompts


def test_the_dump_has_the_answers_of_the_rollout(table, samples):
    assert table.reward.tolist() == pytest.approx([sample.reward for sample in samples])
    assert table.text == tuple(sample.response for sample in samples)
    log_probs = np.concatenate([sample.rollout_log_probs for sample in samples])
    np.testing.assert_allclose(table.rollout_log_prob, log_probs, 1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("old_policy", "recomputed"),
        ("rollout_precision", "int8"),
        ("criteria", ["token", "veto", "nonfinite", "other"]),
        ("workers", ["local"]),
    ],
)
def test_the_dump_has_metadata(table, name, expected):
    assert table.metadata[name] == expected


def test_an_in_process_engine_is_worker_0(table):
    assert not table.rollout_worker.any()


def test_recommend_has_the_steps_per_rollout(table):
    assert measured(table, diagnose(table)).conditions.steps == 2


def test_only_the_first_step_has_the_old_policy(table):
    assert (table.train_log_prob[:8] == table.old_log_prob[:8]).all()
    assert (table.train_log_prob[-8:] != table.old_log_prob[-8:]).any()


@pytest.fixture(scope="module", params=[0, 1], ids=["first step", "second step"])
def dumped_step(request, dumped):
    """The table of a step, its metrics, and the tokens that each criterion rejected."""
    _, directory, rows = dumped
    both = read(directory / "dump")
    table = both.select(np.flatnonzero(both.step == request.param))
    rejected = {}
    for bit, name in enumerate(table.metadata["criteria"]):
        rejected[name] = (table.rejected >> bit) & 1
    return table, rows[request.param], rejected


def test_rejected_tokens_are_those_of_the_metrics(dumped_step):
    table, row, rejected = dumped_step
    share = row["train/mis_rs_token_masked_fraction"]
    assert rejected["token"].mean() == pytest.approx(share, abs=1e-6)
    kept = row["train/gradient_kept_fraction"]
    assert (table.rejected == 0).mean() == pytest.approx(kept, abs=1e-6)


def test_criteria_reject_tokens(dumped_step):
    table, _, rejected = dumped_step
    assert rejected["token"].mean() > 0
    assert rejected["veto"].mean() > 0
    assert not rejected["other"].any()
    assert (rejected["veto"] == table.vetoed).all()


def test_weights_are_those_of_the_metrics(dumped_step):
    table, row, _ = dumped_step
    mean = row["train/mis_ratio_mean_after_mis"]
    assert table.bounded_weight.mean() == pytest.approx(mean, rel=1e-6)
    largest = row["train/mis_weight_max_before_clip"]
    assert table.weight.max() == pytest.approx(largest, rel=1e-6)
    assert (table.bounded_weight == np.minimum(table.weight, np.float32(1.01))).all()


def test_log_ratios_are_those_of_the_metrics(dumped_step):
    table, row, _ = dumped_step
    k3 = np.expm1(table.log_ratio).mean() - table.log_ratio.mean()
    assert k3 == pytest.approx(row["train/mismatch_k3_kl"], rel=1e-3)


MEASURED = {
    "bypass": ["--use-rollout-logprobs"],
    "bypass with one step": ["--use-rollout-logprobs", "--num-steps-per-rollout", "1"],
    "bypass with weights": ["--use-rollout-logprobs", "--policy-loss", "reinforce", "--use-tis"],
    "interpolated": ["--old-logprobs", "interpolate", "--use-tis"],
    "interpolated with one step": [
        "--old-logprobs",
        "interpolate",
        "--use-tis",
        "--num-steps-per-rollout",
        "1",
    ],
    "decoupled": ["--use-tis"],
    "decoupled with one step": ["--use-tis", "--num-steps-per-rollout", "1"],
}
"""Flags of runs with stale weights and --get-mismatch-metrics, whose metrics are of the training
engine's π_old."""


@pytest.fixture(scope="module", params=MEASURED)
def mismatch_run(request, tmp_path_factory):
    """The flags of a run with mismatch metrics, its rows, and its dump."""
    directory = tmp_path_factory.mktemp("measured")
    flags = [*make_task(directory), "--num-rollout", "2", "--update-weights-interval", "2"]
    flags += ["--num-steps-per-rollout", "2", "--get-mismatch-metrics", *MEASURED[request.param]]
    rows = run_here([*flags, "--dump-details", str(directory / "dump")], directory / "out")
    return request.param, rows, read(directory / "dump")


def test_mismatch_metrics_follow_from_the_dump(mismatch_run):
    _, rows, dump = mismatch_run
    assert rows[-1]["train/mismatch_k3_kl"] > 1e-4  # stale weights, unlike in the first step
    for step, row in enumerate(rows):
        table = dump.select(np.flatnonzero(dump.step == step))
        columns = (table.policy_log_prob, table.rollout_log_prob, table.loss_mask)
        inputs = [torch.from_numpy(np.array(column)) for column in columns]
        lengths = table.response_length.tolist()
        found = correct(RolloutCorrectionConfig(), *inputs, lengths=lengths).statistics.metrics()
        expected = {name: row[f"train/{name}"] for name in found}
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_mismatch_by_staleness_adds_up_to_the_mismatch(mismatch_run):
    _, rows, _ = mismatch_run
    for row in rows:
        shares = {
            name: value
            for name, value in row.items()
            if name.startswith("train/token_fraction_staleness_")
        }
        kl = {name: row[name.replace("token_fraction", "mismatch_kl")] for name in shares}
        total = sum(share * kl[name] for name, share in shares.items())
        assert not shares or total == pytest.approx(row["train/mismatch_kl"], rel=1e-5, abs=1e-9)


@pytest.fixture
def last_step(mismatch_run):
    """The table of the last step, and its metrics."""
    _, rows, dump = mismatch_run
    return dump.select(np.flatnonzero(dump.step == len(rows) - 1)), rows[-1]


def test_the_report_has_the_mismatch_of_the_metrics(last_step):
    table, row = last_step
    assert summary(table)["k3"] == pytest.approx(row["train/mismatch_k3_kl"], rel=1e-4)


def test_recommend_has_the_mismatch_of_the_metrics(last_step):
    table, row = last_step
    k3 = measured(table, diagnose(table)).k3
    assert k3 == pytest.approx(row["train/mismatch_k3_kl"], rel=1e-4)


def test_what_if_without_correction_has_the_metrics(last_step):
    table, row = last_step
    names = ("mismatch_kl", "mismatch_k3_kl", "mismatch_log_ppl_diff", "effective_sequence_share")
    (answer,) = what_if(table, [RolloutCorrectionConfig(get_mismatch_metrics=True)])
    metrics = {name: answer.metrics[name] for name in names}
    expected = {name: row[f"train/{name}"] for name in names}
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_weights_of_the_dump_are_those_of_the_loss(mismatch_run):
    name, rows, dump = mismatch_run
    for step, row in enumerate(rows):
        table = dump.select(np.flatnonzero(dump.step == step))
        expected = row["train/mis_ratio_mean_after_mis"]
        if name in ("bypass", "bypass with one step"):  # weights are measured and not applied
            expected = 1.0
        assert table.bounded_weight.mean() == pytest.approx(expected, rel=1e-5)
        assert table.weight.max() == pytest.approx(
            row["train/mis_weight_max_before_clip"], rel=1e-5
        )


PRESETS = ("decoupled_geo_rs_token_tis_adaptive", "bypass_pg_geo_rs_seq_tis")


@pytest.fixture(scope="module", params=PRESETS)
def answered_preset(request, dumped, tmp_path_factory):
    """A preset, the answer of what-if to a run without it, and the metrics of a run with it."""
    preset = request.param
    output = tmp_path_factory.mktemp("preset")
    flags, directory, _ = dumped
    replay = [*flags[: -len(CORRECTION)], "--load-debug-rollout-data"]
    replay.append(str(directory / "dump/rollout_data/0.jsonl"))
    dump = output / "plain.parquet"
    measured = [*replay, "--get-mismatch-metrics", "--save-debug-train-data", str(dump)]
    run_here(measured, output / "plain")
    (row,) = run_here([*replay, "--rollout-correction-preset", preset], output / "with")
    (answer,) = what_if(read(dump), {preset: RolloutCorrectionConfig.preset(preset)})
    metrics = {}
    for name, value in row.items():
        if name.startswith("train/"):
            metrics[name.removeprefix("train/")] = value
    return preset, answer, metrics


def test_what_if_names_the_preset(answered_preset):
    preset, answer, _ = answered_preset
    assert answer.flags == f"--rollout-correction-preset {preset}"


def test_what_if_has_the_metrics_of_a_run_with_these_flags(answered_preset):
    _, answer, metrics = answered_preset
    shared = answer.metrics.keys() & metrics.keys()
    assert shared >= {"gradient_kept_fraction", "loss", "pg_clipfrac"}
    assert len(shared) > 20
    predicted = {name: answer.metrics[name] for name in shared}
    expected = {name: metrics[name] for name in shared}
    assert predicted == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_what_if_keeps_the_tokens_of_a_run_with_these_flags(answered_preset):
    _, answer, metrics = answered_preset
    assert answer.kept == pytest.approx(metrics["gradient_kept_fraction"], abs=1e-6)


LAYOUTS = {
    "data and context": (4, ["--context-parallel-size", "2"]),
    "tensor and pipeline": (
        4,
        [
            "--tensor-model-parallel-size",
            "2",
            "--pipeline-model-parallel-size",
            "2",
            "--micro-batch-size",
            "8",
        ],
    ),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout_dump(request, dumped, tmp_path_factory):
    """The name of a layout, the directory of the dump, and its table, sorted by sample."""
    output = tmp_path_factory.mktemp("layout")
    ranks, layout = LAYOUTS[request.param]
    flags, directory, _ = dumped
    replay = [*flags, "--num-steps-per-rollout", "2"]
    replay += ["--load-debug-rollout-data", str(directory / "dump/rollout_data/0.jsonl")]
    replay += [*layout, "--dump-details", str(output / "dump")]
    result = run_apart(replay, output / "out", ranks)
    assert result.returncode == 0, result.stderr[-4000:]
    table = read(output / "dump")
    return request.param, output / "dump", table.select(np.argsort(table.sample_index))


def test_every_data_parallel_rank_writes_a_file(layout_dump):
    layout, directory, _ = layout_dump
    count = 2 if layout == "data and context" else 1
    assert len(list((directory / "train_data").iterdir())) == count


@pytest.mark.parametrize(
    "name",
    ["token", "loss_mask", "rejected", "step", "reward", "weight_version", "rollout_log_prob"],
)
def test_every_layout_writes_equal_columns(dumped, layout_dump, name):
    expected = read(dumped[1] / "dump")
    np.testing.assert_array_equal(getattr(layout_dump[2], name), getattr(expected, name))


def test_every_layout_writes_each_prompt_once(dumped, layout_dump):
    expected = read(dumped[1] / "dump")
    prompts = [ids.tolist() for ids in layout_dump[2].prompt]
    assert prompts == [ids.tolist() for ids in expected.prompt]


@pytest.mark.parametrize(
    "name",
    ["train_log_prob", "old_log_prob", "advantage", "entropy", "weight", "bounded_weight"],
)
def test_every_layout_writes_the_numbers_of_one_rank(dumped, layout_dump, name):
    expected = read(dumped[1] / "dump")
    np.testing.assert_allclose(getattr(layout_dump[2], name), getattr(expected, name), atol=2e-4)


def test_experts_are_those_of_the_tokens_before(tmp_path):
    flags = [
        *make_task(tmp_path, "qwen3_moe"),
        "--num-rollout",
        "1",
        "--use-rollout-routing-replay",
    ]
    dump = tmp_path / "dump.pt"
    run_here(
        [
            *flags,
            "--save-debug-train-data",
            str(dump),
            "--save-debug-rollout-data",
            str(tmp_path / "r.jsonl"),
        ],
        tmp_path / "out",
    )
    table = read(dump)
    samples = [sample for group in load_samples(tmp_path / "r.jsonl", 4, 4) for sample in group]
    rows = [s.rollout_routed_experts[len(s.row.token_ids) - 1 :].numpy() for s in samples]
    assert table.experts.tolist() == np.concatenate(rows).tolist()


def test_a_file_that_is_no_dump_is_not_replaced(tmp_path, capfd):
    path = tmp_path / "1.parquet"
    path.write_text("mine")
    flags = [*make_task(tmp_path), "--num-rollout", "2"]
    flags += ["--save-debug-train-data", str(tmp_path / "{rollout_id}.parquet")]
    assert len(run_here(flags, tmp_path / "out")) == 2
    assert path.read_text() == "mine"
    assert len(read(tmp_path / "0.parquet")) == 16
    warning = f"warning: --save-debug-train-data: {path} was not written: the file exists"
    assert warning in capfd.readouterr().err


ENDINGS = {
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT)", 130, "stopped by SIGINT"),
    "an error": ("raise RuntimeError('no answer')", 2, "no answer"),
}


@pytest.fixture(scope="module", params=ENDINGS)
def early_dump(request, tmp_path_factory):
    """The dump of a run that ends early, and its rollout numbers."""
    directory = tmp_path_factory.mktemp("early")
    statement, status, message = ENDINGS[request.param]
    task = make_task(directory)
    (directory / "reward.py").write_text(
        "import os, signal\ncalls = 0\n\ndef reward(args, sample):\n    global calls\n    calls +="
        f" 1\n    if calls == 40:\n        {statement}\n    return len(sample.response_ids) % 3\n"
    )
    dump = directory / "dump"
    result = run_apart(
        [*task, "--num-rollout", "40", "--dump-details", str(dump)], directory / "out"
    )
    assert result.returncode == status and message in result.stderr, result.stderr[-4000:]
    count = len(list((dump / "rollout_data").iterdir()))
    assert count >= 2  # rollouts of 16 samples before the 40th call
    return dump, range(count)


def test_steps_before_a_run_ends_early_are_dumped(early_dump):
    dump, _ = early_dump
    files = {path.name for path in (dump / "train_data").iterdir()}
    assert len(files) >= 2
    assert files == {f"{rollout}_0.parquet" for rollout in range(len(files))}
    for rollout in range(len(files)):
        table = read(dump / "train_data" / f"{rollout}_0.parquet")
        assert table.step.tolist() == [rollout] * 16


def test_samples_before_a_run_ends_early_are_dumped(early_dump):
    dump, rollouts = early_dump
    files = {path.name for path in (dump / "rollout_data").iterdir()}
    assert files == {f"{rollout}.jsonl" for rollout in rollouts}
    for rollout in rollouts:
        assert len(load_samples(dump / "rollout_data" / f"{rollout}.jsonl", 4, 4)) == 4


def test_the_step_that_was_refused_is_dumped(tmp_path, capfd):
    from slime_tis.main import train

    task = [*make_task(tmp_path), "--num-rollout", "1"]
    (tmp_path / "reward.py").write_text(
        "def reward(args, sample):\n    return 1e30 * sample.response_ids[0]\n"
    )
    flags = [
        *task,
        "--disable-grpo-std-normalization",
        "--save-debug-train-data",
        str(tmp_path / "dump_{rank}.pt"),
    ]
    assert train([*flags, "--output-dir", str(tmp_path / "out")]) == 1
    assert "is not finite" in capfd.readouterr().err
    table = read(tmp_path / "dump_0.pt")
    assert len(table) == 16 and np.abs(table.advantage).max() > 1e29


def test_samples_replace_samples(dumped, tmp_path):
    groups = load_samples(dumped[1] / "dump" / "rollout_data" / "0.jsonl", 4, 4)
    path = tmp_path / "0.jsonl"
    save_samples(path, groups)
    save_samples(path, groups)
    assert len(load_samples(path, 4, 4)) == 4


@pytest.mark.parametrize(
    "content", ['{"prompt": "1+1="}\n', "", "[]\n"], ids=["prompts", "empty", "no objects"]
)
def test_samples_do_not_replace_other_files(dumped, tmp_path, content):
    groups = load_samples(dumped[1] / "dump" / "rollout_data" / "0.jsonl", 4, 4)
    path = tmp_path / "0.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="the file exists and is no dump"):
        save_samples(path, groups)
    assert path.read_text() == content
