"""Both engines on the device of the run against transformers on the CPU in float32.

`pytest --device cuda` asks for the GPU; without the option these tests run on the CPU, and are
skipped on a machine whose GPU the engines would take instead.
"""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.data.sample import Prompt, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.weight_rounding import round_int8
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.checkpoints import make_checkpoint
from tests.megatron.passes import likelihood

PROMPTS = [list(range(3, 24)), list(range(30, 39))]
RESPONSES = [[8, 11, 12, 40, 41], [13], [14, 15, 16], [50, 9, 9, 9, 9, 9, 9, 9]]
TOKENS = [[*prompt, *response] for prompt in PROMPTS for response in RESPONSES]
BF16 = 0.2
"""Twice the largest change of a log-prob of these models by bf16, seen on a CPU."""


@pytest.fixture(scope="module")
def parallel(request):
    asked = request.config.getoption("device")
    if (asked == "cuda") != torch.cuda.is_available():
        pytest.skip(f"the engines take a GPU where there is one, and --device is {asked}")
    found = initialize(MegatronConfig(hf_checkpoint="none"))
    backend = "nccl" if asked == "cuda" else "gloo"
    assert (found.device.type, torch.distributed.get_backend()) == (asked, backend)
    yield found
    shut_down()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return Path(make_checkpoint(tmp_path_factory.mktemp("on_device") / "model", "llama"))


def batch_of():
    rows = [[1] * len(response) for _ in PROMPTS for response in RESPONSES]
    return make_batch(TOKENS, rows, rows, rows)


def reference(checkpoint):
    """Log-probs of the responses, and the gradient norm of their mean, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    for tokens, response in zip(TOKENS, RESPONSES * len(PROMPTS), strict=True):
        ids = torch.tensor(tokens, device="cpu")
        logits = model(ids[None]).logits[0, -len(response) - 1 : -1]
        found.append(-cross_entropy(logits, ids[-len(response) :], reduction="none"))
    (-torch.cat(found).mean()).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return [one.detach() for one in found], float(norm)


PARTITION = [[0, 1, 2, 3], [4, 5, 6, 7]]
precisions = pytest.mark.parametrize(
    ("bf16", "tolerance"), [(False, 2e-5), (True, BF16)], ids=["fp32", "bf16"]
)


def make_engine(checkpoint, parallel, bf16) -> TrainingEngine:
    config = MegatronConfig(hf_checkpoint=str(checkpoint), clip_grad=0.0, lr=1e-3, bf16=bf16)
    return TrainingEngine(config, parallel, temperature=1.0, total_steps=2)


@precisions
def test_log_probs(checkpoint, parallel, bf16, tolerance):
    log_probs = make_engine(checkpoint, parallel, bf16).log_probs(batch_of(), PARTITION)
    expected, _ = reference(checkpoint)
    assert log_probs.device.type == parallel.device.type
    torch.testing.assert_close(log_probs.cpu(), torch.cat(expected), rtol=0.0, atol=tolerance)


@precisions
def test_the_norm_of_the_gradient(checkpoint, parallel, bf16, tolerance):
    step = make_engine(checkpoint, parallel, bf16).train_step(batch_of(), PARTITION, likelihood)
    _, norm = reference(checkpoint)
    assert step.grad_norm == pytest.approx(norm, rel=tolerance)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_step_makes_the_tokens_likelier(checkpoint, parallel, bf16):
    engine = make_engine(checkpoint, parallel, bf16)
    before = engine.log_probs(batch_of(), PARTITION)
    engine.train_step(batch_of(), PARTITION, likelihood)
    after = engine.log_probs(batch_of(), PARTITION)
    assert float((after - before).sum()) > 0.1
    assert engine.weights_are_finite()


def sampled(engine, checkpoint, temperature):
    tokenizer = load_tokenizer(checkpoint)
    texts = ["31415>", "7>", "abc def + 12>"]
    prompts = [
        Prompt(index=index, text=text, token_ids=tuple(tokenizer(f"<bos>{text}")["input_ids"]))
        for index, text in enumerate(texts)
    ]
    sampling = Sampling(n_samples=4, temperature=temperature, max_response_len=10)
    return [sample for group in engine.generate(prompts, sampling, 3) for sample in group]


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 2e-5), ("int8", 2e-5), ("bf16", BF16)]
)
def test_samples_of_the_local_engine(checkpoint, parallel, precision, tolerance, tmp_path):
    device = parallel.device
    engine = LocalEngine(checkpoint, load_tokenizer(checkpoint), precision=precision, device=device)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    if precision == "int8":
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("proj.weight"):
                    weight.copy_(round_int8(weight))
    samples = sampled(engine, checkpoint, temperature=1.0)
    assert len(samples) == 12
    for sample in samples:
        ids = torch.tensor(sample.tokens, device="cpu")
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
        start = len(sample.row.token_ids)
        expected = log_probs[start - 1 : -1].gather(-1, ids[start:, None])[:, 0]
        found = torch.tensor(sample.rollout_log_probs, device="cpu")
        torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)
    # saves the weights, updates them from tensors on the device, and loads them from the file
    engine.save_weights(tmp_path)
    weights = {name: weight.to(device) for name, weight in model.state_dict().items()}
    engine.update_weights(lambda: iter((name, 0.5 * weight) for name, weight in weights.items()), 1)
    changed = sampled(engine, checkpoint, temperature=1.0)
    assert [sample.tokens for sample in changed] != [sample.tokens for sample in samples]
    assert changed[0].weight_versions == [1] * len(changed[0].rollout_log_probs)
    engine.load_weights(tmp_path, 2)
    again = sampled(engine, checkpoint, temperature=1.0)
    assert [sample.tokens for sample in again] == [sample.tokens for sample in samples]


@pytest.mark.parametrize("level", ["token", "sequence", "segment"])
def test_the_correction_does_not_synchronize_with_the_device(parallel, level):
    config = RolloutCorrectionConfig(
        use_tis=True, tis_level=level, use_rs=True, rs_level="geometric", rs_z_score=3.0
    )
    device = parallel.device
    rollout = -torch.arange(1.0, 41.0, device=device) / 40
    train = rollout + 0.1 * torch.sin(torch.arange(40.0, device=device))
    mask = torch.ones(40, device=device)
    first = correct(config, train, rollout, mask, lengths=[10, 0, 25, 5])
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = correct(config, train, rollout, mask, lengths=[10, 0, 25, 5])
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.weights, first.weights)
    on_cpu = correct(config, train.cpu(), rollout.cpu(), mask.cpu(), lengths=[10, 0, 25, 5])
    torch.testing.assert_close(found.weights.cpu(), on_cpu.weights, rtol=1e-5, atol=1e-6)
    assert found.statistics.metrics() == pytest.approx(
        on_cpu.statistics.metrics(), rel=1e-4, abs=1e-5
    )
