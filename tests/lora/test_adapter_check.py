"""The proof that the rollout engine samples with the adapter: shares, verdicts, merge rounding."""

import math

import pytest
import torch

from slime_tis.trainer.adapter_check import AdapterCheck, AdapterShare, adapter_share, trial
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.megatron.hf_weights import named_weights
from slime_tis.trainer.megatron.lora import adapters_of
from tests.lora.engines import adapter_tensors, build, exported, randomize_adapters

PROBE = tuple(range(3, 43))


def test_the_share_is_the_slope_of_a_regression(parallel):
    n0 = torch.tensor([-1.0, -2.0, -3.0])
    n = torch.tensor([-1.5, -2.0, -2.0])  # changes −0.5, 0, 1
    r = torch.tensor([-1.2, -1.9, -2.4])  # of which r has −0.2, 0.1, 0.6
    share = adapter_share(parallel, r, n, n0)
    assert share.share == pytest.approx(0.7 / 1.25)
    residual = (0.41 - 0.7**2 / 1.25) / 2
    assert share.error == pytest.approx(math.sqrt(residual / 1.25))
    assert share.effect == pytest.approx(0.5)


def test_an_adapter_without_effect_has_no_share(parallel):
    n = torch.tensor([-1.0, -2.0])
    share = adapter_share(parallel, n - 0.1, n, n)
    assert math.isnan(share.share)
    assert not share.problem(1.0, 0.0)


# share, standard error, survival, part of the verdict; the gap is as large as the noise
VERDICTS = {
    "in force": (1.0, 1e-6, 1.0, None),
    "noise": (0.6, 0.3, 1.0, None),
    "absent": (0.0, 1e-3, 1.0, "does not apply"),
    "absent, with noise": (0.2, 0.06, 1.0, "does not apply"),
    "far too large within noise": (41.2, 9.0, 1.0, None),
    "half the scale": (0.5, 0.01, 1.0, "too small a scale"),
    "twice the scale": (2.0, 0.01, 1.0, "too large a scale"),
    "the other way": (-1.0, 0.01, 1.0, "too small a scale"),
    "rounded in merging": (0.5, 0.01, 0.5, None),
    "absent although half survives": (0.0, 0.01, 0.5, "does not apply"),
    "rounded away": (0.0, 0.01, 0.1, None),
}


@pytest.mark.parametrize(("share", "error", "survival", "verdict"), VERDICTS.values(), ids=VERDICTS)
def test_verdicts(share, error, survival, verdict):
    measured = AdapterShare(share=share, error=error, effect=0.1, gap=0.01)
    problem = measured.problem(survival, 0.01)
    assert verdict in problem if verdict else not problem


# share, standard error, survival, and whether that is a proof
PROOFS = {
    "in force": (1.0, 0.01, 1.0, True),
    "noise": (1.0, 0.06, 1.0, False),
    "too much noise for a verdict": (0.0, 0.3, 1.0, False),
    "rounded away": (0.0, 0.01, 0.1, False),
}


@pytest.mark.parametrize(("share", "error", "survival", "is_proof"), PROOFS.values(), ids=PROOFS)
def test_only_a_share_that_was_judged_is_a_proof(share, error, survival, is_proof, model, parallel):
    check = check_of(build(model, parallel), LocalEngine(model, load_tokenizer(model)))
    check.survival = survival
    measured = AdapterShare(share=share, error=error, effect=0.1, gap=0.01)
    line = check.summary({"the engine": measured}, is_trial=False)
    assert line.startswith("the rollout engine applies the LoRA adapter") == is_proof


def test_no_copies_of_the_weights_are_no_proof(model, parallel):
    check = check_of(build(model, parallel), LocalEngine(model, load_tokenizer(model)))
    assert check.summary({}, is_trial=True).startswith("warning: not proven")


# gap, gap without an adapter, survival, whether a part is missing; the effect is 0.1 nats
GAPS = {
    "noise": (0.04, 0.01, 1.0, False),
    "more than noise": (0.06, 0.01, 1.0, True),
    "no noise": (0.003, 0.0, 1.0, True),
    "rounded in merging": (0.04, 0.0, 0.6, False),
    "unknown noise": (0.06, None, 1.0, False),
}


@pytest.mark.parametrize(("gap", "noise", "survival", "missing"), GAPS.values(), ids=GAPS)
def test_a_gap_beyond_the_noise_is_a_missing_part(gap, noise, survival, missing):
    measured = AdapterShare(share=1.0, error=0.0, effect=0.1, gap=gap)
    assert bool(measured.problem(survival, noise)) == missing


class FaultyEngine(LocalEngine):
    """A rollout engine that receives other weights than it is sent."""

    def __init__(self, checkpoint, engine, change, **options):
        super().__init__(checkpoint, load_tokenizer(checkpoint), **options)
        self.engine = engine
        self.change = change

    def update_weights(self, source, version):
        """Loads base + change(name, merged − base)."""
        base = load_base(self.engine)

        def changed():
            for name, tensor in source():
                yield name, base[name] + self.change(name, tensor - base[name])

        super().update_weights(changed, version)


def load_base(engine):
    """The model's weights without the adapters, by Hugging Face names."""
    with trial(engine):
        for adapter in adapters_of(engine.model.module).values():
            for up in adapter.up.values():
                up.data.zero_()
        return exported(engine)


def check_of(engine, sampler):
    return AdapterCheck(engine=engine, sampler=sampler, probe=PROBE, rounds_to_nearest=True)


FAULTS = {
    "absent": (lambda name, change: 0 * change, "does not apply the LoRA adapter"),
    "half of alpha": (lambda name, change: change / 2, "with too small a scale"),
    "twice": (lambda name, change: 2 * change, "with too large a scale, or twice"),
    "only the attention": (
        lambda name, change: change if "self_attn" in name else 0 * change,
        "applies only a part of the LoRA adapter",
    ),
    "NaN": (lambda name, change: math.nan * change, "are not finite in training or in"),
}


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_an_engine_with_another_adapter_is_refused(change, message, model, parallel):
    engine = build(model, parallel)
    sampler = FaultyEngine(model, engine, change)
    check = check_of(engine, sampler)
    check()
    randomize_adapters(engine, scale=0.05)
    sampler.update_weights(engine.named_hf_tensors, 1)
    with pytest.raises(ValueError, match=message):
        check()


def test_an_engine_with_the_adapter_has_a_share_of_1(model, parallel):
    engine = build(model, parallel)
    randomize_adapters(engine, scale=0.05)
    sampler = LocalEngine(model, load_tokenizer(model))
    sampler.update_weights(engine.named_hf_tensors, 1)
    metrics = check_of(engine, sampler)()
    assert metrics["rollout/adapter_share"] == pytest.approx(1, abs=1e-4)
    assert metrics["rollout/adapter_survival"] == 1.0


def test_an_engine_with_an_older_adapter_is_refused(model, parallel):
    engine = build(model, parallel)
    randomize_adapters(engine, scale=0.02)
    sampler = LocalEngine(model, load_tokenizer(model))
    sampler.update_weights(engine.named_hf_tensors, 1)
    with torch.no_grad():
        for adapter in adapters_of(engine.model.module).values():
            for up in adapter.up.values():
                up.mul_(3)
    with pytest.raises(ValueError, match="with too small a scale"):
        check_of(engine, sampler)()


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8"])
def test_an_engine_of_lower_precision_is_accepted(precision, model, parallel):
    engine = build(model, parallel)
    randomize_adapters(engine, scale=0.05)
    sampler = LocalEngine(model, load_tokenizer(model), precision=precision)
    sampler.update_weights(engine.named_hf_tensors, 1)
    metrics = check_of(engine, sampler)()
    assert metrics["rollout/adapter_share"] == pytest.approx(1, abs=0.1)


def test_survival_is_what_rounding_leaves_of_the_adapter(model, parallel):
    engine = build(model, parallel, lora_target_modules=("o_proj",))
    randomize_adapters(engine, scale=1e-3)
    sampler = LocalEngine(model, load_tokenizer(model), precision="bf16")
    sampler.update_weights(engine.named_hf_tensors, 1)
    product = total = 0.0
    for name, adapter in adapters_of(engine.model.module).items():
        weight = named_weights(engine.model.module)[name]
        change = (2.0 * adapter.up["o_proj"] @ adapter.down["o_proj"]).detach()
        rounded = (weight + change).bfloat16().float() - weight.bfloat16().float()
        product += float((rounded * change).sum().double())
        total += float(change.square().sum().double())
    metrics = check_of(engine, sampler)()
    assert metrics["rollout/adapter_survival"] == pytest.approx(product / total, rel=1e-5)


def test_a_trial_leaves_the_adapters_bitwise_unchanged(model, parallel):
    engine = build(model, parallel)
    randomize_adapters(engine)
    before = adapter_tensors(engine)
    with trial(engine):
        assert not torch.equal(
            next(iter(adapters_of(engine.model.module).values())).up["q_proj"], before[FIRST]
        )
    for name, tensor in adapter_tensors(engine).items():
        assert torch.equal(tensor, before[name])


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def test_a_trial_adapter_has_the_stated_size(model, parallel):
    """Relative to weights with the variance 1/in, for A and B of every layer together."""
    engine = build(model, parallel, lora_rank=16, lora_alpha=64.0)
    squares = values = 0.0
    with trial(engine):
        for adapter in adapters_of(engine.model.module).values():
            change = adapter.weight_change()
            squares += float(change.square().sum()) * change.shape[1]
            values += change.numel()
    assert math.sqrt(squares / values) == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("scale", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_a_small_adapter_in_bf16_is_never_called_absent(scale, model, parallel):
    """Noise of training alone would make the share about 0.5."""
    engine = build(model, parallel, bf16=True)
    sampler = LocalEngine(model, load_tokenizer(model), precision="bf16")
    sampler.update_weights(engine.named_hf_tensors, 0)
    check = check_of(engine, sampler)
    check()
    randomize_adapters(engine, scale=scale)
    sampler.update_weights(engine.named_hf_tensors, 1)
    check()


def test_an_absent_adapter_is_found_in_bf16(model, parallel):
    engine = build(model, parallel, bf16=True)
    sampler = LocalEngine(model, load_tokenizer(model), precision="bf16")
    sampler.update_weights(engine.named_hf_tensors, 0)
    check = check_of(engine, sampler)
    check()
    randomize_adapters(engine, scale=0.1)
    with pytest.raises(ValueError, match="does not apply the LoRA adapter"):
        check()
