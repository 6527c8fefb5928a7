"""Messages of train.py and `slime-tis plan` about a ported command.

The script may be for another machine, so stand-ins replace files that this one lacks.
"""

import json
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from slime_tis.trainer.cli.train_arguments import configure
from slime_tis.trainer.cli.train_options import COMMAND_LINE, Arguments
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.configs.server_engines import SERVER_ENGINES
from slime_tis.trainer.port.launch_script import OPEN

Words = Mapping[str, tuple[str, ...]]
"""Flags with their values."""

OPTION_OF = {flag: option for flag, (option, _) in COMMAND_LINE.spellings.items()}
NO_EFFECT = re.compile(
    r"(?s)(--[a-z0-9-]+) (?:is .* but has no effect|is on but --tensor-model-parallel-size is 1|has"
    r" no effect with --)"
)
"""Refusals of flags that change nothing."""
MISSING_PACKAGE = re.compile(r"(--[a-z0-9-]+) is on but \w+ is not installed")
# Errors of train.py name their flags only in the text.
FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")
LAYOUT = ("parallel-size", "--sequence-parallel", "--hf-checkpoint", "world size")
"""Parts of refusals that leave the memory of a rank unknown."""
REQUIRED: Words = {
    "--num-rollout": ("1",),
    "--rm-type": ("math",),
    "--rollout-batch-size": ("8",),
    "--n-samples-per-prompt": ("8",),
    "--rollout-max-response-len": ("8",),
}
"""Flags that train.py requires, with values that nothing else contradicts."""
UNKNOWN_VALUES: Words = {**REQUIRED, "--lora-rank": ("8",), "--lora-alpha": ("8",)}
"""Values for flags that stay in the command if only the running script knows their value. Without
--lora-rank, the command would train all weights."""
OUTPUTS = (
    "--save",
    "--save-hf",
    "--output-dir",
    *(f"--{engine}-log-dir" for engine in SERVER_ENGINES),
    *(f"--{engine}-weight-dir" for engine in SERVER_ENGINES),
)
DUMPS = ("--save-debug-rollout-data", "--save-debug-train-data")
STAND_IN_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 720,
    "hidden_size": 1024,
    "intermediate_size": 46080,
    "num_attention_heads": 5760,
    "num_key_value_heads": 5760,
    "head_dim": 128,
    "vocab_size": 1 << 20,
    "max_position_embeddings": 1 << 20,
    "model_type": "qwen3",
}
"""A model of unknown sizes: any usual parallel size divides it."""
STAND_IN_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 5760,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 5760,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


@dataclass
class Verdict:
    """The result of the checks."""

    refusals: list[str] = field(default_factory=list)
    """Messages of train.py, each about the command and not about this machine."""
    no_ops: dict[str, str] = field(default_factory=dict)
    """Flags without effect, and train.py's messages."""
    missing: list[str] = field(default_factory=list)
    """Files and packages that this machine lacks."""
    memory: list[str] = field(default_factory=list)
    """Pipeline stages that do not fit into a GPU, or why the memory is unknown."""


def check(flags: Words, ranks: int, model: Mapping[str, Any] | None, gpu_memory: float) -> Verdict:
    """Checks a command as train.py does, and its memory as `slime-tis plan` does.

    train.py ends at the first refusal. This function removes the flag that a refusal names first,
    and checks the others again. It omits later refusals that name a removed flag, because they may
    be consequences of the removal.

    Args:
        flags: The command, with marks of `launch_script` for unknown values.
        ranks: Number of ranks of training.
        model: config.json of a model that is not on this machine; None if it is, or is unknown.
        gpu_memory: Memory of a GPU, GiB.
    """
    verdict = Verdict()
    with tempfile.TemporaryDirectory(prefix="slime-tis-port-") as folder:
        required = {**REQUIRED, **_make_stand_ins(flags, Path(folder), model)}
        words = _with_stand_ins(flags, Path(folder), required, verdict)
        arguments = _configured(words, required, ranks, verdict)
        is_known = model is not None or _is_real_model(words, folder)
        refusals = "\n".join(verdict.refusals)
        if arguments is None or any(part in refusals for part in LAYOUT):
            verdict.memory.append("not checked, because train.py refuses the layout.")
        elif not is_known:
            verdict.memory.append(
                "not checked, because neither config.json nor the script gives the model's sizes;"
                f" run slime-tis plan --world-size {ranks} with these flags where the"
                " checkpoint is."
            )
        else:
            verdict.memory += _memory_problems(arguments.megatron, arguments, ranks, gpu_memory)
    return verdict


def _configured(
    words: dict[str, tuple[str, ...]], required: Words, ranks: int, verdict: Verdict
) -> Arguments | None:
    """Returns the configuration once nothing is refused; adds the messages to the verdict."""
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": str(ranks),
    }
    removed: set[str] = set()
    # Each round removes a flag or adds one of the seven required flags.
    for _ in range(len(words) + 8):
        argv: list[str] = []
        for name, values in words.items():
            argv += [name, *values]
        try:
            return configure(argv, environment)
        except (ValueError, OSError) as error:
            message = str(error)
        named = FLAG.findall(message)
        no_effect = NO_EFFECT.match(message)
        package = MISSING_PACKAGE.match(message)
        is_consequence = not removed.isdisjoint(named)
        if is_consequence:
            pass  # the user sees the refusal that removed the flag
        elif package is not None:
            verdict.missing.append(message)
        elif no_effect is not None:
            verdict.no_ops[no_effect[1]] = message
        else:
            verdict.refusals.append(message)
        flag = _remove_first(named, words)
        if flag is None:
            if not _add_required(named, words, required):
                return None
        elif is_consequence or no_effect is None:
            # Without a flag that has no effect, the others mean the same: nothing follows from it.
            removed.add(flag)
    return None


def _remove_first(named: Sequence[str], words: dict[str, tuple[str, ...]]) -> str | None:
    """Removes the message's first flag in the command, in all spellings; returns the flag."""
    for name in named:
        option = OPTION_OF.get(name, name)
        spellings = [word for word in words if OPTION_OF.get(word, word) == option]
        for spelling in spellings:
            del words[spelling]
        if spellings:
            return name
    return None


def _add_required(named: Sequence[str], words: dict[str, tuple[str, ...]], required: Words) -> bool:
    """Adds the message's first flag that train.py requires; returns whether there is one."""
    for name in named:
        if name in required and name not in words:
            words[name] = required[name]
            return True
    return False


def _make_stand_ins(flags: Words, folder: Path, model: Mapping[str, Any] | None) -> Words:
    """Makes a checkpoint's config.json and a file of prompts; returns the flags that name them."""
    stand_in = dict(STAND_IN_MODEL)
    for name, values in flags.items():
        if name.startswith("--expert-") and values != ("1",):
            stand_in |= STAND_IN_EXPERTS
    checkpoint = folder / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(model or stand_in))
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"input": "1+1=", "label": "2"}\n')
    return {"--hf-checkpoint": (str(checkpoint),), "--prompt-data": (str(prompts),)}


def _with_stand_ins(
    flags: Words, folder: Path, required: Words, verdict: Verdict
) -> dict[str, tuple[str, ...]]:
    """Returns the command with files in a temporary folder for missing inputs and all outputs."""
    words: dict[str, tuple[str, ...]] = {}
    for name, values in flags.items():
        stand_in = _stand_in(name, values, folder, required, verdict)
        if stand_in is not None:
            words[name] = stand_in
    words.setdefault("--output-dir", (str(folder / "run"),))
    return words


def _stand_in(
    name: str, values: tuple[str, ...], folder: Path, required: Words, verdict: Verdict
) -> tuple[str, ...] | None:
    """Returns the values of a flag for the check; None for a flag that cannot be checked."""
    if name in ("--hf-checkpoint", "--ref-load"):
        (checkpoint,) = required["--hf-checkpoint"]
        return (_model_directory(name, " ".join(values), checkpoint, verdict),)
    if name in ("--prompt-data", "--eval-prompt-data", "--eval-config"):
        (prompts,) = required["--prompt-data"]
        return _prompt_files(name, values, prompts, folder, verdict)
    if name in OUTPUTS:
        return (str(folder / name.removeprefix("--")),)
    if name in DUMPS and values:
        return (str(folder / name.removeprefix("--") / PurePath(values[0]).name),)
    if name == "--dump-details":
        return (str(folder / "dump"),)
    if name == "--load":  # port keeps it only if it equals --save
        return (str(folder / "save"),)
    if name == "--custom-config-path" and not Path(" ".join(values)).is_file():
        verdict.missing.append(f"{name} {' '.join(values)}; its options are not checked.")
        return None
    if OPEN in " ".join(values):
        return UNKNOWN_VALUES.get(name)
    return values


def _model_directory(name: str, directory: str, stand_in: str, verdict: Verdict) -> str:
    """Returns the directory, or one with a config.json that stands for it."""
    if OPEN in directory:
        return stand_in
    if (Path(directory) / "config.json").is_file():
        return directory
    verdict.missing.append(f"{name} {directory}")
    return stand_in


def _prompt_files(
    name: str, values: tuple[str, ...], prompts: str, folder: Path, verdict: Verdict
) -> tuple[str, ...]:
    """Returns the values of a flag of prompts, with `prompts` for files that are missing."""
    if name == "--eval-config":
        prompts = str(_held_out_sets(folder, prompts))
    files = [_prompt_file(name, value, prompts, verdict) for value in values]
    if name == "--eval-prompt-data" and len(values) > 1:
        files[::2] = values[::2]  # the values are NAME FILE NAME FILE …
    return tuple(files)


def _prompt_file(name: str, value: str, stand_in: str, verdict: Verdict) -> str:
    """Returns a file of prompts, with its slice of rows, or one that stands for it."""
    # without the slice, as in FILE@[0:3000]
    path = re.sub(r"@\[[-\d]*:[-\d]*\]$", "", value)
    if OPEN not in path and Path(path).is_file():
        return value
    if OPEN not in path and (name == "--prompt-data" or PurePath(path).suffix):
        verdict.missing.append(f"{name} {value}")
    return stand_in


def _held_out_sets(folder: Path, prompts: str) -> Path:
    """Returns a file of --eval-config whose only set has these prompts."""
    stand_in = folder / "eval_config.json"
    stand_in.write_text(json.dumps({"datasets": [{"name": "held-out", "path": prompts}]}))
    return stand_in


def _is_real_model(words: Words, folder: str) -> bool:
    """Whether the checkpoint is on this machine, and not a stand-in of a temporary folder."""
    directory = Path(*words.get("--hf-checkpoint", ("",)))
    return (directory / "config.json").is_file() and not directory.is_relative_to(folder)


def _memory_problems(
    megatron: MegatronConfig, arguments: Arguments, ranks: int, gpu_memory: float
) -> list[str]:
    """Returns the pipeline stages that do not fit into a GPU, as `slime-tis plan` computes them."""
    try:
        from slime_tis.trainer.memory_plan import GIB, USABLE, census
    except ModuleNotFoundError as error:
        return [f"not checked, because the package {error.name} is not installed."]
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if megatron.use_dynamic_batch_size and megatron.max_tokens_per_gpu is not None:
        needed = megatron.max_tokens_per_gpu
        limit = f"--max-tokens-per-gpu is {needed}"
    else:
        samples = megatron.micro_batch_size or 1
        longest = arguments.rollout.rollout_max_response_len
        needed = samples * longest // megatron.context_parallel_size
        limit = f"a micro-batch has up to {needed} tokens of responses"
    try:
        stages = census(megatron).stages(megatron, ranks)
    except ValueError as error:
        return [f"not checked: {error}"]
    problems = []
    for index, stage in enumerate(stages):
        tokens = stage.tokens(USABLE * gpu_memory * GIB)
        if tokens < needed:
            problems.append(
                f"pipeline stage {index} does not fit: weights, gradients and optimizer state take"
                f" {stage.fixed / GIB:.1f} GiB of a GPU with {gpu_memory:g} GiB, which leaves room"
                f" for {tokens} tokens, but {limit}; lower it, use more ranks or recomputation, or"
                " compare with slime-tis plan."
            )
    return problems
