"""The JSON Schema of YAML files accepts and refuses the values that the program does."""

import json
import math

import pytest
import yaml
from jsonschema import Draft202012Validator

from slime_tis.errors import quoted
from slime_tis.options.json_schema import yaml_schema
from slime_tis.options.values import Source, read_given
from slime_tis.trainer.cli.train_options import ALIASES, COMMAND_LINE, OPTIONS
from tests.runs import ROOT

SCHEMA = yaml_schema(COMMAND_LINE)
VALIDATOR = Draft202012Validator(SCHEMA)
FILES = [
    *sorted(ROOT.glob("examples/[!d]*/train.yaml")),  # diffusion_digits has its own options
    *sorted(ROOT.glob("examples/*/sglang.yaml")),
    *sorted(ROOT.glob("studies/*/train.yaml")),
]
# (what an editor reads in YAML, the text that the program reads)
VALUES = [
    (True, "true"),
    ("off", "off"),
    (None, "null"),
    ("none", "none"),
    ("", ""),
    (" ", " "),
    ("word", "word"),
    (0, "0"),
    (-1, "-1"),
    (1, "1"),
    (7, "7"),
    (10**12, "1000000000000"),
    (0.25, "0.25"),
    (1.5e-7, "1.5e-7"),
    (-9999.0, "-9999.0"),
    (math.inf, ".inf"),
    (-math.inf, "-.inf"),
    ([2, 5], ["2", "5"]),
    ({"aime": "a.jsonl"}, {"aime": "a.jsonl"}),
]

# The schema has no FILE.yaml in a YAML file; a preset is looked up after the value was read.
LOOKED_UP = {"custom_config_path", "rollout_correction_preset"}


def program_accepts(option, text):
    try:
        value = read_given(option.name, option, text, Source.YAML).value
    except ValueError:
        return False
    if option.type.limits is None or value == option.default:
        return True
    items = value if option.type.is_list else [value]
    return all(option.type.limits.allow(item) for item in items)


def test_the_schema_is_valid_json_schema():
    Draft202012Validator.check_schema(json.loads(json.dumps(SCHEMA, allow_nan=False)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_yaml_files_of_examples_fit_the_schema(path):
    document = yaml.safe_load(path.read_text())
    assert [error.message for error in VALIDATOR.iter_errors(document)] == []


@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in LOOKED_UP])
def test_a_value_is_accepted_where_the_program_accepts_it(name):
    differences = []
    for value, text in VALUES:
        expected = program_accepts(OPTIONS[name], text)
        if VALIDATOR.is_valid({name: value}) != expected:
            differences.append(f"{quoted(value)}: the program says {expected}")
    assert differences == []


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "custom_config_path"])
def test_each_option_has_its_help_and_its_default(name):
    entry = SCHEMA["properties"][name]
    assert entry["description"].startswith(OPTIONS[name].help)
    assert "default" not in entry or VALIDATOR.is_valid({name: entry["default"]})


def test_presets_are_listed():
    assert VALIDATOR.is_valid({"rollout_correction_preset": "decoupled_token_is"})
    assert not VALIDATOR.is_valid({"rollout_correction_preset": "decoupled"})


def test_a_misspelled_option_is_refused():
    (error,) = VALIDATOR.iter_errors({"tis_uper_bound": 2})
    assert "tis_uper_bound" in error.message


def test_options_of_user_functions_are_accepted_besides_one():
    assert VALIDATOR.is_valid({"custom_rm_path": "a.b", "penalty": {"scale": 1}})
    assert not VALIDATOR.is_valid({"penalty": {"scale": 1}})


def test_old_names_are_deprecated():
    assert {name for name, entry in SCHEMA["properties"].items() if "deprecated" in entry} == set(
        ALIASES
    )


def test_verls_block_fits_the_schema():
    block = {"rollout_correction": {"rollout_is": "sequence", "rollout_is_threshold": 2.0}}
    assert VALIDATOR.is_valid({"algorithm": block})


def test_limits_are_in_the_description():
    assert "Limits: 0 to 1." in SCHEMA["properties"]["lr"]["description"]
