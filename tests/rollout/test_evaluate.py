"""Metrics of an evaluation, from answers that are known."""

import pytest

from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.evaluation import accuracy_metrics
from tests.samples import make_sample


def test_metrics_are_means_over_the_answers():
    prompt, done, cut = Prompt(index=0, text="12>", token_ids=(1, 2)), Sample.Status.COMPLETED, Sample.Status.TRUNCATED
    statuses = (done, done, done, cut, done, cut)
    samples = [
        make_sample(prompt, [3] * length, reward=float(length % 3 > 0), status=status)
        for length, status in zip((1, 2, 3, 6, 5, 6), statuses, strict=True)
    ]
    assert accuracy_metrics(samples) == {
        "accuracy": pytest.approx(3 / 6),
        "response_length": pytest.approx(23 / 6),
        "truncated_fraction": pytest.approx(2 / 6),
    }
