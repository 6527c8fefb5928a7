"""Writes docs/flags.md from the command line's own declarations; `make docs` runs it.

python docs/write_flags.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import ALIASES, GROUPS, OPTIONS, build_parser
from slime_tis.command_line import flag
from slime_tis.correction.presets import PRESETS

PAGE = Path(__file__).with_name("flags.md")

HEAD = """# Flags of train.py

This page is written by `make docs` from the declarations that `python train.py --help` shows.

An option has one name everywhere: `--tis-upper-bound 3` on the command line is `tis_upper_bound: 3` in YAML
(with dashes or underscores) and `tis_upper_bound` in Python. Where several sources give it, the command line
wins over the YAML file of `--custom-config-path`, the YAML over the preset of `--rollout-correction-preset`,
and the preset over the default. Every switch has a `--no-` form, and the value `none` unsets an option, so
that the command line can take back what YAML or a preset says. The configuration in force is written to
`config.yaml` in the run directory, which can itself be given to `--custom-config-path`.

A YAML file may also hold verl's block:

```yaml
algorithm:
  rollout_correction:
    rollout_is: sequence
    rollout_is_threshold: 2.0
    rollout_rs: geometric
    rollout_rs_threshold: 1.001
    rollout_token_veto_threshold: 1e-4
```

What is refused is refused before anything is built, in one sentence on stderr, with exit code 2.
"""


def render() -> str:
    """The whole page."""
    metavars = {action.dest: action.metavar for action in build_parser()._actions if action.metavar}
    parts = [HEAD]
    for title, names in GROUPS.items():
        rows = [
            f"| `{flag(name)}` | {_values(metavars.get(name))} | {_default(name)} | {_escape(OPTIONS[name].help)} |"
            for name in names.split()
        ]
        parts.append(
            "\n".join([f"## {title}\n", "| flag | value | default | meaning |", "|---|---|---|---|", *rows, ""])
        )
    old = [f"| `{flag(name)}` | `{flag(new)}` |" for name, new in ALIASES.items()]
    parts.append("\n".join(["## old names\n", "| old | now |", "|---|---|", *old, ""]))
    presets = [f"| `{name}` | {_preset(name)} |" for name in PRESETS]
    parts.append("\n".join(["## presets\n", "| preset | means |", "|---|---|", *presets, ""]))
    return "\n".join(parts)


def _preset(name: str) -> str:
    values = PRESETS[name].items()
    return " ".join(f"`{flag(key)}`" if value is True else f"`{flag(key)} {value}`" for key, value in values)


def _values(metavar: str | tuple[str, ...] | None) -> str:
    return "switch" if metavar is None else _escape(f"`{metavar}`")


def _default(name: str) -> str:
    return OPTIONS[name].default_text.removeprefix("default: ")


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE)
