"""scikit-learn's handwritten digits in two halves, and the classifiers that judge samples.

One half trains the flow model, the other half trains the classifiers.

Shapes: suffix _B is per image, _BP is [B, 64 pixels].
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from examples.diffusion_digits.config import PIXELS, DigitsConfig

CLASSES = 10
BLUR = 0.3
"""Most noise that a classifier is trained on, so that it has an opinion of images that are not
quite clean."""


@dataclass(frozen=True)
class Images:
    """Images in [−1, 1] and the digits they show."""

    pixels_BP: Tensor
    digits_B: Tensor


def load_halves(seed: int) -> tuple[Images, Images]:
    """The 1797 images in an order that the seed gives, halved."""
    found = load_digits()
    pixels = torch.tensor(found.data, dtype=torch.float32) / 8 - 1
    digits = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    halves = order.tensor_split(2)
    return Images(pixels[halves[0]], digits[halves[0]]), Images(
        pixels[halves[1]], digits[halves[1]]
    )


def miscaptioned(images: Images, share: float, generator: torch.Generator) -> Images:
    """Returns the images with a share of captions drawn at random; one in ten of these is right."""
    count = len(images.digits_B)
    wrong = torch.rand(count, generator=generator) < share
    drawn = torch.randint(CLASSES, (count,), generator=generator)
    return Images(images.pixels_BP, torch.where(wrong, drawn, images.digits_B))


def train_judge(
    images: Images, width: int, config: DigitsConfig, generator: torch.Generator
) -> nn.Module:
    """A classifier of digits."""
    judge = nn.Sequential(
        nn.Linear(PIXELS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )
    _initialise(judge, generator)
    optimizer = torch.optim.Adam(judge.parameters(), 2e-3)
    for _ in range(config.judge_steps):
        pick = torch.randint(len(images.digits_B), (128,), generator=generator)
        blur = (
            BLUR
            * torch.rand(128, 1, generator=generator)
            * torch.randn(128, PIXELS, generator=generator)
        )
        loss = nn.functional.cross_entropy(
            judge(images.pixels_BP[pick] + blur), images.digits_B[pick]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return judge.requires_grad_(False)


@torch.no_grad()
def reward(judge: nn.Module, pixels_BP: Tensor, digits_B: Tensor) -> Tensor:
    """Returns the classifier's probability of the requested digit; 0 for a non-finite image."""
    probability = judge(pixels_BP).softmax(-1).gather(1, digits_B[:, None]).squeeze(1)
    return probability.nan_to_num(0.0)


def _initialise(judge: nn.Module, generator: torch.Generator) -> None:
    for module in judge.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(module.bias)
