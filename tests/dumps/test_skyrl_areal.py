"""Batches of SkyRL and AReaL as JSONL, as their sources lay them out, and the page's converters."""

import json
import math
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_tis.analysis.dumps.readers import read
from tests.dumps.test_readers import write_lines
from tests.test_docs import blocks

PAGE = Path(__file__).parents[2] / "docs/dumps.md"


def converter(name):
    """The block of the page that begins with the name of its file."""
    (code,) = [block for block in blocks(PAGE, "python") if block.startswith(f"# {name}:")]
    return code


def skyrl_row(**changes):
    """Prompt 1, 2 and response 5, 6, 7 of SkyRL's TrainingInput: left-padded, right-aligned."""
    return {
        "sequences": [0, 1, 2, 5, 6, 7],
        "attention_mask": [0, 1, 1, 1, 1, 1],
        "response_mask": [0, 1, 1, 1],
        "loss_mask": [0.0, 1.0, 0.0, 1.0],
        "rollout_logprobs": [0.0, -1.5, 0.0, -2.0],
        "base_action_log_probs": [-8.0, -1.0, -1.0, -1.0],
        "action_log_probs": [-9.0, -1.0, -0.5, -2.25],
        "advantages": [0.0, 0.5, 0.5, 0.5],
        "returns": [0.0, 0.5, 0.5, 0.5],
    } | changes


def skyrl_table(directory, *rows):
    path = directory / "dumped_data/global_step_4_training_input.jsonl"
    return read(write_lines(path, rows or [skyrl_row()]))


def test_log_probs_of_skyrl(tmp_path):
    table = skyrl_table(tmp_path)
    assert table.log_ratio.tolist() == [0.5, 0.0, -0.25]
    assert table.loss_mask.tolist() == [1, 0, 1]


def test_tokens_of_skyrl(tmp_path):
    table = skyrl_table(tmp_path)
    assert table.token.tolist() == [5, 6, 7]
    assert table.prompt[0].tolist() == [1, 2]


def test_other_columns_of_skyrl(tmp_path):
    table = skyrl_table(tmp_path)
    assert table.advantage.tolist() == [0.5, 0.5, 0.5]
    # SkyRL counts steps from 1.
    assert table.step.tolist() == [3]
    assert table.metadata == {"source": "skyrl", "old_policy": "recomputed"}


def test_a_response_of_skyrl_may_begin_before_another_row_s(tmp_path):
    # The response tensors are as wide as the longest response, so they overlap a longer prompt.
    row = skyrl_row(
        sequences=[1, 2, 3, 4, 5, 6],
        attention_mask=[1] * 6,
        response_mask=[0, 0, 1, 1],
        loss_mask=[0, 0, 1, 1],
    )
    table = skyrl_table(tmp_path, row)
    assert table.token.tolist() == [5, 6]
    assert table.prompt[0].tolist() == [1, 2, 3, 4]


def test_responses_of_older_skyrl_are_padded_on_the_right(tmp_path):
    row = skyrl_row(
        sequences=[0, 1, 2, 5, 6, 0],
        attention_mask=[0, 1, 1, 1, 1, 0],
        response_mask=[1, 1, 0],
        loss_mask=[1, 1, 0],
        rollout_logprobs=[-1.5, -2.0, 0.0],
        action_log_probs=[-1.0, -2.25, -9.0],
        advantages=[0.5, 0.5, 0.0],
    )
    table = skyrl_table(tmp_path, row)
    assert table.log_ratio.tolist() == [0.5, -0.25]
    assert (table.token.tolist(), table.prompt[0].tolist()) == ([5, 6], [1, 2])


def test_an_empty_response_of_skyrl(tmp_path):
    table = skyrl_table(tmp_path, skyrl_row(response_mask=[0] * 4), skyrl_row())
    assert table.response_length.tolist() == [0, 3]


def test_extreme_log_probs_of_skyrl(tmp_path):
    row = skyrl_row(loss_mask=[0, 1, 1, 1], rollout_logprobs=[0.0, -math.inf, math.nan, -9999.0])
    table = skyrl_table(tmp_path, row)
    assert table.rollout_log_prob.tolist()[0] == -math.inf
    assert table.valid.tolist() == [False, False, False]
    assert table.log_ratio.tolist() == [0.0, 0.0, 0.0]


SKYRL_FAULTS = {
    "no training log-probs": ({"action_log_probs": None}, "has no action_log_probs; SkyRL skips"),
    "no rollout log-probs": ({"rollout_logprobs": None}, "has no rollout_logprobs; SkyRL records"),
    "other length": ({"loss_mask": [1.0]}, "has 1 entries of loss_mask but 4 log-probs"),
    "short sequence": (
        {"sequences": [5, 6], "attention_mask": [1, 1]},
        "has 2 sequences for 4 entries of response_mask",
    ),
    "no attention mask": ({"attention_mask": None}, "has attention_mask that is None"),
    "short attention mask": ({"attention_mask": [1]}, "has 1 attention_mask for 6 sequences"),
}


@pytest.mark.parametrize(("changes", "message"), SKYRL_FAULTS.values(), ids=SKYRL_FAULTS)
def test_a_faulty_row_of_skyrl_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=f"line 2 {message}"):
        skyrl_table(tmp_path, skyrl_row(), skyrl_row(**changes))


def test_evaluation_files_of_skyrl_are_named(tmp_path):
    row = {"input_prompt": "p", "output_response": "r", "score": 1.0, "stop_reason": "stop"}
    with pytest.raises(ValueError, match="SkyRL's evaluation files have no log-probs"):
        read(write_lines(tmp_path / "gsm8k.jsonl", [row]))


class Batch(dict[str, Any]):
    """As SkyRL's TensorBatch: a dict of tensors with metadata, as long as the batch."""

    metadata: dict[str, int]

    def __len__(self):
        return len(self["sequences"])


@pytest.fixture
def skyrl_pickle(tmp_path):
    rows = [skyrl_row(), skyrl_row(advantages=[0.0, -0.5, -0.5, -0.5]), skyrl_row()]
    batch = Batch({key: torch.tensor([row[key] for row in rows]) for key in rows[0]})
    batch["action_log_probs"] = batch["action_log_probs"].bfloat16()
    batch["values"] = None
    batch.metadata = {"pad_size": 1}
    path = tmp_path / "dumped_data/global_step_4_training_input.pkl"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(batch))
    return path


def test_the_script_of_the_page_converts_skyrl_s_pickles(skyrl_pickle, tmp_path, monkeypatch):
    script = tmp_path / "skyrl_dumps.py"
    script.write_text(converter("skyrl_dumps.py"))
    monkeypatch.setattr(sys, "argv", [str(script), str(skyrl_pickle)])
    runpy.run_path(str(script))
    # From the folder that has both, as SkyRL's trainer.export_path has.
    table = read(tmp_path)
    assert table.log_ratio.tolist() == [0.5, 0.0, -0.25] * 2  # without the row of padding
    assert table.advantage.tolist() == [0.5] * 3 + [-0.5] * 3


def areal_row(**changes):
    """Prompt 1, 2 and response 5, 6, 7 of AReaL before compute_advantages, padded on the right.

    `prox_logp` at a position belongs to the next token, all other columns to their own.
    """
    return {
        "input_ids": [1, 2, 5, 6, 7, 0],
        "attention_mask": [True, True, True, True, True, False],
        "loss_mask": [0, 0, 1, 0, 1, 0],
        "logprobs": [0.0, 0.0, -1.5, 0.0, -2.0, 0.0],
        "prox_logp": [-9.0, -1.0, -0.5, -2.25, -9.0, -9.0],
        "versions": [-1, -1, 3, -1, 4, 0],
        "rewards": 1.0,
    } | changes


def areal_table(directory, *rows):
    return read(write_lines(directory / "version_5_rank_0.jsonl", rows or [areal_row()]))


def test_log_probs_of_areal(tmp_path):
    table = areal_table(tmp_path)
    assert table.log_ratio.tolist() == [0.5, 0.0, -0.25]
    assert table.loss_mask.tolist() == [1, 0, 1]


def test_tokens_of_areal(tmp_path):
    table = areal_table(tmp_path)
    assert table.token.tolist() == [5, 6, 7]
    assert table.prompt[0].tolist() == [1, 2]


def test_other_columns_of_areal(tmp_path):
    table = areal_table(tmp_path)
    assert (table.weight_version.tolist(), table.step.tolist()) == ([3, -1, 4], [5])
    assert table.reward.tolist() == [1.0]
    assert table.metadata == {"source": "areal", "old_policy": "recomputed"}


def test_a_masked_sample_of_areal_has_no_response(tmp_path):
    table = areal_table(tmp_path, areal_row(loss_mask=[0] * 6), areal_row())
    assert table.response_length.tolist() == [0, 3]


def test_extreme_log_probs_of_areal(tmp_path):
    row = areal_row(logprobs=[0.0, 0.0, -math.inf, -1e6, -100.0, 0.0], loss_mask=[0, 0, 1, 1, 1, 0])
    table = areal_table(tmp_path, row)
    assert table.valid.tolist() == [False, False, True]
    assert table.log_ratio.tolist() == [0.0, 0.0, 97.75]


def test_a_trained_first_token_of_areal_has_no_training_log_prob(tmp_path):
    table = areal_table(tmp_path, areal_row(loss_mask=[1, 1, 1, 1, 1, 0]))
    assert math.isnan(table.train_log_prob[0])
    assert table.valid.tolist() == [False, True, True, True, True]


AREAL_FAULTS = {
    "no training log-probs": ({"prox_logp": None}, "has no prox_logp; AReaL computes it"),
    "after compute_advantages": ({"kl_rewards": [0.0] * 6}, "was written after compute_advantages"),
    "other length": ({"logprobs": [0.0]}, "has 1 entries of logprobs but 6 log-probs"),
    "no loss mask": ({"loss_mask": None}, "has loss_mask that is None"),
    "left padding": ({"attention_mask": [0, 1, 1, 1, 1, 1]}, "has an attention_mask with 0 before"),
    "a hole": ({"attention_mask": [1, 1, 0, 1, 1, 0]}, "has an attention_mask with 0 before 1"),
    "a null before 1": ({"attention_mask": [None, 1, 1, 1, 1, 0]}, "has an attention_mask with 0"),
}


@pytest.mark.parametrize(("changes", "message"), AREAL_FAULTS.values(), ids=AREAL_FAULTS)
def test_a_faulty_row_of_areal_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=f"line 2 {message}"):
        areal_table(tmp_path, areal_row(), areal_row(**changes))


AREAL_ROLLOUT = {
    "task_id": 42,
    "sample_idx": 0,
    "seqlen": 5,
    "prompt_len": 2,
    "head_version": 5,
    "tail_version": 6,
    "version_rle": [[5, 1], [6, 2]],
    "reward": 1.0,
    "prompt": "2+2=",
    "completion": "4",
}


@pytest.mark.parametrize("path", ["", "rollout/6"], ids=["run", "version"])
def test_rollout_files_of_areal_lead_to_the_page(path, tmp_path):
    write_lines(tmp_path / "rollout/6/42.jsonl", [AREAL_ROLLOUT])
    with pytest.raises(ValueError, match=r"AReaL's rollout files have no log-probs.*Dumps from"):
        read(tmp_path / path)


class Engine:
    """What the page's patch asks of AReaL's engine."""

    data_parallel_rank = 0

    def is_data_parallel_head(self):
        return True

    def get_version(self):
        return 5


class Actor:
    """As AReaL's PPOActor: compute_advantages changes the batch in place."""

    engine = Engine()

    def compute_advantages(self, data):
        for trajectory in data:
            trajectory["logprobs"].zero_()
        return data


def test_the_patch_of_the_page_writes_areal_s_batches(tmp_path):
    row = areal_row()
    trajectory = {key: torch.tensor([value, value]) for key, value in row.items()}
    namespace: dict[str, Any] = {}
    exec(converter("areal_dumps.py"), namespace)
    namespace["patch"](Actor, f"{tmp_path}/version_{{version}}_rank_{{rank}}.jsonl")
    assert Actor().compute_advantages([trajectory])[0]["logprobs"].abs().max() == 0
    lines = (tmp_path / "version_5_rank_0.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [row, row]
