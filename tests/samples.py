"""Samples for tests."""

import json

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.data.sample_file import from_dict, to_dict


def make_sample(prompt, response_ids, **fields):
    """A completed sample of a prompt: log-probs −1, version 0, all tokens trained."""
    length = len(response_ids)
    values = {
        "prompt_row": prompt,
        "group_index": 0,
        "index": 0,
        "tokens": [*prompt.token_ids, *response_ids],
        "response_length": length,
        "rollout_log_probs": [-1.0] * length,
        "loss_mask": [1] * length,
        "weight_versions": [0] * length,
        "status": Sample.Status.COMPLETED,
    }
    return Sample(**{**values, **fields})


def reloaded(groups):
    """Groups as they come back from a checkpoint."""
    return [
        [from_dict(json.loads(json.dumps(to_dict(sample)))) for sample in group] for group in groups
    ]


def flat(groups):
    return [sample for group in groups for sample in group]
