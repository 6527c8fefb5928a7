"""Writes docs/flags.md and docs/options.schema.json from the declarations of the options.

`make docs` runs it.

python docs/write_flags.py
"""

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_tis.correction.config import PRESETS
from slime_tis.options.command_line import needs_of
from slime_tis.options.fields import flag
from slime_tis.options.json_schema import yaml_schema
from slime_tis.trainer.cli.slime_flags import RENAMED
from slime_tis.trainer.cli.train_arguments import build_parser
from slime_tis.trainer.cli.train_options import ALIASES, COMMAND_LINE, OPTIONS

PAGE = Path(__file__).with_name("flags.md")
SCHEMA = Path(__file__).with_name("options.schema.json")

HEAD = """# Flags of train.py

`make docs` writes this page from the declarations that `python train.py --help` shows.

* An option has one name: `--tis-upper-bound 3` on the command line, `tis_upper_bound: 3` in YAML, `tis_upper_bound` in
  Python.
* Priority: command line, YAML of `--custom-config-path`, `--rollout-correction-preset`, default. `config.yaml` in the
  run directory has the effective configuration, in the form that `--custom-config-path` reads.
* Switches have a `--no-` form and accept `--use-tis=true`. The value `none` resets an option to its default.
* An option without an effect is refused, for example `--rs-upper-bound 1.01` without `--use-rs`. If the switch is off
  explicitly (`use_rs: false`, `--no-use-rs`), its options are ignored.
* YAML files have at most 64 KiB, no repeated keys and no YAML aliases (`*name`).
* A wrong command line ends the run before the model is built, with one line on stderr and exit status 2. So do prompts
  that the flags do not fit. Other errors during a run have status 1, signals 128 plus their number.

A YAML file may contain verl's block ([all keys](verl.md#verls-block-on-our-command-line)). Editors with the YAML language
server complete and check a file whose first line names [the schema](options.schema.json), by a path relative to the file:

```yaml
# yaml-language-server: $schema=../docs/options.schema.json
algorithm:
  rollout_correction:
    rollout_is: sequence
    rollout_is_threshold: 2.0
    rollout_rs: sequence
    rollout_rs_threshold: 4.0
    rollout_token_veto_threshold: 1e-4
```

In the tables, `(0, 1]` means above 0 and at most 1. An empty default means unset. FUNCTION is `pkg.module.function` or
`path/file.py:function` ([signatures](custom_functions.md)).
"""

PRESETS_NOTE = """Flags after the name of a preset override its values. verl's bounds 0.999 and 1.001
[reject nearly everything](choosing.md#bounds-that-follow-length-and-noise); `--rs-z-score 3` replaces them.
"""

FROM_SLIME = """## flags of slime and Megatron-core

`train.py` refuses unknown flags and names the replacement. It accepts flags that repeat a value of config.json or a
fixed value. [`slime-tis port`](slime.md#a-launch-script-of-slime) converts launch scripts. Other names here:
"""


def render() -> str:
    """The whole page."""
    metavars = {action.dest: action.metavar for action in build_parser()._actions if action.metavar}
    parts = [HEAD]
    for title, options in COMMAND_LINE.groups.items():
        names = [option.name for option in options]
        (common, count), *_ = Counter(map(_needs, names)).most_common()
        shared = common if common and 2 * count > len(names) else None
        note = [f"Flags whose row names no other requirement need {shared}.\n"] if shared else []
        rows = [
            f"| `{flag(name)}` | {_values(name, metavars.get(name))} | {_default(name)} |"
            f" {_meaning(name, shared)} |"
            for name in names
        ]
        table = ["| flag | value | default | meaning |", "|---|---|---|---|", *rows, ""]
        parts.append("\n".join([f"## {title}\n", *note, *table]))
    old = [f"| `{flag(name)}` | `{flag(new)}` |" for name, new in ALIASES.items()]
    parts.append("\n".join(["## old names\n", "| old | now |", "|---|---|", *old, ""]))
    presets = [f"| `{name}` | {_preset(name)} |" for name in PRESETS]
    parts.append(
        "\n".join(["## presets\n", PRESETS_NOTE, "| preset | means |", "|---|---|", *presets, ""])
    )
    return "\n".join([*parts, FROM_SLIME, _renamed()])


def _renamed() -> str:
    """Flags of slime and Megatron-core with another name here."""
    rows = [
        f"| `{name}` | `{new.name}`{', ' * bool(new.note)}{new.note} |"
        for name, new in RENAMED.items()
    ]
    return "\n".join(["| flag | here |", "|---|---|", *rows, ""])


def _preset(name: str) -> str:
    """Returns a preset's flags, as changes of the most similar earlier preset."""
    values = PRESETS[name]
    rests = {}
    for earlier in list(PRESETS)[: list(PRESETS).index(name)]:
        if len(PRESETS[earlier]) > 2 and PRESETS[earlier].keys() <= values.keys():
            rests[earlier] = {
                key: value for key, value in values.items() if PRESETS[earlier].get(key) != value
            }
    base = min(rests, key=lambda earlier: len(rests[earlier]), default=None)
    rest = values if base is None else rests[base]
    flags = " ".join(
        flag(key) if value is True else f"{flag(key)} {value}" for key, value in rest.items()
    )
    return " and ".join([*([f"`{base}`"] if base else []), *([f"`{flags}`"] if flags else [])])


def _values(name: str, metavar: str | tuple[str, ...] | None) -> str:
    limits = OPTIONS[name].type.limits
    values = "switch" if metavar is None else _escape(f"`{metavar}`")
    if limits is None:
        return values
    low = (
        f"[{limits.ge:.10g}"
        if limits.ge is not None
        else f"({limits.gt:.10g}"
        if limits.gt is not None
        else "(-∞"
    )
    high = (
        f"{limits.le:.10g}]"
        if limits.le is not None
        else f"{limits.lt:.10g})"
        if limits.lt is not None
        else "∞)"
    )
    return ", or ".join([f"{values} {low}, {high}", *(f"{value:g}" for value in limits.also)])


def _needs(name: str) -> str:
    """The options that give an option an effect: `--a x`, `y` or `--b`."""
    words = []
    previous = ""
    for need in needs_of(COMMAND_LINE, name):
        if need.suggested:
            words.append(
                f"`{need.value}`" if need.option == previous and need.value else f"`{need}`"
            )
            previous = need.option
    return ", ".join(words[:-1]) + " or " * (len(words) > 1) + "".join(words[-1:])


def _meaning(name: str, shared: str | None) -> str:
    needs = _needs(name)
    return _escape(OPTIONS[name].help) + (f" Needs {needs}." if needs not in ("", shared) else "")


def _default(name: str) -> str:
    return OPTIONS[name].default_text.removeprefix("default: ").removeprefix("unset")


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def render_schema() -> str:
    """The JSON Schema of YAML files, with one option per line for readable diffs."""
    schema = yaml_schema(COMMAND_LINE)
    lines = []
    for name, value in schema["properties"].items():
        lines.append(f"  {json.dumps(name)}: {_json(value)}")
    properties = ",\n".join(lines)
    parts = []
    for name, value in schema.items():
        text = _json(value)
        if name == "properties":
            text = f"{{\n{properties}\n }}"
        parts.append(f" {json.dumps(name)}: {text}")
    content = ",\n".join(parts)
    return f"{{\n{content}\n}}\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    SCHEMA.write_text(render_schema(), encoding="utf-8")
    print(PAGE)
    print(SCHEMA)
