"""slime's three agent examples train unchanged: imports, signatures and control flow."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.runs import read_metrics, run_apart

SEARCH = """
import asyncio, re
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

SEMAPHORE = asyncio.Semaphore(4)

async def generate(args, sample, sampling_params):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, ids, masks, log_probs = "", [], [], []
    for _ in range(2):
        payload = {"text": sample.prompt + response, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new = output["meta_info"]["output_token_logprobs"]
        response += output["text"]
        ids += [item[1] for item in new]
        log_probs += [item[0] for item in new]
        masks += [1] * len(new)
        async with SEMAPHORE:
            observation = "<i>"
        observation_ids = state.tokenizer(observation, add_special_tokens=False)["input_ids"]
        response += observation
        ids += observation_ids
        masks += [0] * len(observation_ids)
        log_probs += [0.0] * len(observation_ids)
    sample.tokens, sample.response_length, sample.response = prompt_ids + ids, len(ids), response
    sample.loss_mask, sample.rollout_log_probs = masks, log_probs
    sample.status = Sample.Status.COMPLETED
    return sample

async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    return float(sample.label["ground_truth"]["target"][0] in sample.prompt + sample.response)
"""

RETOOL = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample
try:
    from slime.rollout.rm_hub.math_dapo_utils import compute_score
except ImportError as e:
    raise ImportError("MathDapo is not installed") from e

async def generate(args, sample, sampling_params):
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    output = await post(url, {"input_ids": prompt_ids, "sampling_params": sampling_params, "return_logprob": True})
    new = output["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt_ids + [item[1] for item in new]
    sample.response_length, sample.response = len(new), output["text"]
    sample.loss_mask, sample.rollout_log_probs = [1] * len(new), [item[0] for item in new]
    sample.tool_call_count = 1
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample

async def reward_func(args, sample, **kwargs):
    result = compute_score(sample.prompt + sample.response, sample.label["answer"], strict_box_verify=True)
    if result["score"] < 0:
        result["score"] = min(-0.6, result["score"] + (getattr(sample, "tool_call_count", 0) - 2) / 2 * 0.1)
    if result["pred"] is None:
        result["pred"] = ""
    return result
"""

AGENTS = """
import asyncio, random
from copy import deepcopy
from transformers import AutoTokenizer
from slime.rollout.rm_hub import batched_async_rm
from slime.utils.http_utils import post
from slime.utils.misc import load_function
from slime.utils.types import Sample

async def generate(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    args.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint, trust_remote_code=True)
    args.sampling_params = sampling_params
    setattr(args, "custom_multi_agent_function_path", __file__ + ":run_agents")
    samples = await load_function(args.custom_multi_agent_function_path)(args, sample)
    random.shuffle(samples)
    return samples

async def run_agents(args, sample):
    args = deepcopy(args)
    args.sample, args.results = sample, []
    await asyncio.gather(*(one_agent(args) for _ in range(2)))
    rewards = await batched_async_rm(args, args.results)
    for answered, reward in zip(args.results, rewards):
        answered.reward = reward * 0.8
    return args.results

async def one_agent(args):
    sample = deepcopy(args.sample)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = args.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    payload = {"input_ids": sample.tokens, "sampling_params": args.sampling_params, "return_logprob": True}
    output = await post(url, payload)
    new = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(args, tokens=[item[1] for item in new], log_probs=[item[0] for item in new],
                                  trainable=True, meta_info=output["meta_info"])
    sample.response = output["text"]
    args.results.append(sample)
"""

REWARD_FLAGS = {
    "search": ["--reward-key", "none", "--custom-rm-path", "{file}:reward_func"],
    "retool": ["--reward-key", "score", "--custom-rm-path", "{file}:reward_func"],
    "agents": ["--rm-type", "random"],
}
LABELS: dict[str, Any] = {
    "search": {"ground_truth": {"target": ["a"]}},
    "retool": {"answer": "7"},
    "agents": "7",
}
FILES = {"search": SEARCH, "retool": RETOOL, "agents": AGENTS}


def flags(directory: Path, file: Path, example: str) -> list[str]:
    model = make_checkpoint(directory, "qwen3")
    rows = [json.dumps({"prompt": text, "label": LABELS[example]}) for text in ("ab", "cd")]
    prompts = directory / "train.jsonl"
    prompts.write_text("\n".join(rows) + "\n")
    options = {
        "--hf-checkpoint": str(model),
        "--prompt-data": str(prompts),
        "--num-rollout": "1",
        "--input-key": "prompt",
        "--label-key": "label",
        "--rollout-batch-size": "2",
        "--n-samples-per-prompt": "2",
        "--rollout-max-response-len": "6",
        "--custom-generate-function-path": f"{file}:generate",
        "--num-threads": "1",
    }
    words = ["--no-progress", "--no-use-tensorboard"]
    for name, value in options.items():
        words += [name, value]
    return words + [word.format(file=file) for word in REWARD_FLAGS[example]]


def install_slime(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a slime whose modules need servers."""
    for folder in ("utils", "rollout"):
        (directory / "slime" / folder).mkdir(parents=True)
    client = directory / "slime" / "utils" / "http_utils.py"
    client.write_text("async def post(*_): return None.post\n")
    rollout = directory / "slime" / "rollout" / "sglang_rollout.py"
    rollout.write_text("raise ImportError('ray')\n")
    path = f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.mark.parametrize("installed", [False, True], ids=["without slime", "with slime"])
@pytest.mark.parametrize("example", FILES)
def test_example_trains(
    example: str, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        install_slime(tmp_path / "site", monkeypatch)
    file = tmp_path / "example.py"
    file.write_text(FILES[example])
    run = run_apart(flags(tmp_path, file, example), tmp_path / "run")
    assert run.returncode == 0, run.stderr
    (row,) = read_metrics(tmp_path / "run")
    assert row["rollout/generate_failed"] == 0
    # The search example sends text, so that the engine tokenizes earlier turns again.
    if example != "search":
        assert row["rollout/retokenized"] == 0
        assert row["train/loss_denominator"] > 0
