"""Checks of a run's input files and outputs, before a model is built."""

import dataclasses
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_tis.atomic_files import json_lines, split_row_slice
from slime_tis.errors import first_line, quoted, quoted_path
from slime_tis.families import FAMILIES
from slime_tis.hf_directory import (
    ModelSizes,
    MoeSizes,
    check_generation_config,
    load_config,
    model_sizes,
    moe_sizes,
    read_model_config,
)
from slime_tis.hf_tensors import check_tensors
from slime_tis.options import fields
from slime_tis.peft_directory import check_base
from slime_tis.trainer.cli.server_models import refuse_misread_model
from slime_tis.trainer.configs.adapter_targets import check_adapters
from slime_tis.trainer.configs.loop import ReportingConfig
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.reporting.run_directory import OWN_NAMES, foreign_file
from slime_tis.trainer.storage import exports
from slime_tis.trainer.storage.checkpoint_files import (
    Damaged,
    check_options,
    checkpoints,
    read_state,
)
from slime_tis.trainer.storage.directories import LOCK, held, same_path, unwritable

TENSOR_PARTS = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "linear_num_key_heads",
)
"""Sizes of config.json that tensor-parallel ranks divide."""
EXPERT_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
"""Options of experts that have no effect if they are 1."""
EXPERT_OPTIONS = (
    *EXPERT_SIZES,
    "use_rollout_routing_replay",
    "use_routing_replay",
    "measure_routing_mismatch",
    "rollout_router_bits",
)
"""Options that only mixtures of experts have."""


def check_files(rollout: RolloutConfig, megatron: MegatronConfig) -> None:
    """Refuses prompt files and a --load directory that are missing or empty."""
    for flag, file in _prompt_files(rollout):
        if not file.is_file():
            raise ValueError(
                f"{flag} is {quoted_path(str(file))} but there is no such file; give a JSONL or"
                " parquet file."
            )
        if file.stat().st_size == 0:
            raise ValueError(
                f"{flag} is {quoted_path(str(file))} but the file is empty; give one prompt per"
                " row."
            )
        if file.suffix != ".parquet":
            # Reading the first line refuses a compressed file.
            next(json_lines(file), None)
    load = megatron.load
    if load is None:
        return
    # A run that continues its own checkpoints has none at its first start.
    resumes_own = megatron.save is not None and same_path(load, megatron.save)
    if not resumes_own and not Path(load).is_dir():
        raise ValueError(
            f"--load is {quoted_path(load)} but there is no such directory; remove --load."
        )


def _prompt_files(rollout: RolloutConfig) -> list[tuple[str, Path]]:
    """Returns flag and path per prompt file, without a slice of rows."""
    paths = []
    if rollout.prompt_data is not None:
        paths.append(("--prompt-data", rollout.prompt_data))
    source = "--eval-prompt-data"
    if rollout.eval_config is not None:
        source = "--eval-config"
    for _, path in rollout.eval_prompt_sets:
        paths.append((source, path))
    return [(flag, split_row_slice(path)[0]) for flag, path in paths]


def check_model(
    megatron: MegatronConfig, rollout: RolloutConfig, world_size: int
) -> dict[str, Any]:
    """Checks the model against parallel sizes, options of experts and lengths.

    Returns:
        config.json.

    Raises:
        ValueError: The model does not fit.
    """
    if megatron.ref_load is not None:
        read_model_config(megatron.ref_load, "--ref-load")
    model = read_model_config(megatron.hf_checkpoint)
    check_generation_config(megatron.hf_checkpoint)
    family = FAMILIES[model["architectures"][0]]
    hf = None
    moe = None
    if family.experts is not None or family.attention.window is not None:
        # Only if needed, because this imports transformers, which takes seconds.
        hf = load_config(megatron.hf_checkpoint)
        moe = moe_sizes(hf)
    problems = list(layout_problems(megatron, model, moe, world_size))
    if problems:
        raise ValueError(" ".join(problems))
    if moe is None:
        _refuse_expert_options(megatron, rollout)
    elif megatron.share_prompts:
        raise ValueError("--share-prompts does not work with mixtures of experts; remove it.")
    if hf is not None:
        longest = rollout.rollout_max_context_len or hf.max_position_embeddings
        engine = rollout.rollout_engine
        refuse_misread_model(engine, megatron.hf_checkpoint, hf, moe, longest)
    check_adapters(megatron, family)
    _check_lengths(rollout, model.get("max_position_embeddings"), model.get("vocab_size"))
    return model


def layout_problems(
    megatron: MegatronConfig, model: Mapping[str, Any], moe: MoeSizes | None, world_size: int
) -> Iterator[str]:
    """Yields a message for each size or number of ranks that a parallel size does not divide.

    Args:
        megatron: Parallel sizes and recomputation.
        model: config.json.
        moe: Sizes of the experts; None for a dense model.
        world_size: Number of ranks.
    """
    for flag, size, part, value in _divided_sizes(megatron, model, moe):
        if value % size:
            yield f"{flag} is {size} but the model's {part} is {value}; choose a divisor of it."
    chunk = megatron.recompute_num_layers
    stage_layers = model.get("num_hidden_layers", 0) // megatron.pipeline_model_parallel_size
    if megatron.recompute_method == "uniform" and chunk is not None and stage_layers % chunk:
        yield (
            f"--recompute-num-layers is {chunk} but must divide the {stage_layers} layers of a"
            " stage."
        )
    if world_size % megatron.model_parallel_size:
        yield (
            f"the world size is {world_size} but --tensor-model-parallel-size ×"
            " --pipeline-model-parallel-size × --context-parallel-size is"
            f" {megatron.model_parallel_size}; start a multiple of that with torchrun"
            " --nproc-per-node."
        )
    if moe is None:
        return
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield (
            "--tensor-model-parallel-size needs --sequence-parallel for mixtures of experts;"
            " add it."
        )
    tensor_size = megatron.tensor_model_parallel_size
    expert_tensor_size = megatron.expert_tensor_parallel_size or tensor_size
    if FAMILIES[model["architectures"][0]].biases and expert_tensor_size > 1:
        # Each rank that has a part of an expert adds the whole bias to the sum over these ranks.
        yield (
            "--expert-tensor-parallel-size (unset: --tensor-model-parallel-size) is"
            f" {expert_tensor_size} but experts with biases need 1; set it to 1."
        )
    if world_size % megatron.expert_parallel_size:
        yield (
            f"the world size is {world_size} but --expert-model-parallel-size ×"
            " --expert-tensor-parallel-size (unset: --tensor-model-parallel-size) ×"
            f" --pipeline-model-parallel-size is {megatron.expert_parallel_size}; start a multiple"
            " of that, or lower one of them."
        )


def _divided_sizes(
    megatron: MegatronConfig, model: Mapping[str, Any], moe: MoeSizes | None
) -> list[tuple[str, int, str, int]]:
    """Returns rows of flag, parallel size, part of the model, size of the part."""
    tensor = megatron.tensor_model_parallel_size
    pipeline = megatron.pipeline_model_parallel_size
    layers = model.get("num_hidden_layers", 0)
    sizes = []
    for part in TENSOR_PARTS:
        size = model.get(part)
        if size is None:  # absent or null in config.json
            size = tensor
        sizes.append(("--tensor-model-parallel-size", tensor, part, size))
    sizes.append(("--pipeline-model-parallel-size", pipeline, "num_hidden_layers", layers))
    if moe is None:
        return sizes
    experts = megatron.expert_model_parallel_size
    # If it is unset, Megatron takes --tensor-model-parallel-size.
    expert_tensor = megatron.expert_tensor_parallel_size or tensor
    width = moe.intermediate_size
    shared_width = moe.shared_intermediate_size or tensor
    sizes.append(("--expert-model-parallel-size", experts, "number of experts", moe.num_experts))
    sizes.append(("--expert-tensor-parallel-size", expert_tensor, "moe_intermediate_size", width))
    sizes.append(
        ("--tensor-model-parallel-size", tensor, "inner size of the shared expert", shared_width)
    )
    return sizes


def _refuse_expert_options(megatron: MegatronConfig, rollout: RolloutConfig) -> None:
    """Refuses options of experts for a dense model."""
    values = {**vars(megatron), **vars(rollout)}
    for name in EXPERT_OPTIONS:
        is_default = values[name] in (None, False)
        is_trivial = name in EXPERT_SIZES and values[name] == 1
        if not is_default and not is_trivial:
            raise ValueError(
                f"{fields.flag(name)} is given but the model has no experts; remove it."
            )


def _check_lengths(rollout: RolloutConfig, context: Any, vocabulary: Any) -> None:
    """Refuses lengths beyond the model's context, and stop ids outside the vocabulary.

    Args:
        rollout: Lengths and stop ids.
        context: Tokens of prompt and response together, unchecked from config.json.
        vocabulary: Number of token ids, unchecked from config.json.
    """
    limit = rollout.rollout_max_context_len
    of_model = "the model's context"
    if isinstance(context, int) and (limit or 0) > context:
        raise ValueError(
            f"--rollout-max-context-len is {limit} but {of_model} has {context} tokens; choose at"
            " most that."
        )
    prompt_len = rollout.rollout_max_prompt_len
    lengths = [
        ("--rollout-max-response-len", rollout.rollout_max_response_len, context, of_model),
        ("--eval-max-response-len", rollout.eval_max_response_len, context, of_model),
        ("--rollout-max-prompt-len", prompt_len, context, of_model),
        ("--rollout-max-prompt-len", prompt_len, limit, "--rollout-max-context-len"),
    ]
    stop_ids = [("--rollout-stop-token-ids", rollout.rollout_stop_token_ids)]
    for held_out in rollout.eval_sets:
        where = f"--eval-config, dataset {quoted(held_out.name)}"
        lengths.append((f"{where}: max_response_len", held_out.max_response_len, context, of_model))
        stop_ids.append((f"{where}: stop_token_ids", held_out.stop_token_ids))
    for flag, length, most, holder in lengths:
        # A length of all tokens would leave none for the prompt, or for the response.
        if isinstance(most, int) and (length or 0) >= most:
            raise ValueError(
                f"{flag} is {length} but {holder}, of prompt and response, is {most} tokens;"
                " lower it."
            )
    for flag, ids in stop_ids:
        # Without stop ids, 0 is within every vocabulary.
        stop_id = max(ids or (0,))
        if isinstance(vocabulary, int) and stop_id >= vocabulary:
            raise ValueError(
                f"{flag} has {stop_id} but the model's vocabulary has {vocabulary} tokens; remove"
                " it."
            )


def prompt_sizes(megatron: MegatronConfig, rollout: RolloutConfig) -> ModelSizes:
    """Returns the model's sizes, with the context limited to --rollout-max-context-len."""
    sizes = model_sizes(read_model_config(megatron.hf_checkpoint))
    contexts = [sizes.context_len, rollout.rollout_max_context_len]
    limits = [context for context in contexts if context is not None]
    return dataclasses.replace(sizes, context_len=min(limits, default=None))


def check_weights(megatron: MegatronConfig) -> None:
    """Checks in the headers of the weights that all tensors exist with the right shapes.

    An adapter must have the shapes of the model's linear layers.
    """
    for directory in (megatron.hf_checkpoint, megatron.ref_load):
        if directory is not None:
            check_tensors(directory, read_model_config(directory))
    adapter = megatron.lora_adapter_path
    if adapter is not None:
        subject = f"--lora-adapter-path is {quoted_path(adapter)}"
        layers = read_model_config(megatron.hf_checkpoint)["num_hidden_layers"]
        check_base(adapter, megatron.hf_checkpoint, subject, layers=layers)


def check_outputs(
    rollout: RolloutConfig,
    megatron: MegatronConfig,
    reporting: ReportingConfig,
    dumps: Mapping[str, str],
) -> None:
    """Refuses output paths that cannot be written, hold other files, or would replace an input.

    Args:
        rollout: Has the files of prompts.
        megatron: Has the checkpoints.
        reporting: Has the run directory.
        dumps: First file of every kind of dump, by flag.
    """
    outputs = {
        "--output-dir": reporting.output_dir,
        "--save": megatron.save,
        "--save-hf": megatron.save_hf,
    }
    for flag, directory in outputs.items():
        if directory is None:
            continue
        problem = unwritable(directory)
        if problem is not None:
            raise ValueError(
                f"{flag} is {quoted_path(directory)} but {problem}; give a directory that can be"
                " written."
            )
    for flag, file in dumps.items():
        _check_dump(flag, Path(file), Path(reporting.output_dir), megatron.save_hf)
    foreign = foreign_file(Path(reporting.output_dir))
    if foreign is not None:
        raise ValueError(
            f"--output-dir is {quoted_path(reporting.output_dir)} but its {foreign} is of no run of"
            " this program; give another directory."
        )
    _check_save(megatron)
    for directory in export_directories(megatron):
        _check_export(directory, rollout, megatron, reporting)


def check_resumption(megatron: MegatronConfig, options: Mapping[str, Any]) -> None:
    """Refuses options that differ from the ones of the newest checkpoint under --load."""
    if megatron.load is None:
        return
    saved_checkpoints = checkpoints(megatron.load)
    if not saved_checkpoints:
        return
    try:
        saved = read_state(saved_checkpoints[-1]).get("options")
    except Damaged:
        # The run resumes from an older checkpoint, or ends with a message about the damage.
        return
    if isinstance(saved, dict):
        check_options(saved, options)


@contextmanager
def held_outputs(
    megatron: MegatronConfig, reporting: ReportingConfig, *, main: bool
) -> Iterator[None]:
    """Locks the run's output directories; refuses a directory or port in use.

    Args:
        megatron: Has the directories of checkpoints and exports.
        reporting: Has the run directory and the port.
        main: Whether to do this; one process does it for all ranks.
    """
    # Resolved, because runs may name one directory by different paths.
    output_dir = reporting.output_dir
    locks = {Path(output_dir).resolve() / LOCK: f"--output-dir is {quoted_path(output_dir)}"}
    if megatron.save is not None:
        locks[Path(megatron.save).resolve() / LOCK] = f"--save is {quoted_path(megatron.save)}"
    for directory in export_directories(megatron):
        export = Path(directory).resolve()
        # Beside the directory, because an export replaces the directory.
        lock = export.with_name(f".{export.name}{LOCK}")
        locks[lock] = _export_subject(directory, megatron)
    if not main:
        yield
        return
    with held(locks):
        # A second time, now that no other run can write there.
        _check_save(megatron)
        _check_port(reporting.prometheus_port)
        yield


def export_directories(megatron: MegatronConfig) -> list[str]:
    """Returns the directories of the model and of LoRA adapters that the run writes at its end."""
    # Both may be the same directory, which is locked once.
    directories = [megatron.save_hf, megatron.adapter_export]
    return [directory for directory in dict.fromkeys(directories) if directory is not None]


def _export_subject(directory: str, megatron: MegatronConfig) -> str:
    """Returns the beginning of an error message about one of `export_directories`."""
    if directory != megatron.save_hf:
        return f"--merge-lora writes the adapter to {quoted_path(directory)}"
    return f"--save-hf is {quoted_path(directory)}"


def _check_port(port: int | None) -> None:
    """Refuses a port that another program listens on."""
    if port is None:
        return
    # The reporter opens the port only after the model is built.
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise ValueError(
            f"--prometheus-port is {port}, which is not available: {error.strerror}."
        ) from None


def _is_inside(inner: Path, outer: Path) -> bool:
    """Whether a path equals another one or lies below it."""
    inner = inner.resolve()
    # `same_path` also follows links and, on some file systems, other letter cases.
    return any(same_path(path, outer) for path in (inner, *inner.parents))


def _check_dump(flag: str, file: Path, output_dir: Path, save_hf: str | None) -> None:
    """Refuses a dump over another kind of file, or in a place that the run replaces later."""
    problem = unwritable(file.parent)
    if file.is_dir():
        problem = "it is a directory"
    if file.parts[0].startswith("~"):
        problem = "only a shell expands ~"
    elif save_hf is not None and _is_inside(file, Path(save_hf)):
        problem = "that is inside --save-hf, which an export replaces"
    elif any(_is_inside(file, output_dir / name) for name in OWN_NAMES):
        problem = "that is a name that the run itself uses"
    elif problem is None and os.path.lexists(file):
        # Imported only for an existing file, because these modules import torch: seconds.
        if flag == "--save-debug-rollout-data":
            from slime_tis.trainer.data.sample_file import check_replaceable
        else:
            from slime_tis.analysis.dumps.files import check_replaceable
        try:
            check_replaceable(file)
        except (ValueError, OSError) as error:
            problem = first_line(error)
    if problem is not None:
        raise ValueError(
            f"{flag} would write {quoted_path(file)} but {problem}; give another file."
        )


def _check_save(megatron: MegatronConfig) -> None:
    """Refuses a directory with another run's checkpoints, unless this run resumes from them."""
    save = megatron.save
    load = megatron.load
    if save is None or (load is not None and same_path(save, load)):
        return
    others = checkpoints(save)
    if others:
        raise ValueError(
            f"--save is {quoted_path(save)} but another run's checkpoints are there, up to"
            f" {others[-1].name}; continue from them with --load {save}, or give another --save."
        )


def _check_export(
    directory: str, rollout: RolloutConfig, megatron: MegatronConfig, reporting: ReportingConfig
) -> None:
    """Refuses an export that replaces, contains or lies in other directories of the run.

    It may lie in the run directory and in the working directory.
    """
    subject = _export_subject(directory, megatron)
    target = Path(directory).resolve()
    output_dir = Path(reporting.output_dir)
    prompts = [(flag, str(file)) for flag, file in _prompt_files(rollout)]
    own_label = "--output-dir (a name that the run itself uses)"
    own_names = [(own_label, str(output_dir / name)) for name in sorted(OWN_NAMES)]
    used = [
        ("--hf-checkpoint", megatron.hf_checkpoint),
        ("--ref-load", megatron.ref_load),
        ("--lora-adapter-path", megatron.lora_adapter_path),
        ("--save", megatron.save),
        ("--load", megatron.load),
        *prompts,
        ("--output-dir", reporting.output_dir),
        *own_names,
        ("the working directory", os.getcwd()),
    ]
    for flag, path in used:
        if path is None:
            continue
        may_contain = flag in ("--output-dir", "the working directory")
        if same_path(target, path):
            relation = "the same as"
        elif _is_inside(Path(path), target):
            relation = "above"
        elif not may_contain and _is_inside(target, Path(path)):
            relation = "inside"
        else:
            continue
        raise ValueError(
            f"{subject}, which is {relation} {flag} {quoted_path(path)}; an export replaces its"
            " whole directory, so give it a separate one."
        )
    exports.check_target(target, subject, "export")
