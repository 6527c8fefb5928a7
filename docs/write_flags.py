"""Writes docs/flags.md from the command line's own declarations; `make docs` runs it.

python docs/write_flags.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_tis.correction.config import PRESETS
from slime_tis.limits import flag
from slime_tis.trainer.cli.arguments import build_parser
from slime_tis.trainer.cli.command_line import needs_of
from slime_tis.trainer.cli.run_options import ALIASES, COMMAND_LINE, OPTIONS
from slime_tis.trainer.cli.slime_flags import RENAMED

PAGE = Path(__file__).with_name("flags.md")

HEAD = """# Flags of train.py

This page is written by `make docs` from the declarations that `python train.py --help` shows.

An option has one name everywhere: `--tis-upper-bound 3` on the command line is `tis_upper_bound: 3` in YAML
(with dashes or underscores) and `tis_upper_bound` in Python. Where several sources give it, the command line
wins over the YAML file of `--custom-config-path`, the YAML over the preset of `--rollout-correction-preset`,
and the preset over the default. Every switch has a `--no-` form and may be written `--use-tis=true`, and the value
`none` resets an option to its default, so that the command line can override YAML or a preset. The
configuration in force is written to `config.yaml` in the run directory, which can itself be given to
`--custom-config-path`.

An option that has no effect is refused: `--rs-upper-bound 1.01` without `--use-rs`, for example. The table lists each
option's requirements. If the switch is off explicitly (`use_rs: false` in the same file, or `--no-use-rs` on the
command line), its options are ignored.

A YAML file may also hold verl's block, and the command line may give its keys as verl's does
(`algorithm.rollout_correction.bypass_mode=True`):

```yaml
algorithm:
  rollout_correction:
    rollout_is: sequence
    rollout_is_threshold: 2.0
    rollout_rs: sequence
    rollout_rs_threshold: 4.0
    rollout_token_veto_threshold: 1e-4
```

`rollout_is` there is `token`, `sequence` or null, and `rollout_rs` needs its threshold. With `bypass_mode: true` and
the PPO loss the weights are measured, not applied. `actor_rollout_ref.rollout.calculate_log_probs: true` is read, as
rollouts always have log-probs; nothing else of a verl configuration is.

In YAML a key may occur only once, aliases are refused, and a file has 64 KiB at most.

Errors end the run before anything is built, with one line on stderr and exit code 2.
"""

PRESETS_NOTE = """Those with `--rs-lower-bound 0.999` have verl's bounds, which reject 84 to 100 % of a real model's
responses in bf16, int8 or fp8; `--rs-z-score 3` in addition to the preset replaces them
([measured](choosing.md#bounds-that-follow-length-and-noise)).
"""

FROM_SLIME = """## flags of slime and Megatron-core

`slime-tis port run.sh` prints a launch script of slime in the flags above, with comments on changed, added and
dropped flags; it does not run the script. `train.py` refuses unknown flags in one message that says what to use
instead. It accepts flags that repeat a value of the checkpoint's config.json or a fixed value. Other names here:
"""


def render() -> str:
    """The whole page."""
    metavars = {action.dest: action.metavar for action in build_parser()._actions if action.metavar}
    parts = [HEAD]
    for title, options in COMMAND_LINE.groups.items():
        names = [option.name for option in options]
        rows = [
            f"| `{flag(name)}` | {_values(name, metavars.get(name))} | {_default(name)} | {_meaning(name)} |"
            for name in names
        ]
        parts.append(
            "\n".join([f"## {title}\n", "| flag | value | default | meaning |", "|---|---|---|---|", *rows, ""])
        )
    old = [f"| `{flag(name)}` | `{flag(new)}` |" for name, new in ALIASES.items()]
    parts.append("\n".join(["## old names\n", "| old | now |", "|---|---|", *old, ""]))
    presets = [f"| `{name}` | {_preset(name)} |" for name in PRESETS]
    parts.append("\n".join(["## presets\n", PRESETS_NOTE, "| preset | means |", "|---|---|", *presets, ""]))
    return "\n".join([*parts, FROM_SLIME, _renamed()])


def _renamed() -> str:
    """Flags of slime and Megatron-core with another name here."""
    rows = [f"| `{name}` | `{new.name}`{', ' * bool(new.note)}{new.note} |" for name, new in RENAMED.items()]
    return "\n".join(["| flag | here |", "|---|---|", *rows, ""])


def _preset(name: str) -> str:
    values = PRESETS[name].items()
    return " ".join(f"`{flag(key)}`" if value is True else f"`{flag(key)} {value}`" for key, value in values)


def _values(name: str, metavar: str | tuple[str, ...] | None) -> str:
    limits = OPTIONS[name].type.limits
    values = "switch" if metavar is None else _escape(f"`{metavar}`")
    return values if limits is None else f"{values} {limits}"


def _meaning(name: str) -> str:
    needs = " or ".join(f"`{need}`" for need in needs_of(COMMAND_LINE, name) if need.suggested)
    return _escape(OPTIONS[name].help) + (f" Needs {needs}." if needs else "")


def _default(name: str) -> str:
    return OPTIONS[name].default_text.removeprefix("default: ")


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE)
