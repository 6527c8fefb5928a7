"""The training engine: a Megatron-core GPT model, its weights, log-probs, loss step and checkpoints."""

import warnings

from slime_tis.trainer.megatron import cpu_support

cpu_support.install()
warnings.filterwarnings(
    "ignore", module=r"megatron\."
)  # without CUDA it warns about every missing library
