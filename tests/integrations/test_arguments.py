"""The correction's flags in the parser of another trainer, here with slime's own flags."""

import argparse
import subprocess
import sys

import pytest

import arguments
from slime_tis import RolloutCorrectionConfig
from slime_tis.integrations.arguments import add_rollout_correction_arguments, rollout_correction_config
from slime_tis.limits import field_types, flag


@pytest.fixture
def parser():
    """slime's flags with its types and defaults."""
    parser = argparse.ArgumentParser()
    for switch in ("--use-tis", "--use-rollout-logprobs", "--get-mismatch-metrics", "--use-opsm"):
        parser.add_argument(switch, action="store_true", default=False)
    parser.add_argument("--tis-clip", type=float, default=2.0)
    parser.add_argument("--tis-clip-low", type=float, default=0)
    parser.add_argument("--custom-tis-function-path", type=str, default=None)
    parser.add_argument("--eps-clip", type=float, default=0.2)
    parser.add_argument("--loss-type", choices=["policy_loss", "sft_loss", "custom_loss"], default="policy_loss")
    add_rollout_correction_arguments(parser)
    return parser


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", RolloutCorrectionConfig(tis_lower_bound=0)),
        ("--use-tis --tis-clip 3", RolloutCorrectionConfig(use_tis=True, tis_upper_bound=3.0, tis_lower_bound=0)),
        (
            "--use-tis --tis-clip 3 --tis-upper-bound 5 --mis-level sequence --mis-mode mask",
            RolloutCorrectionConfig(
                use_tis=True, tis_upper_bound=5.0, tis_lower_bound=0, tis_level="sequence", tis_mode="mask"
            ),
        ),
        (
            "--use-rs --rs-level geometric --rs-z-score 3 --mis-veto-threshold 1e-4 --no-tis-batch-normalize",
            RolloutCorrectionConfig(
                use_rs=True, rs_level="geometric", rs_z_score=3.0, rs_veto_threshold=1e-4, tis_lower_bound=0
            ),
        ),
        (
            "--rollout-rs seq_mean_k1 --rollout-rs-threshold 0.5_2.0",
            RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0", tis_lower_bound=0),
        ),
    ],
    ids=["defaults", "slime's names", "both names", "rejection", "verl's criteria"],
)
def test_a_command_line_is_a_config(line, expected, parser):
    assert rollout_correction_config(parser.parse_args(line.split())) == expected


def test_every_option_has_a_flag_and_help(parser):
    text = parser.format_help()
    assert all(flag(name) in text for name in field_types(RolloutCorrectionConfig))
    assert rollout_correction_config(argparse.Namespace()) == RolloutCorrectionConfig()


@pytest.mark.parametrize(
    "options", [{"action": "store_true"}, {"dest": "level"}], ids=["a switch", "another attribute"]
)
def test_a_flag_with_another_meaning_is_refused(options):
    parser = argparse.ArgumentParser()
    parser.add_argument("--rs-level", **options)
    with pytest.raises(ValueError, match="--rs-level"):
        add_rollout_correction_arguments(parser)


def test_the_public_file_and_the_import_of_torch_alone():
    assert arguments.add_rollout_correction_arguments is add_rollout_correction_arguments
    assert arguments.parse_args.__module__ == "slime_tis.trainer.cli.arguments"
    code = (
        "import slime_tis.integrations.arguments, sys; print(sorted({'yaml', 'megatron', 'pydantic'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"
