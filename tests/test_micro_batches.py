"""Micro-batches that follow free memory: equal results, and equal ones in a resumed run."""

import pytest

from slime_tis.trainer.megatron import training_engine as engine_module
from slime_tis.trainer.megatron.micro_batches import token_budget_partitions
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.runs import training_metrics

FLAGS = (
    "--use-tis",
    "--use-rs",
    "--rs-level",
    "geometric",
    "--rs-upper-bound",
    "1.01",
    "--num-rollout",
    "2",
)


def test_the_token_budget_is_printed_with_its_reason(run, capsys):
    run(*FLAGS, "--num-rollout", "1")
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("micro-batches: ")]
    assert " tokens on a rank (" in line
    assert " GiB free, " in line
    assert "--micro-batch-size N" in line


def test_micro_batches_that_fit_give_the_same_results(run, monkeypatch, capsys):
    one = run(*FLAGS, name="one")
    budgets = []
    counts = []

    def counted(trees, budget, rollouts):
        partitions = token_budget_partitions(trees, budget, rollouts)
        budgets.append(budget)
        counts.append(len(partitions[0]))
        return partitions

    monkeypatch.setattr(engine_module, "token_budget_partitions", counted)
    monkeypatch.setattr(engine_module, "free_memory", lambda device, processes: 2**21)
    several = run(*FLAGS, name="several")
    assert min(counts) > 1
    assert f"micro-batches: at most {budgets[0]} tokens" in capsys.readouterr().out
    for row, expected in zip(several, one, strict=True):
        assert training_metrics(row) == pytest.approx(
            training_metrics(expected), rel=1e-4, abs=1e-5
        )


def test_a_resumed_run_has_the_micro_batches_that_it_had(run, monkeypatch, capsys, tmp_path):
    save = str(tmp_path / "save")
    monkeypatch.setattr(engine_module, "free_memory", lambda device, processes: 2**21)
    run("--num-rollout", "1", "--save", save, name="first")
    (first,) = [
        line.split(" (")[0]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("micro-batches")
    ]
    monkeypatch.setattr(engine_module, "free_memory", lambda device, processes: 2**40)
    run("--num-rollout", "2", "--save", save, "--load", save, name="second")
    assert f"{first} (as before this run was resumed)" in capsys.readouterr().out


CERTAIN = """
def reward(args, sample):
    if {certain}:
        return 1.0
    return len(sample.response_ids) % 3 + sample.response_ids[0] / 50
"""


@pytest.mark.parametrize(
    ("certain", "flags", "without_gradient"),
    [
        pytest.param(
            "sample.group_index % 2", [], 3, id="every second group, in separate micro-batches"
        ),
        pytest.param("True", [], 6, id="all, and no gradient at all"),
        pytest.param(
            "sample.group_index % 2",
            ["--rollout-pull-coef", "0.01"],
            0,
            id="the pull has a gradient",
        ),
        pytest.param(
            "sample.group_index % 2",
            ["--policy-loss", "dro"],
            0,
            id="the loss has a term without advantage",
        ),
        pytest.param(
            "sample.group_index % 2",
            ["--entropy-coef", "0.01"],
            0,
            id="another term has a gradient",
        ),
        pytest.param(
            "sample.group_index % 2",
            ["--use-kl-loss", "--kl-loss-coef", "0.1"],
            0,
            id="the reference policy, too",
        ),
    ],
)
def test_micro_batches_without_advantages_have_no_backward_pass(
    certain, flags, without_gradient, run, monkeypatch, tmp_path
):
    """If all rewards of a group are equal, its gradient is zero; metrics do not change."""
    (tmp_path / "certain.py").write_text(CERTAIN.format(certain=certain))
    flags = [*flags, "--micro-batch-size", "8", "--use-tis", "--use-rs", "--rs-level", "geometric"]
    flags += ["--rs-upper-bound", "1.01", "--custom-rm-path", f"{tmp_path / 'certain.py'}:reward"]
    gradients = []
    pack = TrainingEngine._pack

    def counted(engine, batch):
        micro = pack(engine, batch)
        gradients.append(micro.has_gradient)
        return micro

    with monkeypatch.context() as patch:
        patch.setattr(TrainingEngine, "_pack", counted)
        skipped = run(*flags, name="skipped")
    monkeypatch.setattr(TrainingEngine, "skips_backward", False)
    whole = run(*flags, name="whole")
    assert gradients.count(False) == without_gradient
    for one, other in zip(skipped, whole, strict=True):
        assert training_metrics(one) == pytest.approx(training_metrics(other), rel=1e-4, abs=1e-5)


def test_the_effective_sequence_share_scales_the_learning_rate(run):
    flags = ["--ess-lr-scaling", "sqrt", "--rollout-precision", "fp8", "--lr", "1e-3"]
    rows = [row for row in run(*flags, "--micro-batch-size", "1") if "train/lr" in row]
    assert rows
    for row in rows:
        assert 0 < row["train/effective_sequence_share"] < 0.999
        assert row["train/lr"] == pytest.approx(1e-3 * row["train/effective_sequence_share"] ** 0.5)


def test_float16_has_less_mismatch_than_bfloat16(run):
    k3 = {}
    for precision in ("fp16", "bf16"):
        rows = run(
            f"--{precision}", "--rollout-precision", precision, "--num-rollout", "2", name=precision
        )
        k3[precision] = max(
            row["train/mismatch_k3_kl"] for row in rows if "train/mismatch_k3_kl" in row
        )
    assert 0 < k3["fp16"] < k3["bf16"] / 5, k3
