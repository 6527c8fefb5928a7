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


@pytest.fixture(
    scope="module", params=[None, random_weights()], ids=["experts", "experts and weights"]
)
def replayed_weights(request):
    """Weights to replay; None for a run that replays only experts."""
    return request.param


@pytest.fixture(scope="module", params=CASES)
def forced_case(request, replayed_weights, checkpoints, parallel):
    """A checkpoint, a batch with experts to replay, and transformers' log-probs and gradients."""
    name = request.param
    experts = random_experts()
    forced = Forced(checkpoints[name], CASES[name][1]["norm_topk_prob"], "sigmoid" in name)
    expected = forced.log_probs(experts, replayed_weights)
    (-expected.mean()).backward()
    return checkpoints[name], batch_of(experts, replayed_weights), expected.detach(), forced


def test_log_probs_match_autograd_with_the_same_experts(forced_case, parallel):
    checkpoint, batch, expected, _ = forced_case
    engine = make_engine(checkpoint, parallel)
    torch.testing.assert_close(log_probs(engine, batch), expected, rtol=0, atol=2e-5)


def test_gradients_match_autograd_with_the_same_experts(forced_case, parallel):
    checkpoint, batch, _, forced = forced_case
    engine = make_engine(checkpoint, parallel)
    result = step(engine, batch)
    assert result.grad_norm == pytest.approx(forced.grad_norm(), rel=1e-5)
    expected = forced.router_gradients()
    for gradient, reference in zip(router_gradients(engine), expected, strict=True):
        assert float(reference.norm()) > 1e-4
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-6)


def test_the_router_chooses_other_experts(forced_case, parallel):
    checkpoint, _, expected, _ = forced_case
    engine = make_engine(checkpoint, parallel)
    assert float((log_probs(engine, batch_of(None)) - expected).abs().mean()) > 0.05


@pytest.fixture(scope="module")
def mixed(checkpoints, parallel):
    """Log-probs per sample: without replay, with all experts, and with the records of some samples.

    The first sample has experts and weights, the last one experts, the others no record.
    """
    engine = make_engine(checkpoints["weights of the best sum to 1"], parallel)
    experts = random_experts()
    records = [experts[0], None, None, experts[3]]
    batch = batch_of(records, [random_weights()[0], None, None, None])
    sizes = [length - PROMPT for length in LENGTHS]
    without = log_probs(engine, batch_of(None)).split(sizes)
    replayed = log_probs(engine, batch_of(experts)).split(sizes)
    return without, replayed, log_probs(engine, batch).split(sizes)


@pytest.mark.parametrize("sample", [1, 2])
def test_samples_without_experts_do_not_replay(mixed, sample):
    without, _, values = mixed
    torch.testing.assert_close(values[sample], without[sample], rtol=0, atol=1e-6)


def test_samples_with_experts_replay_them(mixed):
    _, replayed, values = mixed
    torch.testing.assert_close(values[3], replayed[3], rtol=0, atol=1e-6)


def test_samples_with_weights_replay_them(mixed):
    without, replayed, values = mixed
    assert float((values[0] - without[0]).abs().mean()) > 0.05
    assert float((values[0] - replayed[0]).abs().mean()) > 0.01


def test_the_reference_policy_does_not_replay(checkpoints, parallel):
    engine = make_engine(checkpoints["shared expert"], parallel)
    batch = batch_of(random_experts(), random_weights())
    reference = engine.reference_log_probs(batch, fixed_partition(len(LENGTHS), 2))
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


@pytest.fixture(scope="module")
def counted(checkpoints, parallel):
    """Metrics of a pass without replay, the router's experts, and the recorded experts.

    The second sample has no record.
    """
    engine = make_engine(checkpoints["weights of the best sum to 1"], parallel)
    experts = random_experts()
    record = []
    log_probs(engine, batch_of(None), record=record)
    log_probs(engine, batch_of([experts[0], None, *experts[2:]]), replays_routing=False)
    return engine.routing.metrics(), rows_of(record), experts


def test_differences_are_counted_once_per_fed_token(counted):
    metrics, rows, experts = counted
    sample_differences = []
    for sample in (0, 2, 3):
        chosen = rows[sample].long().sort(-1).values
        recorded = experts[sample].long().sort(-1).values
        sample_differences.append((chosen != recorded).any(-1))
    differs = torch.cat(sample_differences)
    share = float(differs.any(1).double().mean())
    assert metrics["routing_difference"] == pytest.approx(share)
    for layer in range(LAYERS):
        share = float(differs[:, layer].double().mean())
        assert metrics[f"routing_difference/layer_{layer}"] == pytest.approx(share)


def test_loads_are_counted_once_per_fed_token(counted):
    metrics, rows, _ = counted
    chosen = torch.cat(rows).long()
    fed_tokens = sum(LENGTHS) - len(LENGTHS)
    loads = []
    for layer in range(LAYERS):
        loads.append(chosen[:, layer].flatten().bincount(minlength=EXPERTS))
    shares = torch.stack(loads) / fed_tokens
    assert metrics["expert_load_max"] == pytest.approx(float(shares.max()) / TOP_K)
    assert metrics["expert_load_min"] == pytest.approx(float(shares.min()) / TOP_K)
