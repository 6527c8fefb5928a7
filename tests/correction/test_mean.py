"""The mean of the corrected loss: by hand in every layout, 0 where everything is rejected, and over
micro-batches."""

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, correct

# Two sequences; the third token of the first is masked, its fourth is rejected, ratios are 1, 2, -,
# 9 | 0.5, 1.
DELTA = [torch.tensor([1.0, 2.0, 1.0, 9.0]).log(), torch.tensor([0.5, 1.0]).log()]
MASK = [torch.tensor([1, 1, 0, 1]), torch.tensor([1, 1])]
LOSS = [torch.tensor([1.0, 2.0, torch.nan, torch.inf]), torch.tensor([4.0, 8.0])]
WEIGHTED = {
    "use_tis": True,
    "tis_upper_bound": 4.0,
    "use_rs": True,
    "rs_lower_bound": 0.1,
    "rs_upper_bound": 4.0,
}


def mean(layout, aggregation, **options):
    config = RolloutCorrectionConfig(**{**WEIGHTED, **options})
    if layout == "list":
        return correct(config, DELTA, [torch.zeros(4), torch.zeros(2)], MASK).mean(
            LOSS, aggregation=aggregation
        )
    if layout == "packed":
        delta, loss, mask = (torch.cat(x) for x in (DELTA, LOSS, MASK))
        found = correct(config, delta, torch.zeros(6), mask, lengths=[4, 2])
        return found.mean(loss, aggregation=aggregation)
    padded = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (DELTA, LOSS, MASK)]
    found = correct(config, padded[0], torch.zeros(2, 4), padded[2])
    return found.mean(padded[1], aggregation=aggregation)


@pytest.mark.parametrize("layout", ["list", "packed", "padded"])
@pytest.mark.parametrize(
    ("aggregation", "normalizer", "expected"),
    [
        # weight · loss: 1, 4, -, - | 2, 8
        ("token-mean", "kept", (1 + 4 + 2 + 8) / 4),
        ("token-mean", "original", (1 + 4 + 2 + 8) / 5),
        ("seq-mean-token-mean", "kept", ((1 + 4) / 2 + (2 + 8) / 2) / 2),
        ("seq-mean-token-mean", "original", ((1 + 4) / 3 + (2 + 8) / 2) / 2),
    ],
    ids=[
        "token-mean over accepted",
        "token-mean over original",
        "seq-mean over accepted",
        "seq-mean over original",
    ],
)
def test_by_hand(layout, aggregation, normalizer, expected):
    assert mean(layout, aggregation, rejection_normalizer=normalizer).item() == pytest.approx(
        expected
    )


@pytest.mark.parametrize("is_masked", [False, True], ids=["rejected", "masked"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("normalizer", ["kept", "original"])
def test_everything_rejected_is_zero_with_a_gradient_of_zero(is_masked, aggregation, normalizer):
    bounds = {"rs_lower_bound": 8.0, "rs_upper_bound": 9.0}
    config = RolloutCorrectionConfig(use_rs=True, **bounds, rejection_normalizer=normalizer)
    logits = torch.tensor([[0.3, -1.0], [2.0, 0.5]], requires_grad=True)
    zeros = torch.zeros(2, 2)
    found = correct(config, zeros, zeros, zeros if is_masked else torch.ones(2, 2))
    value = found.mean(logits.exp(), aggregation=aggregation)
    assert not found.mask.any()
    value.backward()
    assert (
        value.item() == 0.0 and logits.grad is not None and logits.grad.tolist() == [[0, 0], [0, 0]]
    )


@pytest.mark.parametrize(("normalizer", "sequences"), [("kept", 1), ("original", 2)])
def test_seq_mean_counts_rejected_sequences_as_original(normalizer, sequences):
    config = RolloutCorrectionConfig(**WEIGHTED, rejection_normalizer=normalizer)
    delta = torch.tensor(
        [[1.0, 2.0], [9.0, 9.0], [1.0, 1.0]]
    ).log()  # all of the second is rejected
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    corrected = correct(config, delta, torch.zeros(3, 2), mask)
    assert corrected.loss_denominator("seq-mean-token-mean").item() == sequences
    mean = corrected.mean(torch.ones(3, 2), aggregation="seq-mean-token-mean")
    assert mean.item() == pytest.approx(1.5 / sequences)


def test_a_sequence_of_one_token_counts_as_much_as_others():
    corrected = correct(
        RolloutCorrectionConfig(),
        torch.zeros(2, 2),
        torch.zeros(2, 2),
        torch.tensor([[1, 0], [1, 1]]),
    )
    loss = torch.tensor([[8.0, 0.0], [1.0, 3.0]])
    assert corrected.mean(loss, aggregation="seq-mean-token-mean").item() == (8.0 + 2.0) / 2


def test_the_gradient_is_that_of_the_kept_tokens_over_all():
    config = RolloutCorrectionConfig(**WEIGHTED)
    leaf = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], requires_grad=True)
    delta, mask = torch.cat(DELTA), torch.cat(MASK)
    found = correct(config, delta, torch.zeros(6), mask, lengths=[4, 2])
    found.mean(leaf * 3).backward()
    assert leaf.grad.tolist() == pytest.approx([3 / 5, 6 / 5, 0, 0, 1.5 / 5, 3 / 5])


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_micro_batches_with_the_denominator_of_all_add_up(aggregation):
    config = RolloutCorrectionConfig(**WEIGHTED)
    parts = [
        correct(config, [d], [torch.zeros_like(d)], [m]) for d, m in zip(DELTA, MASK, strict=True)
    ]
    denominator = sum((part.loss_denominator(aggregation) for part in parts), torch.zeros(()))
    total = sum(
        part.mean([loss], aggregation=aggregation, denominator=denominator).item()
        for part, loss in zip(parts, LOSS, strict=True)
    )
    assert total == pytest.approx(mean("list", aggregation).item())


def test_what_does_not_fit_is_refused():
    config = RolloutCorrectionConfig(**WEIGHTED)
    found = correct(config, torch.zeros(2, 4), torch.zeros(2, 4), torch.ones(2, 4))
    with pytest.raises(
        ValueError, match=r"token_loss has shape \(2, 3\) but the mask \(2, 4\); pass the loss in"
    ):
        found.mean(torch.zeros(2, 3))
    with pytest.raises(
        ValueError, match="aggregation is 'sum'; choose one of token-mean, seq-mean-token-mean"
    ):
        found.mean(torch.zeros(2, 4), aggregation="sum")
    assert correct(config, [], [], []).mean([]).item() == 0.0
