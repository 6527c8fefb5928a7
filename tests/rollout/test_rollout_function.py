"""A user's function for whole rollouts, held to its contract."""

import math
from argparse import Namespace
from pathlib import Path

import pytest

from slime_tis.errors import CustomFunctionError
from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.agents.rollout_function import build_rollout_function
from slime_tis.trainer.data.prompts import PromptDataset
from tests.rollout.test_rewards import make_config

CODE = """
from slime.rollout.base_types import RolloutFnTrainOutput
def fn(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(2)
    for group in groups:
        for sample in group:
            sample.tokens, sample.response_length = sample.tokens + [5, 6], 2
            sample.rollout_log_probs, sample.loss_mask = [-1.0, -2.0], [1, 1]
            sample.status = sample.Status.COMPLETED
    sample, metrics = groups[1][0], {"seen": rollout_id}
    BODY
    return RolloutFnTrainOutput(groups, metrics)
"""


@pytest.fixture
def make(tmp_path, tokenizer):
    def go(body: str = "pass"):
        (tmp_path / "own.py").write_text(CODE.replace("BODY", body))
        (tmp_path / "p.jsonl").write_text("".join(f'{{"input": "{n}>"}}\n' for n in range(6)))
        options = {"rm_type": "random", "n_samples_per_prompt": 2}
        config = make_config(**options, rollout_function_path=f"{tmp_path / 'own.py'}:fn")
        dataset = PromptDataset(tmp_path / "p.jsonl", tokenizer, config)
        sizes = ModelSizes(context_len=64, vocab_size=300)
        return build_rollout_function(
            config, Namespace(), tokenizer, dataset, sizes=sizes, version=lambda: 7, address=("host", 1)
        )

    return go


def test_groups_are_numbered_and_take_the_prompts_in_order(make):
    rollout = make("assert (args.sglang_router_ip, args.sglang_router_port, len(data_source)) == ('host', 1, 6)")
    groups, metrics = rollout(3)
    assert [[(sample.prompt_index, sample.group_index, sample.index) for sample in group] for group in groups] == [
        [(0, 0, 0), (0, 0, 1)],
        [(1, 1, 2), (1, 1, 3)],
    ]
    sample = groups[0][0]
    assert (sample.response_ids, sample.weight_versions, sample.reward) == ([5, 6], [7, 7], None)
    assert metrics == {"rollout/seen": 3.0}
    assert [group[0].prompt_index for group in rollout(4)[0]] == [2, 3]
    assert rollout.dataset.state_dict()["position"] == 4


def test_segments_of_a_rollout_stay_together(make):
    body = "import copy; sample.rollout_id = groups[1][1].rollout_id = 9; extra = copy.copy(sample)"
    groups, _ = make(body + "; groups[1] = [[sample, extra], copy.copy(groups[0][1])]")(0)
    assert [(sample.index, sample.rollout_id) for sample in groups[1]] == [(2, 2), (2, 2), (3, 3)]


WRONG = {
    "too few groups": ("groups = groups[:1]", "returned 1 groups; return 2 (--rollout-batch-size)."),
    "too few samples": ("groups[1] = [sample]", "returned 1 samples in group 1; return 2 (--n-samples-per-prompt)"),
    "no log-probs": ("sample.rollout_log_probs = None", "returned a sample without rollout_log_probs; give the log-"),
    "infinite log-prob": ("sample.rollout_log_probs[0] = -1e999", "gave the log-prob -inf for response token 0, which"),
    "token": ("sample.tokens[-1] = 300", "gave the token 300; the vocabulary ends at 299"),
    "huge reward": ("sample.reward = 1e308", "gave the reward 1e+308; it must be a finite number of at most 1e+150"),
    "adds samples": ("data_source.add_samples(groups)", "raised RuntimeError: prompts of a file are read-only"),
    "metrics": ("metrics = {'a': float('nan')}", "returned {'rollout/a': nan} as metrics; return finite numbers"),
}


@pytest.mark.parametrize(("body", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_rollout_is_one_message(make, tmp_path: Path, body, message):
    with pytest.raises(CustomFunctionError) as refusal:
        make(body)(0)
    said = str(refusal.value)
    assert said.startswith(f"fn ({tmp_path}/own.py, line ") and message in said


def test_what_is_masked_needs_no_log_prob(make):
    groups, _ = make("sample.loss_mask, sample.rollout_log_probs = [1, 0], [-1.0, float('nan')]")(0)
    assert groups[1][0].rollout_log_probs[0] == -1.0 and not math.isnan(groups[1][0].rollout_log_probs[1])
