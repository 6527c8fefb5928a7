"""The study of rounding noise: lengths, batches and the noise of known log-probs."""

import pytest
import torch

from studies.precision_noise.measure import Sampled, _length, by_length, compared


@pytest.mark.parametrize(
    ("ends", "length"),
    [
        pytest.param(7, 3, id="one end token"),
        pytest.param([9, 5], 1, id="several end tokens"),
        pytest.param(8, 4, id="no end"),
    ],
)
def test_a_response_ends_with_its_first_end_token(ends: int | list[int], length: int) -> None:
    assert _length(torch.tensor([5, 6, 7, 7]), ends) == length


def test_prompts_of_one_length_share_a_batch() -> None:
    prompts = [torch.zeros(n) for n in (3, 5, 3)]
    assert [len(group) for group in by_length(prompts)] == [2, 1]


def test_a_batch_has_at_most_16_prompts() -> None:
    prompts = [torch.zeros(3)] * 20
    assert [len(group) for group in by_length(prompts)] == [16, 4]


def test_the_noise_by_hand() -> None:
    half = torch.tensor([0.5]).log()
    sample = Sampled(prompt=torch.zeros(1), response=torch.zeros(1), log_probs=half)
    row = compared([sample, sample], [half + 0.1, half - 0.1])
    # p is the larger probability: 0.5 · e^0.1 and 0.5.
    uncertainty = 1 - 0.5 * torch.tensor(0.1).exp() + 0.5
    assert row["noise"] == pytest.approx(float(0.2 / uncertainty), rel=1e-6)
    assert row["mean_abs"] == pytest.approx(0.1, rel=1e-6)
    assert row["tokens"] == 2
