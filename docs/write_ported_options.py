"""Writes docs/ported_options.md: what `slime-tis port` makes of options of verl and TRL.

`make docs` runs it.

python docs/write_ported_options.py
"""

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_tis.trainer.port.gpus import PLACEMENT
from slime_tis.trainer.port.other_adapters import (
    PEFT_CONFIG,
    TRL_FLAGS,
    VERL_FSDP,
    VERL_MEGATRON,
    AdapterOptions,
)
from slime_tis.trainer.port.other_trainers import TRL, VERL, OtherTrainer, convert_trl

PAGE = Path(__file__).with_name("ported_options.md")

HEAD = """# Engine options of verl, TRL and vime

`slime-tis port` reads a launch script, executes nothing, and prints a command of `train.py` with a comment on every change:

```
slime-tis port run_verl.sh > run.sh     # a script that runs verl.trainer.main_ppo with actor_rollout_ref.rollout.name=vllm
slime-tis port grpo.py > run.sh         # a Python program with TRL's GRPOConfig(use_vllm=True, …)
slime-tis port grpo.sh > run.sh         # accelerate launch … --use_vllm, or trl grpo --config grpo.yaml
slime-tis port run_vime.sh > run.sh     # slime with vLLM: the complete script
```

* **vime** has slime's flags, so [its scripts](slime.md#a-launch-script-of-slime) become complete commands.
* **verl and TRL**: the tables below are the options of the engine, of sampling, placement, correction and LoRA adapters. The comments
  list all other options of the command under "to do by hand"; none is dropped without a word. Variables such as `PROMPT_DATA` stand
  for flags that `train.py` requires.
* Training and vLLM do not share GPUs here: of the GPUs that they share in verl and in TRL's mode `colocate`, half train.
* A value that a script computes when it runs is named in the comments.
* A script of verl with another engine than vLLM is refused.

`make docs` writes the tables from those of `port`. Read were verl 0.9.1, TRL 1.16.0, and vime's parser
(vllm-project/vime 035f9834 and 0696c9bd).
"""
VERL_NOTE = """## verl

`algorithm.rollout_correction.*` and [the options of the policy loss](verl.md) stay as they are: `train.py` reads them.
`+actor_rollout_ref.rollout.engine_kwargs.vllm.NAME=VALUE` is `--vllm-NAME VALUE`; a switch that is off is `--vllm-no-NAME`.
In the table, `rollout` is `actor_rollout_ref.rollout`.
"""
TRL_NOTE = """## TRL

Options are those of `GRPOConfig` and `RLOOConfig`, with `num_processes` of accelerate.
`vllm_importance_sampling_correction`, which is on by default, becomes importance weights:
"""
SERVER_NOTE = """
In the mode `server`, `vllm_server_host` and `vllm_server_port` are the `--vllm-url`. `trl vllm-serve` has other routes than
[the servers of this program](vllm.md#servers-that-you-start-yourself), which you start instead.
"""

ADAPTERS_OF_VERL = """## LoRA adapters

An adapter that `port` reads never becomes a run that trains all weights: one that cannot be converted is refused, such as DoRA, wildcards
of layers or a quantized model. If the command trains all weights but a script mentions LoRA or PEFT in words that were not read, such as
the other branch of an `if`, a comment names them. YAML files of verl are not read. If only the running script knows the rank, its variable stays in the command.

verl's FSDP engine has the options `lora_rank`, …, and Megatron's has `lora.rank`, …. An adapter is trained if a rank is above 0:
"""
ADAPTERS_OF_TRL = """TRL has `use_peft` with the first options, or a `LoraConfig(…)` of PEFT in a Python program. Without layers, `port` writes
PEFT's default, `q_proj v_proj`. `PeftModel.from_pretrained(model, DIR)` is `--lora-adapter-path DIR`. An adapter
that is not read needs the variables `LORA_RANK` and `LORA_ALPHA`: one of several configurations, `LoraConfig(**options)`, another
function or class, or any program that imports `peft` or `unsloth` without an adapter that is read. An adapter of a quantized model is
refused if the options or the program show it (`load_in_4bit`, `load_in_8bit`).
"""


def rows(trainer: OtherTrainer) -> list[str]:
    """One row for each option of a trainer."""
    table = ["| option | here |", "|---|---|"]
    for name, renamed in trainer.renamed.items():
        here = f"`{renamed.name}`"
        if renamed.name in PLACEMENT:
            here = "ranks of `torchrun`, `--vllm-launch` and `--vllm-tensor-parallel-size`"
        if name in trainer.defaults:
            here += f"; unset: {trainer.defaults[name]}"
        table.append(_row(name, here))
    for name, (on, off) in trainer.switches.items():
        here = f"on: `{on}`"
        if off:
            here += f"; off: `{off}`"
        table.append(_row(name, here))
    for name, values in trainer.same.items():
        table.append(_row(name, f"{' or '.join(values)}: no flag; other values are listed"))
    for name, reason in trainer.dropped.items():
        table.append(_row(name, f"dropped: {reason}"))
    return table


def adapter_rows(*trainers: AdapterOptions) -> list[str]:
    """One row for each option of LoRA adapters."""
    table = ["| option | here |", "|---|---|"]
    for names in trainers:
        flags = {
            names.rank: "--lora-rank",
            names.alpha: "--lora-alpha",
            names.targets: "--lora-target-modules",
            names.dropout: "--lora-dropout",
            names.path: "--lora-adapter-path",
        }
        for name, flag in flags.items():
            if not name:
                continue
            here = f"`{flag}`"
            if name in names.defaults:
                here += f"; unset: {names.defaults[name]}"
            table.append(_row(names.prefix + name, here))
        if names.excluded:
            here = "layers that `--lora-target-modules` leaves out"
            table.append(_row(names.prefix + names.excluded, here))
        if names.rslora:
            here = "on: `--lora-alpha` is multiplied by the root of the rank"
            table.append(_row(names.prefix + names.rslora, here))
        for name, values in names.neutral.items():
            shown = " or ".join(values[:2]) or "unset"
            table.append(_row(names.prefix + name, f"{shown}: no flag; others are refused"))
        for name, reason in names.dropped.items():
            table.append(_row(names.prefix + name, f"dropped: {reason}"))
    return table


def _row(name: str, here: str) -> str:
    short = name.replace("actor_rollout_ref.rollout.", "rollout.")
    return f"| `{short}` | {here} |"


def correction_rows() -> list[str]:
    """One row for each mode of TRL's importance sampling, as `port` converts it."""
    table = ["| mode | bounds | here |", "|---|---|---|"]
    bounds = {"": {}, " and `clip_min=0.5`": {"vllm_importance_sampling_clip_min": "0.5"}}
    for level in ("token", "sequence"):
        for constraint in ("truncate", "mask"):
            for title, values in bounds.items():
                mode = f"{level}_{constraint}"
                table.append(f"| `{mode}` | `clip_max=3.0`{title} | `{_weights(mode, values)}` |")
    return table


def _weights(mode: str, bounds: Mapping[str, str]) -> str:
    options = {"use_vllm": "True", "vllm_importance_sampling_mode": mode, **bounds}
    flags = convert_trl(options).flags
    words = []
    for flag in flags.values():
        if flag.name.startswith(("--use-tis", "--tis-")):
            words += [flag.name, *flag.values]
    return " ".join(words)


def render() -> str:
    """The complete page."""
    lines = [HEAD, VERL_NOTE, *rows(VERL), "", TRL_NOTE, *correction_rows(), SERVER_NOTE]
    lines += rows(TRL)
    lines += ["", ADAPTERS_OF_VERL, *adapter_rows(VERL_FSDP, VERL_MEGATRON)]
    lines += ["", ADAPTERS_OF_TRL, *adapter_rows(TRL_FLAGS, PEFT_CONFIG)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE)
