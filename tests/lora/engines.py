"""Training engines with LoRA adapters, and short trainings on fixed samples."""

import torch

from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.lora import is_adapter_parameter
from slime_tis.trainer.megatron.lora_weights import named_adapter_tensors
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.megatron.passes import likelihood

TOKENS = [[3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14], [15, 16, 17]]
LENGTHS = [3, 2, 2, 2]
PARTITION = [[0, 2], [1, 3]]
RANK = 4


def make_samples(parallel=None):
    """The batch of this rank's slices of the sequences."""
    ones = [[1] * length for length in LENGTHS]
    zeros = [[0] * length for length in LENGTHS]
    context = (0, 1)
    if parallel is not None:
        context = (parallel.context_rank, parallel.context_size)
    return make_batch(TOKENS, ones, [[0.0] * length for length in LENGTHS], zeros, *context)


def build(checkpoint, parallel, *, lora_rank=RANK, **options):
    """An engine with adapters on all linear layers, unless options say otherwise."""
    fields = {"lr": 1e-2, "clip_grad": 0.0, "lora_rank": lora_rank, "lora_alpha": 8.0, **options}
    keep_reference = fields.pop("keep_reference", False)
    config = MegatronConfig(hf_checkpoint=str(checkpoint), **fields)
    return TrainingEngine(
        config, parallel, temperature=1.0, total_steps=10, keep_reference=keep_reference
    )


def base_engine(checkpoint, parallel, **options):
    """An engine that trains all weights of the model."""
    return build(checkpoint, parallel, lora_rank=None, lora_alpha=32.0, **options)


def train(engine, steps=3):
    """The norms of the gradient of some steps."""
    batch = make_samples()
    return [engine.train_step(batch, PARTITION, likelihood).grad_norm for _ in range(steps)]


def adapter_tensors(engine):
    """Complete A and B by PEFT's names."""
    tensors = named_adapter_tensors(engine.model, engine.parallel)
    return {name: tensor.clone() for name, tensor in tensors}


def exported(engine):
    """The merged weights by Hugging Face names."""
    return {name: tensor.clone() for name, tensor in engine.named_hf_tensors()}


@torch.no_grad()
def randomize_adapters(engine, scale=0.1):
    """Gives every B random numbers, so that the adapters have an effect."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in engine.model.module.named_parameters():
        if is_adapter_parameter(name) and ".up." in name:
            parameter.normal_(0.0, scale, generator=generator)
