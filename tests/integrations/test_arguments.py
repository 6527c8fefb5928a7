"""The correction's flags in another trainer's parser, here with slime's flags."""

import argparse
import subprocess
import sys
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

import arguments
from slime_tis import RolloutCorrectionConfig
from slime_tis.integrations.arguments import (
    add_rollout_correction_arguments,
    rollout_correction_config,
)
from slime_tis.options.fields import field_types, flag


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """slime's flags with its types and defaults."""
    parser = argparse.ArgumentParser()
    for switch in ("--use-tis", "--use-rollout-logprobs", "--get-mismatch-metrics", "--use-opsm"):
        parser.add_argument(switch, action="store_true", default=False)
    parser.add_argument("--tis-clip", type=float, default=2.0)
    parser.add_argument("--tis-clip-low", type=float, default=0)
    parser.add_argument("--custom-tis-function-path", type=str, default=None)
    parser.add_argument("--eps-clip", type=float, default=0.2)
    parser.add_argument(
        "--loss-type", choices=["policy_loss", "sft_loss", "custom_loss"], default="policy_loss"
    )
    add_rollout_correction_arguments(parser)
    return parser


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", RolloutCorrectionConfig(tis_lower_bound=0)),
        (
            "--use-tis --tis-clip 3",
            RolloutCorrectionConfig(use_tis=True, tis_upper_bound=3.0, tis_lower_bound=0),
        ),
        (
            "--use-tis --tis-clip 3 --tis-upper-bound 5 --mis-level sequence --mis-mode mask",
            RolloutCorrectionConfig(
                use_tis=True,
                tis_upper_bound=5.0,
                tis_lower_bound=0,
                tis_level="sequence",
                tis_mode="mask",
            ),
        ),
        (
            (
                "--use-rs --rs-level geometric --rs-z-score 3 --mis-veto-threshold 1e-4"
                " --no-tis-batch-normalize"
            ),
            RolloutCorrectionConfig(
                use_rs=True,
                rs_level="geometric",
                rs_z_score=3.0,
                rs_veto_threshold=1e-4,
                tis_lower_bound=0,
            ),
        ),
        (
            "--rollout-rs seq_mean_k1 --rollout-rs-threshold 0.5_2.0",
            RolloutCorrectionConfig(
                rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0", tis_lower_bound=0
            ),
        ),
    ],
    ids=["defaults", "slime's names", "both names", "rejection", "verl's criteria"],
)
def test_command_line_is_a_config(
    line: str, expected: RolloutCorrectionConfig, parser: argparse.ArgumentParser
) -> None:
    assert rollout_correction_config(parser.parse_args(line.split())) == expected


@pytest.mark.parametrize("name", field_types(RolloutCorrectionConfig))
def test_option_is_in_the_help(name: str, parser: argparse.ArgumentParser) -> None:
    assert flag(name) in parser.format_help()


def test_parser_without_other_flags_may_get_no_flag() -> None:
    parser = argparse.ArgumentParser()
    add_rollout_correction_arguments(parser)
    assert rollout_correction_config(parser.parse_args([])) == RolloutCorrectionConfig()


OPTIONS: dict[str, Any] = {"use_tis": True, "tis_clip": 3.0, "mis_level": "sequence", "lr": 1e-6}


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(OPTIONS, id="dict"),
        pytest.param(MappingProxyType(OPTIONS), id="mapping"),
        pytest.param(argparse.Namespace(**OPTIONS), id="Namespace"),
        pytest.param(SimpleNamespace(**OPTIONS), id="SimpleNamespace"),
    ],
)
def test_namespaces_or_mappings_of_options_are_read(args: Any) -> None:
    expected = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=3.0, tis_level="sequence")
    assert rollout_correction_config(args) == expected


def test_variables_of_parsed_arguments_are_read(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(["--use-tis", "--tis-clip", "3"])
    assert rollout_correction_config(vars(args)) == rollout_correction_config(args)


def test_omegaconf_node_is_read() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    node = omegaconf.OmegaConf.create(OPTIONS)
    omegaconf.OmegaConf.set_struct(node, True)
    assert rollout_correction_config(node) == rollout_correction_config(OPTIONS)


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(None, id="None"),
        pytest.param("--use-tis", id="text"),
        pytest.param(["--use-tis"], id="list"),
        pytest.param(3, id="number"),
        # the result of parse_known_args
        pytest.param((argparse.Namespace(use_tis=True), []), id="tuple"),
    ],
)
def test_arguments_without_names_are_refused(args: Any) -> None:
    message = rf"got {type(args).__name__}; pass the result of parser.parse_args\(\)"
    with pytest.raises(TypeError, match=message):
        rollout_correction_config(args)


@pytest.mark.parametrize(
    "args",
    [
        pytest.param({}, id="no keys"),
        pytest.param({"use-tis": True}, id="flags instead of names"),
        pytest.param({"algorithm": {"use_tis": True}}, id="nested"),
        pytest.param(argparse.Namespace(lr=1e-6), id="another parser"),
        pytest.param(argparse.ArgumentParser(), id="the parser itself"),
    ],
)
def test_names_without_an_option_are_refused(args: Any) -> None:
    message = r"found none of the correction's options in the .* for example use_tis; call"
    with pytest.raises(ValueError, match=message):
        rollout_correction_config(args)


HOST_FLAGS = {"--tis-clip": 2.0, "--mis-upper-bound": 9.0, "--tis-upper-bound": 7.0}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("", 7.0, id="defaults"),
        pytest.param("--tis-clip 4", 4.0, id="slime's name"),
        pytest.param("--mis-upper-bound 5", 5.0, id="the older name"),
        pytest.param("--tis-clip 4 --mis-upper-bound 5", 5.0, id="two names"),
        pytest.param("--tis-clip 4 --tis-upper-bound 6", 6.0, id="the name here"),
    ],
)
def test_flag_has_priority_over_defaults_of_the_host(line: str, expected: float) -> None:
    parser = argparse.ArgumentParser()
    for name, default in HOST_FLAGS.items():
        parser.add_argument(name, type=float, default=default)
    add_rollout_correction_arguments(parser)
    config = rollout_correction_config(
        parser.parse_args(["--tis-level", "sequence", *line.split()])
    )
    assert config.tis_upper_bound == expected


@pytest.mark.parametrize(
    "options", [{"action": "store_true"}, {"dest": "level"}], ids=["a switch", "another attribute"]
)
def test_flag_with_another_meaning_is_refused(options: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rs-level", **options)
    with pytest.raises(ValueError, match="--rs-level"):
        add_rollout_correction_arguments(parser)


def test_public_file_has_both_parsers() -> None:
    assert arguments.add_rollout_correction_arguments is add_rollout_correction_arguments
    assert arguments.parse_args.__module__ == "slime_tis.trainer.cli.train_arguments"


def test_flags_do_not_import_the_trainer() -> None:
    code = (
        "import slime_tis.integrations.arguments, sys; print(sorted({'yaml', 'megatron',"
        " 'pydantic'} & {*sys.modules}))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert process.stdout == b"[]\n"
