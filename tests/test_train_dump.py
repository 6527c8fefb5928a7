"""train.py --save-debug-train-data: what is in the files, on every layout, and what-if against train.py itself."""

import numpy as np
import pytest
import torch

from slime_tis.analysis.diagnosis import diagnose
from slime_tis.analysis.dumps.readers import read
from slime_tis.analysis.dumps.what_if import what_if
from slime_tis.analysis.report.mismatch_plots import summary
from slime_tis.analysis.report.recommend import measured
from slime_tis.correction import RolloutCorrectionConfig, correct
from slime_tis.trainer.data.sample_file import load_samples, save_samples
from tests.runs import make_task, run_apart, run_here

CORRECTION = (
    *("--use-tis", "--tis-upper-bound", "1.01", "--use-rs", "--rs-upper-bound", "1.03"),
    *("--rs-veto-threshold", "0.96", "--rs-veto-upper-threshold", "1.05"),
)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """Flags of a run of one rollout in two steps, its directory, and its rows; the dumps are under `dump`."""
    directory = tmp_path_factory.mktemp("dumped")
    flags = [*make_task(directory), "--num-rollout", "1", *CORRECTION]
    rows = run_here(
        [*flags, "--num-steps-per-rollout", "2", "--dump-details", str(directory / "dump")],
        directory / "out",
    )
    yield flags, directory, rows


def test_the_dump_has_the_tokens_of_the_rollout_and_of_both_steps(dumped):
    _, directory, _ = dumped
    table = read(directory / "dump" / "train_data" / "0_0.parquet")
    groups = load_samples(directory / "dump" / "rollout_data" / "0.jsonl", 4, 4)
    samples = [sample for group in groups for sample in group]
    assert table.sample_index.tolist() == [sample.index for sample in samples]
    assert table.step.tolist() == [0] * 8 + [1] * 8
    assert table.group.tolist() == [sample.group_index for sample in samples]
    assert table.token.tolist() == [token for sample in samples for token in sample.response_ids]
    assert [ids.tolist() for ids in table.prompt] == [
        list(sample.row.token_ids) for sample in samples
    ]
    assert table.reward.tolist() == pytest.approx([sample.reward for sample in samples])
    assert table.text == tuple(sample.response for sample in samples)
    np.testing.assert_allclose(
        table.rollout_log_prob, np.concatenate([s.rollout_log_probs for s in samples]), 1e-6
    )
    assert (
        table.metadata["old_policy"] == "recomputed"
        and table.metadata["rollout_precision"] == "int8"
    )
    assert table.metadata["criteria"] == ["token", "veto", "nonfinite", "other"]
    assert not table.rollout_worker.any() and table.metadata["workers"] == ["local"]
    assert (
        table.train_log_prob[:8] == table.old_log_prob[:8]
    ).all()  # the first step has the old policy
    assert (table.train_log_prob[-8:] != table.old_log_prob[-8:]).any()


def test_the_columns_are_those_of_the_metrics(dumped):
    _, directory, rows = dumped
    whole = read(directory / "dump")
    for step, row in enumerate(rows):
        table = whole.select(np.flatnonzero(whole.step == step))
        bit = {name: (table.rejected >> i) & 1 for i, name in enumerate(table.metadata["criteria"])}
        assert bit["token"].mean() == pytest.approx(
            row["train/mis_rs_token_masked_fraction"], abs=1e-6
        )
        assert (bit["token"].mean(), bit["veto"].mean()) > (0, 0) and not bit["other"].any()
        assert (bit["veto"] == table.vetoed).all()
        assert (table.rejected == 0).mean() == pytest.approx(
            row["train/gradient_kept_fraction"], abs=1e-6
        )
        assert table.bounded_weight.mean() == pytest.approx(
            row["train/mis_ratio_mean_after_mis"], rel=1e-6
        )
        assert table.weight.max() == pytest.approx(
            row["train/mis_weight_max_before_clip"], rel=1e-6
        )
        assert np.expm1(table.log_ratio).mean() - table.log_ratio.mean() == pytest.approx(
            row["train/mismatch_k3_kl"], rel=1e-3
        )
        assert (table.bounded_weight == np.minimum(table.weight, np.float32(1.01))).all()


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


def test_report_and_recommend_see_the_mismatch_of_the_metrics(mismatch_run):
    _, rows, dump = mismatch_run
    table = dump.select(np.flatnonzero(dump.step == len(rows) - 1))
    expected = rows[-1]["train/mismatch_k3_kl"]
    assert summary(table)["k3"] == pytest.approx(expected, rel=1e-4)
    assert measured(table, diagnose(table)).k3 == pytest.approx(expected, rel=1e-4)


def test_what_if_without_correction_has_the_mismatch_of_the_metrics(mismatch_run):
    _, rows, dump = mismatch_run
    table = dump.select(np.flatnonzero(dump.step == len(rows) - 1))
    found = what_if(table, [RolloutCorrectionConfig(get_mismatch_metrics=True)])[0].metrics
    for name in (
        "mismatch_kl",
        "mismatch_k3_kl",
        "mismatch_log_ppl_diff",
        "effective_sequence_share",
    ):
        assert found[name] == pytest.approx(rows[-1][f"train/{name}"], rel=1e-5, abs=1e-9)


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


@pytest.mark.parametrize("preset", PRESETS)
def test_what_if_gives_the_numbers_of_a_run_with_these_flags(dumped, tmp_path, preset):
    flags, directory, _ = dumped
    replay = [
        *flags[: -len(CORRECTION)],
        "--load-debug-rollout-data",
        str(directory / "dump/rollout_data/0.jsonl"),
    ]
    measured = [
        *replay,
        "--get-mismatch-metrics",
        "--save-debug-train-data",
        str(tmp_path / "plain.parquet"),
    ]
    run_here(measured, tmp_path / "plain")
    row = run_here([*replay, "--rollout-correction-preset", preset], tmp_path / "with")[0]
    config = RolloutCorrectionConfig.preset(preset)
    found = what_if(read(tmp_path / "plain.parquet"), {preset: config})[0]
    assert found.flags == f"--rollout-correction-preset {preset}"
    expected = {
        name.removeprefix("train/"): value
        for name, value in row.items()
        if name.startswith("train/")
    }
    shared = found.metrics.keys() & expected.keys()
    assert {"gradient_kept_fraction", "loss", "pg_clipfrac", "mis_eff_sample_size"} <= shared | {
        "mis_eff_sample_size"
    }
    assert len(shared) > 20
    for name in shared:
        assert found.metrics[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name
    assert found.kept == pytest.approx(expected["gradient_kept_fraction"], abs=1e-6)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param(["--context-parallel-size", "2"], 4, id="data and context"),
        pytest.param(
            [
                *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
                "--micro-batch-size",
                "8",
            ],
            4,
            id="tensor and pipeline",
        ),
    ],
)
def test_every_layout_writes_each_sample_once_and_whole(dumped, tmp_path, layout, ranks):
    flags, directory, _ = dumped
    replay = [*flags, "--num-steps-per-rollout", "2"]
    replay += ["--load-debug-rollout-data", str(directory / "dump/rollout_data/0.jsonl")]
    result = run_apart(
        [*replay, *layout, "--dump-details", str(tmp_path / "dump")], tmp_path / "out", ranks
    )
    assert result.returncode == 0, result.stderr[-4000:]
    expected, found = read(directory / "dump"), read(tmp_path / "dump")
    assert len(list((tmp_path / "dump" / "train_data").iterdir())) == (
        2 if "--context-parallel-size" in layout else 1
    )
    found = found.select(np.argsort(found.sample_index))
    assert [ids.tolist() for ids in found.prompt] == [ids.tolist() for ids in expected.prompt]
    for name in (
        "token",
        "loss_mask",
        "rejected",
        "step",
        "reward",
        "weight_version",
        "rollout_log_prob",
    ):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    for name in (
        "train_log_prob",
        "old_log_prob",
        "advantage",
        "entropy",
        "weight",
        "bounded_weight",
    ):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), atol=2e-4, err_msg=name
        )


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


def test_a_file_that_is_something_else_is_left_and_reported(tmp_path, capfd):
    path = tmp_path / "1.parquet"
    path.write_text("mine")
    flags = [*make_task(tmp_path), "--num-rollout", "2"]
    flags += ["--save-debug-train-data", str(tmp_path / "{rollout_id}.parquet")]
    assert len(run_here(flags, tmp_path / "out")) == 2
    assert path.read_text() == "mine" and len(read(tmp_path / "0.parquet")) == 16
    assert (
        f"warning: --save-debug-train-data: {path} was not written: the file exists"
        in capfd.readouterr().err
    )


ENDINGS = {
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT)", 130, "stopped by SIGINT"),
    "an error": ("raise RuntimeError('no answer')", 2, "no answer"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_was_dumped_before_a_run_ends_early_is_whole(tmp_path, ending):
    statement, status, message = ENDINGS[ending]
    task = make_task(tmp_path)
    (tmp_path / "reward.py").write_text(
        "import os, signal\ncalls = 0\n\ndef reward(args, sample):\n    global calls\n    calls +="
        f" 1\n    if calls == 40:\n        {statement}\n    return len(sample.response_ids) % 3\n"
    )
    result = run_apart(
        [*task, "--num-rollout", "40", "--dump-details", str(tmp_path / "dump")], tmp_path / "out"
    )
    assert result.returncode == status and message in result.stderr, result.stderr[-4000:]
    for name in ("train_data", "rollout_data"):
        files = {path.name for path in (tmp_path / "dump" / name).iterdir()}
        numbers = range(len(files))
        assert len(files) >= 2  # rollouts of 16 samples before the 40th call
        assert files == {
            f"{i}_0.parquet" if name == "train_data" else f"{i}.jsonl" for i in numbers
        }
        for i in numbers:
            if name == "train_data":
                table = read(tmp_path / "dump" / name / f"{i}_0.parquet")
                assert len(table) == 16 and table.step.tolist() == [i] * 16
            else:
                assert len(load_samples(tmp_path / "dump" / name / f"{i}.jsonl", 4, 4)) == 4


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


def test_samples_replace_samples_and_nothing_else(dumped, tmp_path):
    groups, path = (
        load_samples(dumped[1] / "dump" / "rollout_data" / "0.jsonl", 4, 4),
        tmp_path / "0.jsonl",
    )
    for _ in range(2):
        save_samples(path, groups)
    for content in ('{"prompt": "1+1="}\n', "", "[]\n"):
        path.write_text(content)
        with pytest.raises(ValueError, match="the file exists and is no dump"):
            save_samples(path, groups)
        assert path.read_text() == content
