"""The options of TRL in a Python program, a command line and a YAML file; nothing is executed."""

import ast
import re
import reprlib
from pathlib import Path
from typing import Any

import yaml

from slime_tis.options.flags import flags_of
from slime_tis.trainer.port.launch_script import CLOSE, OPEN, LaunchScript, text_of
from slime_tis.trainer.port.other_adapters import (
    ADAPTER_FILE,
    ADAPTER_PROGRAM,
    PEFT_CLASS,
    QUANTIZED,
)

CONFIGS = ("GRPOConfig", "RLOOConfig")
"""TRL's classes of options."""
TRAINERS = ("GRPOTrainer", "RLOOTrainer", "CorrectedGRPOTrainer")
"""TRL's trainers, and ours for TRL; their `model` may be a path."""
PEFT_POSITION = 9
"""Positional arguments before `peft_config` of TRL's GRPOTrainer and RLOOTrainer."""
ADAPTER_SOURCE = re.compile(
    rf"^\s*(?:from|import)\s+(?:peft|unsloth)\b|\b{PEFT_CLASS}\(|get_peft_model\(|PeftModel",
    re.MULTILINE,
)
"""Text of programs that may make an adapter. Imports count, because `import … as` renames."""
SHORT = reprlib.Repr()
"""Cuts lists and mappings of YAML: nested aliases of a short file may stand for gigabytes."""
SHORT.maxlevel = 2


def read_trl_program(path: Path) -> LaunchScript:
    """Returns the options that a Python program gives to TRL's configuration.

    Raises:
        ValueError: The program cannot be parsed, or makes no such configuration.
    """
    try:
        tree = ast.parse(text_of(path))
    except (RecursionError, MemoryError):
        raise ValueError(f"{str(path)!r} nests its expressions too deeply to be read.") from None
    except SyntaxError as error:
        raise ValueError(f"{str(path)!r} is not a Python program: {error}.") from None
    script = LaunchScript(path.parent.absolute(), files={path.resolve()})
    script.program_file = path.name
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _last_name(node.func)
        _add_adapter(node, name, script)
        if name in CONFIGS:
            if script.program:
                script.notes["the program makes several configurations; they are read as one"] = (
                    None
                )
            script.program = "trl"
            _add_keywords(node, script)
        elif name in TRAINERS:
            _add_model(node, script)
    if not script.program:
        raise ValueError(
            f"{str(path)!r} is a Python program without TRL's {' or '.join(CONFIGS)}; write `python"
            " train.py FLAGS` into a file for port."
        )
    return script


def _last_name(function: ast.expr) -> str:
    """The name of a called function or class, without its module."""
    if isinstance(function, ast.Attribute):
        return function.attr
    if isinstance(function, ast.Name):
        return function.id
    return ""


def _add_adapter(call: ast.Call, name: str, script: LaunchScript) -> None:
    """Adds options of adapters: a new one, a loaded one, and whether the model is quantized."""
    for keyword in call.keywords:
        if keyword.arg in QUANTIZED:
            script.words.append(f"--{keyword.arg}={_value(keyword.value)}")
    if name == PEFT_CLASS:
        script.words.append(f"--{PEFT_CLASS}={_unread_config(call, script)}")
        _add_keywords(call, script, prefix=f"{PEFT_CLASS}.")
        return
    # The class may have its module before it, as in peft.PeftModel.
    if name != "from_pretrained" or not ast.unparse(call.func).endswith(ADAPTER_FILE):
        return
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    directory = arguments.get("model_id")
    if len(call.args) > 1:
        directory = call.args[1]
    if directory is not None:
        script.words.append(f"--{ADAPTER_FILE}={_value(directory)}")


def _unread_config(call: ast.Call, script: LaunchScript) -> str:
    """Returns why a LoraConfig cannot be read, marked as not literal; empty if it can be read."""
    if any(word.startswith(f"--{PEFT_CLASS}=") for word in script.words):
        return f"{OPEN}one of several {PEFT_CLASS}{CLOSE}"
    if any(keyword.arg is None for keyword in call.keywords):
        return f"{OPEN}{ast.unparse(call)}{CLOSE}"
    return ""


def _add_model(call: ast.Call, script: LaunchScript) -> None:
    """Adds the path of a trainer's model, and the source of its adapters.

    A model that the program has loaded has no path.
    """
    if len(call.args) > PEFT_POSITION:
        script.words.append(f"--peft_config={_value(call.args[PEFT_POSITION])}")
    for keyword in call.keywords:
        if keyword.arg == "peft_config":
            script.words.append(f"--peft_config={_value(keyword.value)}")
        is_path = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str)
        if keyword.arg == "model" and is_path:
            script.words.append(f"--model_name_or_path={ast.literal_eval(keyword.value)}")


def _value(expression: ast.expr) -> str:
    """Returns the text of a literal; a value that is no literal becomes a mark."""
    try:
        return str(ast.literal_eval(expression))
    except (ValueError, TypeError, RecursionError, MemoryError):
        return f"{OPEN}{ast.unparse(expression)}{CLOSE}"


def _add_keywords(call: ast.Call, script: LaunchScript, prefix: str = "") -> None:
    """Adds the keywords of a configuration, with a prefix of their names."""
    for keyword in call.keywords:
        if keyword.arg is None:
            source = ast.unparse(keyword.value)
            script.notes[f"**{source}: options of this mapping are not read"] = None
            continue
        script.words.append(f"--{prefix}{keyword.arg}={_value(keyword.value)}")


def options_of(launch: LaunchScript) -> dict[str, str]:
    """Returns the options of a TRL command by TRL's names; the command line overrides YAML.

    Adds notes to the script on files that are missing.
    """
    options: dict[str, str] = {}
    for flag in [*flags_of(launch.launcher)[1:], *flags_of(launch.words)[1:]]:
        # TRL's parser takes hyphens for underscores, and a switch without a value.
        name = flag.name.removeprefix("--").replace("-", "_")
        options[name] = " ".join(flag.values) or "True"
    program = _program_with_adapter(launch)
    if program:
        options[ADAPTER_PROGRAM] = program
    first, *_ = flags_of(launch.words)
    config = options.pop("config", " ".join(first.values))
    if not config.endswith((".yaml", ".yml")):
        return options
    return {**_options_of_yaml(launch, config), **options}


def _program_with_adapter(launch: LaunchScript) -> str:
    """Returns the Python program if it may make an adapter; empty if it does not."""
    path = launch.directory / launch.program_file
    if path.suffix == ".py" and path.is_file() and ADAPTER_SOURCE.search(text_of(path)):
        return launch.program_file
    return ""


def _options_of_yaml(launch: LaunchScript, config: str) -> dict[str, str]:
    """Returns the options of TRL's YAML file, as texts."""
    path = launch.directory / config
    if not path.is_file():
        launch.notes[f"the file {config!r} is not found; what it sets is missing"] = None
        return {}
    try:
        # BaseLoader makes no other objects than texts, lists and mappings.
        content: Any = yaml.load(text_of(path), Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not YAML: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} must have options of TRL, as `use_vllm: true`.")
    return {name: _text_of_value(value) for name, value in content.items()}


def _text_of_value(value: str | list[Any] | dict[str, Any]) -> str:
    """A value of YAML for a comment or a flag."""
    if isinstance(value, str):
        return value
    return SHORT.repr(value)
