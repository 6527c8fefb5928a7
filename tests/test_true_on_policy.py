"""--true-on-policy: equal log-probs in short runs, and the gate."""

from contextlib import redirect_stderr
from io import StringIO
from types import SimpleNamespace

import pytest
import torch

from slime_tis.errors import RunStopped
from slime_tis.main import train
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.on_policy_gate import DifferingToken, OnPolicyGate
from tests.runs import make_task, run_here

ZERO = ["--true-on-policy", "--rollout-precision", "fp32", "--num-rollout", "2"]
BF16 = [*ZERO, "--bf16", "--rollout-precision", "bf16"]
MISMATCH = "train/train_rollout_logprob_abs_diff"
KEPT = "model.layers.1.input_layernorm.weight"
"""Weight that the planted fault changes."""


def largest_mismatch(rows):
    return max(row[MISMATCH] for row in rows)


@pytest.mark.parametrize(
    "flags",
    [ZERO, [*ZERO, "--micro-batch-size", "1"], BF16, [*BF16, "--micro-batch-size", "4"]],
    ids=["float32", "float32, one sample", "bfloat16", "bfloat16, four samples"],
)
def test_every_trained_token_has_equal_log_probs(run, flags):
    rows = run(*flags)
    assert largest_mismatch(rows) == 0.0
    # A run without gradients would keep its weights, and compare less.
    assert [row["train/grad_norm"] > 0 for row in rows] == [True, True]


def test_the_same_run_without_the_flag_has_a_mismatch(run):
    assert largest_mismatch(run(*BF16, "--no-true-on-policy")) > 0.0


FAMILIES = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 6},
    "smollm3": {"no_rope_layers": [1, 0]},
    "mimo": {},
}


@pytest.mark.parametrize(("family", "sizes"), FAMILIES.items(), ids=[*FAMILIES])
def test_other_dense_families_have_equal_log_probs(tmp_path, family, sizes):
    # an inner size that does not fill vectors, so that silu is composed
    task = make_task(tmp_path, family, intermediate_size=50, **sizes)
    assert largest_mismatch(run_here([*task, *BF16], tmp_path / "run")) == 0.0


def test_truncated_sampling_at_a_temperature_has_equal_log_probs(run):
    rows = run(*BF16, "--rollout-top-p", "0.9", "--rollout-temperature", "1.3")
    assert largest_mismatch(rows) == 0.0


def perturb(monkeypatch, name=KEPT):
    """Changes one value of a weight by one ulp after every update of the rollout engine."""
    update = LocalEngine.update_weights

    def with_fault(engine, source, version):
        update(engine, source, version)
        weight = engine._weights[name]
        with torch.no_grad():
            weight.view(-1)[:1].copy_(torch.nextafter(weight.view(-1)[:1], torch.tensor(9.0)))

    monkeypatch.setattr(LocalEngine, "update_weights", with_fault)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The exit status and the message of a run with one ulp in one weight."""
    directory = tmp_path_factory.mktemp("stopped")
    flags = [*make_task(directory), *ZERO, "--check-engines", "off"]
    stderr = StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stderr(stderr):
        perturb(monkeypatch)
        status = train([*flags, "--output-dir", str(directory / "run")])
    return status, stderr.getvalue()


def test_one_ulp_in_one_weight_stops_the_run(stopped):
    status, message = stopped
    assert status == 1
    assert "--true-on-policy: stopped before step 2" in message


def test_the_message_of_the_gate_names_the_operation(stopped):
    _, message = stopped
    assert "In one pass over this sample, norm before attention of layer 1: rollout and" in message


def test_the_message_of_the_gate_has_a_parity_command(stopped):
    _, message = stopped
    assert "--reference local --other training --true-on-policy` compares" in message


def test_the_fault_passes_without_the_flag(run, monkeypatch):
    perturb(monkeypatch)
    assert len(run(*ZERO, "--no-true-on-policy")) == 2


def test_a_pass_that_agrees_blames_the_batch_or_the_weights(task, tmp_path, monkeypatch, capsys):
    report = OnPolicyGate._first_difference

    def without_difference(gate, step):
        token = report(gate, step)
        assert token is None
        return DifferingToken(sample=step.samples[0], position=0, log_prob=-1.0, count=1)

    monkeypatch.setattr(OnPolicyGate, "_first_difference", without_difference)
    flags = [*task, *ZERO, "--check-engines", "off", "--output-dir", str(tmp_path / "run")]
    assert train(flags) == 1
    message = capsys.readouterr().err
    assert "In one pass over this sample, rollout and training are equal bit by bit" in message
    assert "from another batch, from the key/value cache, or from weights" in message


# The gate alone


def step_of(rollout, mask):
    """One sample with these log-probs of the rollout engine."""
    length = len(rollout)
    batch = make_batch([[1, *range(5, 5 + length)]], [mask], [rollout], [[0] * length])
    sample = Sample(
        tokens=[1, *range(5, 5 + length)],
        response_length=length,
        response="abc",
        rollout_log_probs=rollout,
        loss_mask=mask,
        group_index=3,
        index=7,
    )
    return SimpleNamespace(batch=batch, samples=[sample], partition=[[0]])


def check(trained, rollout, mask):
    gate = OnPolicyGate()
    gate.watch(SimpleNamespace(log_probs_L=torch.tensor(trained)))
    parallel = SimpleNamespace(all_gather_data=lambda value: [value])
    gate.check(step_of(rollout, mask), 4, parallel)


@pytest.mark.parametrize(
    ("trained", "rollout"),
    [
        (-0.5, -0.5000001),
        (float("nan"), -0.5),
        (-0.5, float("nan")),
        (float("nan"), float("nan")),
        (-float("inf"), -9999.0),
        (0.0, -1e-45),
    ],
    ids=["one ulp", "NaN", "missing", "both NaN", "sentinel", "denormal"],
)
def test_the_gate_stops_at(trained, rollout):
    with pytest.raises(RunStopped, match=r"before step 4.* token 2 of 3 .id 6. of sample 7"):
        check([-1.0, trained, -2.0], [-1.0, rollout, -2.0], [1, 1, 1])


def test_the_gate_ignores_tokens_without_a_loss():
    check([-1.0, float("nan"), -2.0], [-1.0, -0.5, -2.0], [1, 0, 1])


def test_the_gate_names_the_place_of_its_difference():
    gate = OnPolicyGate(locate=lambda sample: f"sample {sample.index} breaks in the norm.")
    gate.watch(SimpleNamespace(log_probs_L=torch.tensor([-1.0])))
    parallel = SimpleNamespace(all_gather_data=lambda value: [value])
    with pytest.raises(RunStopped, match="sample 7 breaks in the norm"):
        gate.check(step_of([-1.5], [1]), 1, parallel)
