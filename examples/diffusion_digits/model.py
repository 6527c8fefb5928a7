"""The velocity model, its flow-matching training, and the low-precision copy that samples.

Shapes: suffix _B is per image, _BP is [B, 64 pixels].
"""

import copy
import math

import torch
from torch import Tensor, nn

from examples.diffusion_digits.config import PIXELS, DigitsConfig
from examples.diffusion_digits.data import CLASSES, Images
from slime_tis.trainer.engines.weight_rounding import round_fp8

FREQUENCIES = 16


class VelocityModel(nn.Module):
    """v(x_t, t, digit): residual blocks with the time and the digit added to each."""

    frequencies: Tensor

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0, math.log(100.0), FREQUENCIES).exp())
        self.of_digit = nn.Embedding(CLASSES, width)
        self.of_time = nn.Linear(2 * FREQUENCIES, width)
        self.first = nn.Linear(PIXELS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)
            )
            for _ in range(layers)
        )
        self.last = nn.Linear(width, PIXELS)

    def forward(self, sample_BP: Tensor, time_B: Tensor, digit_B: Tensor) -> Tensor:
        """The velocity, in the precision of the weights."""
        dtype = self.first.weight.dtype
        angles = time_B[:, None] * self.frequencies
        condition = self.of_time(
            torch.cat([angles.sin(), angles.cos()], 1).to(dtype)
        ) + self.of_digit(digit_B)
        hidden = self.first(sample_BP.to(dtype))
        for block in self.blocks:
            hidden = hidden + block(hidden + condition)
        return self.last(hidden)


def pretrain(images: Images, config: DigitsConfig) -> VelocityModel:
    """Flow matching: x_t = (1 − t)·x_0 + t·ε, and the model learns the velocity ε − x_0.

    Source: "Flow Matching for Generative Modeling", Lipman et al.
    (https://arxiv.org/abs/2210.02747), with the straight paths of "Flow Straight and Fast", Liu et
    al. (https://arxiv.org/abs/2209.03003).
    """
    torch.manual_seed(config.seed)
    model = VelocityModel(config.hidden_size, config.layers)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(config.pretrain_steps):
        pick = torch.randint(len(images.digits_B), (256,))
        clean, noise, time = images.pixels_BP[pick], torch.randn(256, PIXELS), torch.rand(256)
        noisy = clean + time[:, None] * (noise - clean)
        loss = (model(noisy, time, images.digits_B[pick]) - (noise - clean)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def rollout_copy(model: VelocityModel, precision: str) -> VelocityModel:
    """A copy with its own weights in fp32, bf16 (arithmetic too) or fp8 (computed with in fp32)."""
    sampler = copy.deepcopy(model).requires_grad_(False)
    for parameter in sampler.parameters():
        if precision == "bf16":
            parameter.data = parameter.data.to(torch.bfloat16)
        elif precision == "fp8" and parameter.dim() == 2:
            parameter.copy_(round_fp8(parameter))
    return sampler
