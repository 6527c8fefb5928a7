"""The training engine: a megatron-core GPT model with weights, log-probs, steps and checkpoints."""

import warnings

from slime_tis.trainer.megatron import cpu_support

cpu_support.install()
# without CUDA it warns about every missing library
warnings.filterwarnings("ignore", module=r"megatron\.")
