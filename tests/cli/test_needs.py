"""Options that have no effect without another are refused, or ignored if that is switched off."""

import pytest

from slime_tis.limits import flag
from slime_tis.trainer.cli.command_line import needs_of
from slime_tis.trainer.cli.run_options import COMMAND_LINE, OPTIONS
from tests.cli.conftest import configured, refusal

# (flags, option without effect, part of the message)
IDLE = [
    ("--custom-loss-function-path a.f", "--custom-loss-function-path", "--loss-type custom_loss"),
    ("--rs-upper-bound 1.1", "--rs-upper-bound", "--use-rs"),
    ("--tis-upper-bound 2", "--tis-upper-bound", "--use-tis or --use-rs"),
    ("--use-tis --reject-before-advantage", "--reject-before-advantage", "--divergence-mask or --tis-mode mask"),
    (
        "--use-rollout-logprobs --policy-loss reinforce --eps-clip 0.2",
        "--eps-clip",
        "--policy-loss ppo, --policy-loss cispo, --policy-loss gspo, ",
    ),
    ("--lr-decay-style constant --lr-decay-iters 9", "--lr-decay-iters", "--lr-decay-style linear"),
    ("--eval-temperature 1 --eval-top-p 1", "--eval-temperature", "--eval-prompt-data"),
]


@pytest.mark.parametrize(("flags", "option", "part"), IDLE, ids=[row[0] for row in IDLE])
def test_an_option_without_effect_is_refused_on_the_command_line_and_in_yaml(base, tmp_path, flags, option, part):
    """tests/faults/test_command_lines.py tries every option."""
    message = refusal(base + flags)
    assert message.startswith(f"{option} is ") and "no effect without" in message and part in message
    values = [words.partition(" ") for words in flags.removeprefix("--").split(" --")]
    lines = [f"{name.replace('-', '_')}: {value or 'true'}\n" for name, _, value in values]
    (tmp_path / "run.yaml").write_text("".join(lines))
    message = refusal(base + "--custom-config-path run.yaml")
    assert message.startswith(f"{option[2:].replace('-', '_')} in run.yaml is ") and part in message


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.needs or option.suffices])
def test_an_option_needs_only_declared_options(name):
    """A misspelled flag would be skipped, and the option would have an effect without it."""
    flags = [word.partition("=")[0] for word in (*OPTIONS[name].needs, *OPTIONS[name].suffices)]
    assert [flag(need.option) for need in needs_of(COMMAND_LINE, name)] == flags


@pytest.mark.parametrize(
    ("yaml_text", "flags"),
    [
        ("use_tis: false\ntis_level: sequence\ntis_mode: mask\ntis_upper_bound: 9\n", ""),
        ("use_rs: false\nrs_level: null\nrs_lower_bound: null\n", ""),
        ("use_rs: on\nrs_level: geometric\nrs_upper_bound: 1.1\n", "--no-use-rs"),
        ("lr_decay_style: linear\nmin_lr: 1e-7\n", "--lr-decay-style constant"),
        ("eval_prompt_data: eval.jsonl\neval_interval: 5\n", "--eval-prompt-data none"),
        ("eval_prompt_data: null\neval_interval: 5\n", ""),
        ("rollout_correction_preset: decoupled_geo_rs\n", "--no-use-rs --rs-veto-threshold none"),
    ],
    ids=ascii,
)
def test_options_of_a_switch_that_is_off_are_ignored(base, tmp_path, yaml_text, flags):
    (tmp_path / "run.yaml").write_text(yaml_text)
    assert configured(base + "--custom-config-path run.yaml " + flags) == configured(base)


def test_a_custom_function_may_read_any_option(base):
    line = "--get-mismatch-metrics --custom-tis-function-path custom_tis.tis.vanilla_tis --tis-upper-bound 3"
    assert configured(base + line).namespace.tis_upper_bound == 3.0
