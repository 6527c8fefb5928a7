"""The files that a run starts from, looked at before any process group or model is built."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_tis.errors import quoted_path
from slime_tis.hf_directory import (
    ModelSizes,
    check_generation_config,
    check_tensors,
    model_sizes,
    read_model_config,
)
from slime_tis.megatron.config import MegatronConfig
from slime_tis.rollout.config import RolloutConfig
from slime_tis.rollout.prompt_files import check_is_text
from slime_tis.storage.directories import same_path


def check_files(rollout: RolloutConfig, megatron: MegatronConfig) -> None:
    """Looks for the prompt files and directories of a run.

    Raises:
        ValueError: one line, for a file that is missing or empty or a directory that is not one.
    """
    prompts = [("--prompt-data", rollout.prompt_data)]
    prompts += [("--eval-prompt-data", path) for _, path in rollout.eval_prompt_sets]
    for flag, path in prompts:
        if not Path(path).is_file():
            raise ValueError(f"{flag} is {quoted_path(path)} but there is no such file; give a JSONL or parquet file.")
        if Path(path).stat().st_size == 0:
            raise ValueError(f"{flag} is {quoted_path(path)} but the file is empty; give one prompt per row.")
        check_is_text(Path(path))
    resumes_own = None not in (megatron.load, megatron.save) and same_path(str(megatron.load), str(megatron.save))
    if megatron.load is not None and not resumes_own and not Path(megatron.load).is_dir():
        raise ValueError(
            f"--load is {quoted_path(megatron.load)} but there is no such directory; leave --load out to start afresh."
        )


def check_model(megatron: MegatronConfig, rollout: RolloutConfig) -> dict[str, Any]:
    """Reads the checkpoint's config.json, and whether the model divides over the ranks and holds the responses.

    Returns:
        the object of config.json.

    Raises:
        ValueError: one line, for a checkpoint that cannot be loaded or sizes that do not fit it.
    """
    if megatron.ref_load is not None:
        read_model_config(megatron.ref_load, "--ref-load")
    model = read_model_config(megatron.hf_checkpoint)
    check_generation_config(megatron.hf_checkpoint)
    for flag, ranks, part in (
        ("--tensor-model-parallel-size", megatron.tensor_model_parallel_size, "num_attention_heads"),
        ("--tensor-model-parallel-size", megatron.tensor_model_parallel_size, "num_key_value_heads"),
        ("--pipeline-model-parallel-size", megatron.pipeline_model_parallel_size, "num_hidden_layers"),
    ):
        if model.get(part, ranks) % ranks:
            raise ValueError(f"{flag} is {ranks} but the model's {part} is {model[part]}; choose a divisor of it.")
    if megatron.expert_model_parallel_size > 1:
        raise ValueError(
            f"--expert-model-parallel-size is {megatron.expert_model_parallel_size} but the model has no "
            "experts; leave it at 1."
        )
    _check_lengths(rollout, model.get("max_position_embeddings"))
    _check_stop_ids(rollout.rollout_stop_token_ids or (), model.get("vocab_size"))
    return model


def _check_lengths(rollout: RolloutConfig, of_model: Any) -> None:
    """Whether prompts and responses fit into the model's context together."""
    limit = rollout.rollout_max_context_len
    if isinstance(of_model, int) and limit is not None and limit > of_model:
        raise ValueError(
            f"--rollout-max-context-len is {limit} but the model's context has {of_model} tokens; choose at most that."
        )
    longest_prompt = rollout.rollout_max_prompt_len
    for flag, length, context, whose, other in (
        ("--rollout-max-response-len", rollout.rollout_max_response_len, of_model, "the model's context", "prompt"),
        ("--eval-max-response-len", rollout.eval_max_response_len, of_model, "the model's context", "prompt"),
        ("--rollout-max-prompt-len", longest_prompt, of_model, "the model's context", "response"),
        ("--rollout-max-prompt-len", longest_prompt, limit, "the --rollout-max-context-len", "response"),
    ):
        if length is not None and isinstance(context, int) and length >= context:
            raise ValueError(
                f"{flag} is {length} but {whose} of {context} tokens holds the {other} too; choose fewer tokens."
            )


def _check_stop_ids(ids: Sequence[int], vocabulary: Any) -> None:
    if isinstance(vocabulary, int) and ids and max(ids) >= vocabulary:
        raise ValueError(
            f"--rollout-stop-token-ids has {max(ids)} but the model's vocabulary has {vocabulary} tokens, from 0; "
            "give the ids of this model."
        )


def prompt_sizes(megatron: MegatronConfig, rollout: RolloutConfig) -> ModelSizes:
    """What prompts must fit into: the model's vocabulary, and its context or a shorter one that is asked for."""
    sizes = model_sizes(read_model_config(megatron.hf_checkpoint))
    contexts = [one for one in (sizes.context_len, rollout.rollout_max_context_len) if one is not None]
    return dataclasses.replace(sizes, context_len=min(contexts, default=None))


def check_weights(megatron: MegatronConfig) -> None:
    """Reads the headers of the weights: whether all tensors are there, in the shapes that config.json gives.

    Raises:
        ValueError: a file is missing or damaged, or of another model.
    """
    for directory in (megatron.hf_checkpoint, megatron.ref_load):
        if directory is not None:
            check_tensors(directory, read_model_config(directory))
