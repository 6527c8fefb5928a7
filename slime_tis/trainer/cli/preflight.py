"""The files that a run starts from, looked at before any process group or model is built."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_tis.errors import quoted_path
from slime_tis.hf_directory import (
    FAMILIES,
    ModelSizes,
    MoeSizes,
    check_generation_config,
    check_tensors,
    load_config,
    model_sizes,
    moe_sizes,
    read_model_config,
)
from slime_tis.trainer.data.prompt_files import check_is_text
from slime_tis.trainer.options.megatron import MegatronConfig
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.storage.directories import same_path


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
            f"--load is {quoted_path(megatron.load)} but there is no such directory; remove --load to start afresh."
        )


def check_model(megatron: MegatronConfig, rollout: RolloutConfig, world_size: int) -> dict[str, Any]:
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
    chunk = megatron.recompute_num_layers
    of_stage = model.get("num_hidden_layers", 0) // megatron.pipeline_model_parallel_size
    if megatron.recompute_method == "uniform" and chunk is not None and of_stage % chunk:
        raise ValueError(
            f"--recompute-num-layers is {chunk} but with --recompute-method uniform it must divide the {of_stage} "
            "layers of a pipeline stage; choose a divisor of that, or --recompute-method block."
        )
    _check_experts(megatron, rollout, world_size)
    _check_lengths(rollout, model.get("max_position_embeddings"))
    _check_stop_ids(rollout.rollout_stop_token_ids or (), model.get("vocab_size"))
    return model


def _check_experts(megatron: MegatronConfig, rollout: RolloutConfig, world_size: int) -> None:
    """Whether the experts divide over the ranks, and the rollout engine samples from the same model."""
    directory, tensor = megatron.hf_checkpoint, megatron.tensor_model_parallel_size
    ranks, expert_tensor = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    hf = load_config(directory) if FAMILIES[read_model_config(directory)["architectures"][0]].moe else None
    moe = None if hf is None else moe_sizes(hf)
    if hf is None or moe is None:
        for flag, size in (("--expert-model-parallel-size", ranks), ("--expert-tensor-parallel-size", expert_tensor)):
            if size is not None and size > 1:
                raise ValueError(f"{flag} is {size} but the model has no experts; leave it at 1.")
        for flag, given in (
            ("--use-rollout-routing-replay", rollout.use_rollout_routing_replay),
            ("--use-routing-replay", megatron.use_routing_replay),
            ("--measure-routing-mismatch", rollout.measure_routing_mismatch is not None),
            ("--rollout-router-bits", rollout.rollout_router_bits is not None),
        ):
            if given:
                raise ValueError(f"{flag} is given but the model has no experts, and with them no routers; remove it.")
        return
    if megatron.share_prompts:
        raise ValueError(
            "--share-prompts is on but the model is a mixture of experts, whose routing is recorded, replayed and "
            "counted for each sample; remove it."
        )
    if tensor > 1 and not megatron.sequence_parallel:
        raise ValueError(
            f"--tensor-model-parallel-size is {tensor} but megatron-core trains mixtures of experts over several "
            "tensor-parallel ranks only with --sequence-parallel; add it."
        )
    shared = moe.shared_intermediate_size or tensor
    for flag, size, part, value in (
        ("--expert-model-parallel-size", ranks, "number of experts", moe.num_experts),
        ("--expert-tensor-parallel-size", expert_tensor or tensor, "moe_intermediate_size", moe.intermediate_size),
        ("--tensor-model-parallel-size", tensor, "inner size of the shared expert", shared),
    ):
        if value % size:
            raise ValueError(f"{flag} is {size} but the model's {part} is {value}; choose a divisor of it.")
    together = megatron.expert_parallel_size
    if world_size % together:
        raise ValueError(
            f"WORLD_SIZE is {world_size} but --expert-model-parallel-size × --expert-tensor-parallel-size (unset: "
            f"--tensor-model-parallel-size) × --pipeline-model-parallel-size is {together}; start a multiple of that "
            "with torchrun --nproc-per-node, or lower one of them."
        )
    if rollout.rollout_engine == "sglang":
        _check_for_sglang(directory, hf, moe)


def _check_for_sglang(directory: str, hf: Any, moe: MoeSizes) -> None:
    """Refuses what SGLang 0.5.23 reads as another model, without a word."""
    if hf.tie_word_embeddings:
        raise ValueError(
            f"--hf-checkpoint is {quoted_path(directory)}, whose config.json has tie_word_embeddings, which SGLang "
            "ignores for mixtures of experts, so that it would sample from another model; give a checkpoint with an "
            "output layer of its own, or use --rollout-engine local."
        )
    if hasattr(hf, "decoder_sparse_step") and len(moe.layers) < hf.num_hidden_layers:
        raise ValueError(
            f"--hf-checkpoint is {quoted_path(directory)}, {len(moe.layers)} of whose {hf.num_hidden_layers} layers "
            "have experts, but SGLang makes experts of all layers of this family, so that it would sample from another "
            "model; give a checkpoint without dense layers, or use --rollout-engine local."
        )


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
