"""Routing replay in one process, against transformers with the same experts forced upon it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.batch import fixed_partition, make_batch
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.checkpoints import make_checkpoint
from tests.megatron.passes import RECOMPUTE_LAYERS, likelihood

PROMPT = 3
LENGTHS = (9, 14, 8, 11)
LAYERS, EXPERTS, TOP_K = 3, 8, 2
CASES = {
    "weights of the best sum to 1": ("qwen3_moe", {"norm_topk_prob": True}),
    "weights of the best as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "shared expert": ("qwen2_moe", {"norm_topk_prob": False}),
    "sigmoid scores, bias, groups": (
        "glm4_moe",
        {"norm_topk_prob": True, "n_group": 4, "topk_group": 1, "first_k_dense_replace": 0},
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("moe")
    sizes = {"num_hidden_layers": LAYERS}
    return {
        name: make_checkpoint(root / name, family, **sizes, **more)
        for name, (family, more) in CASES.items()
    }


def make_engine(directory, parallel, **options):
    config = MegatronConfig(
        hf_checkpoint=str(directory), lr=0.0, weight_decay=0.0, clip_grad=0.0, **options
    )
    return TrainingEngine(config, parallel, temperature=1.0, total_steps=1, keep_reference=True)


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 60, (length,), generator=generator).tolist() for length in LENGTHS]


def random_experts():
    generator = torch.Generator().manual_seed(1)
    scores = [torch.rand(length - 1, LAYERS, EXPERTS, generator=generator) for length in LENGTHS]
    return [score.argsort(-1)[..., :TOP_K].to(torch.uint8) for score in scores]


def random_weights():
    generator = torch.Generator().manual_seed(2)
    return [torch.rand(length - 1, LAYERS, TOP_K, generator=generator) for length in LENGTHS]


def batch_of(experts, weights=None):
    ones = [[1] * (length - PROMPT) for length in LENGTHS]
    return make_batch(sequences(), ones, ones, ones).with_routing(experts, weights)


def step(engine, batch, size=2, **options):
    return engine.train_step(batch, fixed_partition(len(batch), size), likelihood, **options)


def log_probs(engine, batch, **options):
    return engine.log_probs(batch, fixed_partition(len(batch), 2), **options)


def rows_of(record):
    """The rows of each sequence, from a pass over micro-batches of two."""
    parts = [part.split(LENGTHS[2 * number : 2 * number + 2]) for number, part in enumerate(record)]
    return [part[:-1] for pair in parts for part in pair]


class Forced:
    """A model of transformers whose routers use given experts, and optionally given weights."""

    def __init__(self, directory, norm, sigmoid=False):
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, experts_implementation="eager"
        )
        self._norm, self._sigmoid = norm, sigmoid
        self._experts = None
        self._weights = None
        for place, layer in enumerate(self.model.model.layers):
            layer.mlp.gate.register_forward_hook(
                lambda gate, args, output, place=place: self._force(place, output)
            )

    def _force(self, place, output):
        experts = self._experts[:, place].long()
        scores = output[0].sigmoid() if self._sigmoid else output[0].softmax(-1)
        weights = scores.gather(1, experts)
        if self._norm:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * getattr(self.model.config, "routed_scaling_factor", 1.0)
        if self._weights is not None:
            weights = self._weights[:, place] + weights - weights.detach()
        return output[0], weights, experts

    def log_probs(self, experts, weights=None):
        """[L] of the responses, with gradient."""
        found = []
        last = torch.arange(TOP_K).expand(
            1, LAYERS, TOP_K
        )  # for the last token, whose output is ignored
        for number, ids in enumerate(sequences()):
            self._experts = torch.cat([experts[number].long(), last])
            self._weights = (
                None if weights is None else torch.cat([weights[number], torch.ones(last.shape)])
            )
            logits = self.model(torch.tensor([ids])).logits[0]
            found.append(
                logits[PROMPT - 1 : -1]
                .log_softmax(-1)
                .gather(-1, torch.tensor(ids[PROMPT:])[:, None])[:, 0]
            )
        return torch.cat(found)

    def router_gradients(self):
        return [layer.mlp.gate.weight.grad for layer in self.model.model.layers]

    def grad_norm(self):
        squares = [parameter.grad.double().pow(2).sum() for parameter in self.model.parameters()]
        return float(torch.stack(squares).sum().sqrt())


def router_gradients(engine):
    named = dict(engine.model.module.named_parameters())
    return [named[f"decoder.layers.{layer}.mlp.router.weight"].main_grad for layer in range(LAYERS)]


@pytest.mark.parametrize(
    "weights", [None, random_weights()], ids=["experts", "experts and weights"]
)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_match_autograd_with_the_same_experts(
    case, weights, checkpoints, parallel
):
    experts, forced = (
        random_experts(),
        Forced(checkpoints[case], CASES[case][1]["norm_topk_prob"], "sigmoid" in case),
    )
    expected = forced.log_probs(experts, weights)
    (-expected.mean()).backward()
    engine = make_engine(checkpoints[case], parallel)
    batch = batch_of(experts, weights)
    torch.testing.assert_close(log_probs(engine, batch), expected.detach(), rtol=0, atol=2e-5)
    assert float((log_probs(engine, batch_of(None)) - expected).detach().abs().mean()) > 0.05
    result = step(engine, batch)
    assert result.grad_norm == pytest.approx(forced.grad_norm(), rel=1e-5)
    for found, wanted in zip(router_gradients(engine), forced.router_gradients(), strict=True):
        assert float(wanted.norm()) > 1e-4
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_samples_without_rows_and_the_reference_policy_do_not_replay(checkpoints, parallel):
    engine, experts = (
        make_engine(checkpoints["weights of the best sum to 1"], parallel),
        random_experts(),
    )
    own, replayed = log_probs(engine, batch_of(None)), log_probs(engine, batch_of(experts))
    mixed = log_probs(
        engine,
        batch_of([experts[0], None, None, experts[3]], [random_weights()[0], None, None, None]),
    )
    sizes = [length - PROMPT for length in LENGTHS]
    found, own_parts, replayed_parts = mixed.split(sizes), own.split(sizes), replayed.split(sizes)
    for sample, expected in ((1, own_parts), (2, own_parts), (3, replayed_parts)):
        torch.testing.assert_close(found[sample], expected[sample], rtol=0, atol=1e-6)
    assert float((found[0] - own_parts[0]).abs().mean()) > 0.05
    assert float((found[0] - replayed_parts[0]).abs().mean()) > 0.01  # it replays weights, too
    engine, partition = (
        make_engine(checkpoints["shared expert"], parallel),
        fixed_partition(len(LENGTHS), 2),
    )
    reference = engine.reference_log_probs(batch_of(random_experts(), random_weights()), partition)
    assert torch.equal(reference, log_probs(engine, batch_of(None)))


def test_a_record_is_replayed_after_the_weights_have_changed(checkpoints, parallel):
    engine = make_engine(checkpoints["weights of the best sum to 1"], parallel)
    record = []
    log_probs(engine, batch_of(None), record=record)
    with torch.no_grad():
        for name, weight in engine.model.module.named_parameters():
            if name.endswith("mlp.router.weight"):
                weight.add_(
                    torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)), alpha=0.5
                )
    changed = []
    log_probs(engine, batch_of(None), record=changed)
    assert not torch.equal(torch.cat(record), torch.cat(changed))
    replayed = []
    log_probs(
        engine, batch_of(random_experts()), source=record, record=replayed
    )  # takes precedence over the batch's rows
    assert torch.equal(torch.cat(record), torch.cat(replayed))
    with_record = step(engine, batch_of(None), source=record)
    assert with_record.grad_norm == pytest.approx(
        step(engine, batch_of(rows_of(record))).grad_norm, rel=1e-6
    )


RECOMPUTATION = {
    "every layer": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "groups of layers": {"recompute_method": "uniform", "recompute_num_layers": 3},
    "the first layer alone": {"recompute_method": "block", "recompute_num_layers": 1},
}


@pytest.mark.parametrize("options", RECOMPUTATION.values(), ids=list(RECOMPUTATION))
@pytest.mark.parametrize(
    "weights", [None, random_weights()], ids=["experts", "experts and weights"]
)
def test_recomputed_layers_replay_the_same_experts(options, weights, checkpoints, parallel):
    directory, batch = (
        checkpoints["weights of the best sum to 1"],
        batch_of(random_experts(), weights),
    )
    plain = make_engine(directory, parallel)
    recomputing = make_engine(directory, parallel, recompute_granularity="full", **options)
    results = [step(engine, batch, size=1) for engine in (plain, recomputing)]
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)
    counted = [engine.routing.metrics() for engine in (plain, recomputing)]
    assert counted[0] == counted[1]  # a second run counts nothing
    for one, other in zip(*map(router_gradients, (plain, recomputing)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_an_abandoned_pass_does_not_affect_the_next(checkpoints, parallel):
    engine = make_engine(checkpoints["shared expert"], parallel, **RECOMPUTE_LAYERS)
    batch = batch_of(random_experts())
    expected = step(engine, batch).grad_norm

    def interrupted(inputs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.train_step(batch, fixed_partition(len(batch), 2), interrupted)
    assert step(engine, batch).grad_norm == pytest.approx(expected, rel=1e-6)


def test_loads_and_differences_are_counted_once_per_fed_token(checkpoints, parallel):
    engine, experts = (
        make_engine(checkpoints["weights of the best sum to 1"], parallel),
        random_experts(),
    )
    record = []
    log_probs(engine, batch_of(None), record=record)
    rows = rows_of(record)
    log_probs(engine, batch_of([experts[0], None, *experts[2:]]), replays_routing=False)
    found = engine.routing.metrics()
    differs = torch.cat(
        [
            (rows[sample].long().sort(-1).values != experts[sample].long().sort(-1).values).any(-1)
            for sample in (0, 2, 3)
        ]
    )
    assert found["routing_difference"] == pytest.approx(float(differs.any(1).double().mean()))
    for layer in range(LAYERS):
        assert found[f"routing_difference/layer_{layer}"] == pytest.approx(
            float(differs[:, layer].double().mean())
        )
    chosen = torch.cat(rows).long()
    shares = torch.stack(
        [chosen[:, layer].flatten().bincount(minlength=EXPERTS) for layer in range(LAYERS)]
    ) / (sum(LENGTHS) - len(LENGTHS))
    assert found["expert_load_max"] == pytest.approx(float(shares.max()) / TOP_K)
    assert found["expert_load_min"] == pytest.approx(float(shares.min()) / TOP_K)
