"""A command line of a program of one's own: sources in their order, refusals in one message."""

from dataclasses import dataclass

import pytest

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.trainer.cli.command_line import (
    CORRECTION_ALIASES,
    CORRECTION_NEEDS,
    CommandLine,
    SourceConfig,
    build,
    make_parser,
    merge_sources,
    read_flags,
)
from slime_tis.trainer.cli.options import declare_options


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Options of a program."""

    width: int
    """Width, in pixels."""

    height: int = 8
    """Height, in pixels."""


OPTIONS = declare_options((Sizes, RolloutCorrectionConfig, SourceConfig))
LINE = CommandLine(
    options=OPTIONS,
    groups={"all": " ".join(OPTIONS)},
    aliases=CORRECTION_ALIASES,
    metavars={"FILE.yaml": "custom_config_path"},
    needs=CORRECTION_NEEDS,
)
PARSER = make_parser(LINE, prog="draw.py", usage="draw.py --width N", description="Draws.")


def configured(line: str) -> tuple[Sizes, RolloutCorrectionConfig]:
    values = merge_sources(LINE, read_flags(LINE, PARSER, line.split()))
    return build(Sizes, values), build(RolloutCorrectionConfig, values)


def test_command_line_over_yaml_over_preset_over_default(tmp_path):
    path = tmp_path / "draw.yaml"
    path.write_text("rollout_correction_preset: decoupled_seq_is\ntis_clip: 3.0\nheight: 9\nwidth: 10\n")
    sizes, correction = configured(f"--custom-config-path {path} --width 20")
    assert (sizes.width, sizes.height) == (20, 9)
    assert (correction.use_tis, correction.tis_level, correction.tis_upper_bound) == (True, "sequence", 3.0)
    assert configured("--width 1")[0] == Sizes(width=1, height=8)


def test_rollout_correction_alone_means_token_weights():
    assert configured("--width 1 --use-rollout-correction")[1] == RolloutCorrectionConfig(use_tis=True)
    assert configured("--width 1 --use-rollout-correction --use-rs")[1] == RolloutCorrectionConfig(use_rs=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--width is unset but required; add --width N."),
        ("--width x", "--width is 'x' but must be a whole number."),
        ("--width 1 --hight 2", "--hight is not a flag; did you mean --height?"),
        ("--width 1 --rollout-correction-preset pg_iz", "--rollout-correction-preset is 'pg_iz'; did you mean pg_is?"),
    ],
    ids=["required flag missing", "text for a number", "misspelt flag", "misspelt preset"],
)
def test_refusals(line, message):
    with pytest.raises(ValueError) as error:
        configured(line)
    assert str(error.value).startswith(message)


def test_help_shows_fields_by_group():
    text = PARSER.format_help()
    assert "all:\n" in text and "--height N" in text and "Height, in pixels. (default: 8)" in text
    assert "--tis-level, --mis-level {token,sequence,geometric,prefix,segment}" in text
