"""A command line of a program of one's own: sources in their order, refusals in one message."""

from dataclasses import dataclass

import pytest

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.integrations.arguments import CORRECTION_ALIASES
from slime_tis.trainer.cli.command_line import (
    CommandLine,
    SourceConfig,
    build,
    make_parser,
    merge_sources,
    naming_sources,
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
LINE = CommandLine(options=OPTIONS, aliases=CORRECTION_ALIASES)
PARSER = make_parser(LINE, prog="draw.py", usage="draw.py --width N", description="Draws.")


def configured(line: str) -> tuple[Sizes, RolloutCorrectionConfig]:
    options = merge_sources(LINE, read_flags(LINE, PARSER, line.split()))
    with naming_sources(options):
        return build(Sizes, options), build(RolloutCorrectionConfig, options)


def test_command_line_over_yaml_over_preset_over_default(tmp_path):
    path = tmp_path / "draw.yaml"
    path.write_text("rollout_correction_preset: decoupled_seq_is\ntis_clip: 3.0\nheight: 9\nwidth: 10\n")
    sizes, correction = configured(f"--custom-config-path {path} --width 20")
    assert (sizes.width, sizes.height) == (20, 9)
    assert (correction.use_tis, correction.tis_level, correction.tis_upper_bound) == (True, "sequence", 3.0)
    assert configured("--width 1")[0] == Sizes(width=1, height=8)


@pytest.mark.parametrize(
    "flags",
    ["", " --rs-veto-threshold 1e-4", " --use-rs", " --rollout-correction-preset decoupled_geo_rs_token_tis"],
    ids=["alone", "veto", "rejection", "preset with weights"],
)
def test_use_rollout_correction_is_use_tis(flags):
    found = configured(f"--width 1 --use-rollout-correction{flags}")[1]
    assert found.use_tis and found == configured(f"--width 1 --use-tis{flags}")[1]


@pytest.mark.parametrize(
    ("flags", "opposite"),
    [
        ("--rollout-correction-preset disabled", "the preset disabled has none"),
        ("--rollout-correction-preset decoupled_geo_rs --use-rs", "the preset decoupled_geo_rs has none"),
        ("--no-use-tis", "--use-tis is off"),
        ("--custom-config-path off.yaml", "use_tis in off.yaml is off"),
        ("--custom-config-path verl.yaml", "rollout_is in verl.yaml is off"),
    ],
    ids=["preset disabled", "preset of rejection", "flag", "YAML", "verl block"],
)
def test_use_rollout_correction_with_its_opposite_is_refused(flags, opposite, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "off.yaml").write_text("use_tis: false\nuse_rs: true\n")
    (tmp_path / "verl.yaml").write_text("algorithm: {rollout_correction: {rollout_is: null}}\n")
    with pytest.raises(ValueError, match=opposite):
        configured(f"--width 1 --use-rollout-correction {flags}")
    assert configured(f"--width 1 --use-rollout-correction {flags} --use-tis".replace("--no-use-tis", ""))[1].use_tis


def test_command_line_undoes_use_rollout_correction_of_yaml(tmp_path):
    (tmp_path / "on.yaml").write_text("use_rollout_correction: true\n")
    assert not configured(f"--width 1 --custom-config-path {tmp_path / 'on.yaml'} --no-use-tis")[1].use_tis


@pytest.mark.parametrize(
    ("flags", "written"),
    [
        ("algorithm.rollout_correction.rollout_is_threshold=-1", "rollout_is_threshold"),
        ("--use-rollout-correction --use-rollout-logprobs", "(--use-tis is --use-rollout-correction)"),
        ("--use-tis algorithm.rollout_correction.bypass_mode=True", "rollout_correction.bypass_mode)"),
    ],
    ids=["limit", "switch", "combination"],
)
def test_refusal_names_the_option_as_it_was_written(flags, written):
    with pytest.raises(ValueError) as error:
        configured(f"--width 1 {flags}")
    assert written in str(error.value)


def test_help_shows_fields_by_group():
    text = PARSER.format_help()
    assert "rollout correction:\n" in text and "--height N" in text and "Height, in pixels. (default: 8)" in text
    assert "--tis-level, --mis-level {token,sequence,geometric,prefix,segment}" in text
