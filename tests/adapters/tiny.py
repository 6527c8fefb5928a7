"""A tiny model of words, a sampler with its weights in bfloat16, and TRL's GRPO run on both."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig

from slime_tis.integrations.trl import CorrectedGRPOTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *map(str, range(20))]
LENGTH = 8


def tokenizer():
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(directory, dtype):
    """A model loaded from a directory, as TRL needs it for a reference policy."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        attention_dropout=0.0,
    )
    made = Qwen2ForCausalLM(config)
    for parameter in made.parameters():
        parameter.data.mul_(6)  # far from uniform
    made.save_pretrained(directory)
    return Qwen2ForCausalLM.from_pretrained(directory, dtype=dtype)


class RoundedSampler:
    """A `rollout_func`: samples from a bfloat16 copy of the policy, and changes the log-probs as
    `edit` says."""

    def __init__(self, edit=lambda log_probs: None, *, tools=False):
        self.edit, self.tools = edit, tools
        self.log_probs = []

    def __call__(self, prompts, trainer):
        policy = trainer.accelerator.unwrap_model(trainer.model)
        engine = Qwen2ForCausalLM(policy.config)
        engine.load_state_dict(policy.state_dict())
        engine = engine.eval().to(torch.bfloat16)
        tokens = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        responses = []
        self.log_probs = []
        for prompt in tokens:
            ids, log_probs = list(prompt), []
            for _ in range(LENGTH):
                with torch.no_grad():
                    scores = (
                        engine(torch.tensor([ids]), use_cache=False)
                        .logits[0, -1]
                        .float()
                        .log_softmax(-1)
                    )
                ids.append(int(torch.multinomial(scores.exp(), 1)))
                log_probs.append(float(scores[ids[-1]]))
                if ids[-1] == 1:
                    break
            responses.append(ids[len(prompt) :])
            self.log_probs.append(log_probs)
        self.edit(self.log_probs)
        result = {"prompt_ids": tokens, "completion_ids": responses, "logprobs": self.log_probs}
        if self.tools:  # the second token counts as a tool's
            result["env_mask"] = [
                [int(t != 1) for t in range(len(response))] for response in responses
            ]
        return result


def distinct_words(completions, **_):
    return [len(set(completion.split())) / LENGTH for completion in completions]


def trainer(
    directory,
    correction=None,
    *,
    cls=CorrectedGRPOTrainer,
    sampler=None,
    extra=None,
    dtype=torch.float32,
    **options,
):
    """A trainer on eight prompts. `extra` goes to the constructor, `options` to GRPOConfig."""
    settings = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": LENGTH,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        **options,
    }
    given = dict(extra or {})
    if cls is CorrectedGRPOTrainer:
        given["rollout_correction"] = correction
    torch.manual_seed(1)
    return cls(
        model=model(directory / "model", dtype),
        args=GRPOConfig(output_dir=str(directory / "out"), **settings),
        train_dataset=Dataset.from_list([{"prompt": f"{i} {i + 1}"} for i in range(8)]),
        processing_class=tokenizer(),
        reward_funcs=distinct_words,
        rollout_func=sampler or RoundedSampler(),
        **given,
    )
