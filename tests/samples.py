"""Samples for tests."""

import json
from typing import Any

from slime_tis.trainer.data.dump import from_dict, to_dict
from slime_tis.trainer.data.sample import Prompt, Sample


def make_sample(prompt: Prompt, response_ids: list[int], **fields: Any) -> Sample:
    """A completed sample of a prompt; log-probs of −1 and weights of version 0, all of it trained on."""
    length = len(response_ids)
    values: dict[str, Any] = {
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


def reloaded(groups: list[list[Sample]]) -> list[list[Sample]]:
    """Groups as they come back from a checkpoint."""
    return [[from_dict(json.loads(json.dumps(to_dict(sample)))) for sample in group] for group in groups]


def flat(groups: list[list[Sample]]) -> list[Sample]:
    return [sample for group in groups for sample in group]
