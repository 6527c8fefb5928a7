"""Metrics of an evaluation, from answers that are known."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_tis.trainer.data.sample import Prompt, Sampling
from slime_tis.trainer.engines.local.checkpoint import load_tokenizer
from slime_tis.trainer.engines.local.engine import LocalEngine
from slime_tis.trainer.evaluation import accuracy_metrics
from slime_tis.trainer.rewards.builtin_rewards import exact_match
from slime_tis.trainer.rewards.rewards import assign_rewards
from tests.checkpoints import EOS, make_checkpoint


def reward(samples):
    return [exact_match(sample.response, sample.label) for sample in samples]


def test_metrics_are_means_over_the_answers(tmp_path):
    path = make_checkpoint(tmp_path, "qwen3")
    tokenizer = load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts, lengths, truncated = [], [], 0
    for index, text in enumerate(["12>", "abc", "7?", "Q:", "x", "hello"]):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :]
        text_of_answer = tokenizer.decode(output, skip_special_tokens=True)
        label = text_of_answer if index % 3 else text_of_answer + "!"  # right at four prompts of six
        prompts.append(Prompt(index=index, text=text, token_ids=tuple(ids[0].tolist()), label=label))
        lengths.append(len(output))
        truncated += output[-1].item() != EOS
    sampling = Sampling(temperature=0.0, max_response_len=6)
    groups = LocalEngine(path, tokenizer).generate(prompts, sampling, seed=0)
    assign_rewards(groups, reward)
    assert accuracy_metrics([sample for group in groups for sample in group]) == {
        "accuracy": pytest.approx(4 / 6),
        "response_length": pytest.approx(sum(lengths) / 6),
        "truncated_fraction": pytest.approx(truncated / 6),
    }
