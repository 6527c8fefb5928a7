"""Command line over YAML over preset over default; presets, switches, and the configuration in force."""

import dataclasses

import pytest
import yaml

from slime_tis.correction.config import PRESETS, RolloutCorrectionConfig
from slime_tis.trainer.cli.arguments import describe, options_in_force
from tests.cli.conftest import configured, refusal


@pytest.mark.parametrize("name", PRESETS)
def test_preset_gives_the_fields_of_its_table(base, name):
    got = configured(base + f"--rollout-correction-preset {name}").correction
    expected = RolloutCorrectionConfig.preset(name)
    assert list(map(str, dataclasses.astuple(got))) == list(map(str, dataclasses.astuple(expected)))  # "0.01" is 0.01


def test_command_line_wins_over_yaml_wins_over_preset_wins_over_default(base, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "rollout-correction-preset: decoupled_seq_is_rs\nrs_upper_bound: 4.0\ntis_upper_bound: 5.0\nlr: 1e-4\n"
    )
    got = configured(base + "--custom-config-path run.yaml --tis-upper-bound 2.0")
    assert got.correction.use_tis and got.correction.tis_level == "sequence"  # preset
    assert got.correction.rs_lower_bound == 0.5  # preset
    assert got.correction.rs_upper_bound == 4.0  # YAML over preset
    assert got.correction.tis_upper_bound == 2.0  # flag over YAML, though it is the default's value
    assert got.correction.rejection_normalizer == "kept"  # default
    assert got.megatron.lr == 1e-4  # YAML reads it as text
    other = configured(
        base + "--custom-config-path run.yaml --rollout-correction-preset decoupled_token_is --no-use-rs"
    )
    assert other.correction.tis_level == "token" and not other.correction.use_rs


LISTS = ["--eval-prompt-data eval.jsonl", "--rollout-stop-token-ids 2 5"]


@pytest.mark.parametrize("flags", LISTS)
def test_none_unsets_lists_and_takes_other_options_back_to_their_default(base, flags):
    assert configured(base + f"{flags} {flags.split()[0]} none") == configured(base)
    assert configured(base + "--rollout-engine sglang --sglang-url none --sglang-launch 1").sglang.sglang_url is None
    assert configured(base + "--lr 1e-4 --lr none").megatron.lr == 1e-6
    assert configured(base + "--use-tis=false") == configured(base + "--use-tis false") == configured(base)
    assert configured(base + "--use-tis=true --tis-level=sequence").correction.use_tis


def test_options_in_force_round_trip_through_yaml(base, tmp_path):
    lines = [
        "",
        "--rollout-correction-preset decoupled_k3_rs_token_tis --rollout-stop-token-ids 2 5 --lr 3e-5",
        "--use-tis --tis-clip 3 --rs-veto-threshold 1e-4 --eval-prompt-data a eval.jsonl b hard.jsonl",
        "--use-rollout-correction --num-steps-per-rollout 2 --custom-tis-function-path mine.py:fn --no-progress",
        "--eps-clip-high inf",
    ]
    for line in lines:
        first = configured(base + line)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(options_in_force(first), sort_keys=False))
        assert configured("--custom-config-path config.yaml") == first


def test_description_has_what_departs_from_the_defaults(base):
    assert describe(configured(base + "--use-tis --tis-clip 3 --rollout-stop-token-ids 2 5 --weight-decay 0.01")) == (
        "model and data: --hf-checkpoint model --prompt-data train.jsonl\n"
        "rollout: --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 12\n"
        "sampling: --rollout-stop-token-ids 2 5\n"
        "rewards: --rm-type exact_match\n"
        "training loop: --num-rollout 3 --global-batch-size 32 --num-steps-per-rollout 1\n"
        "rollout correction: --use-tis --tis-upper-bound 3.0\n"
        "parallelism and precision: --no-bf16 (trains in float32)"
    )
    assert describe(configured(base + "--bf16 --output-dir 'a b'")).splitlines()[-2:] == [
        "parallelism and precision: --bf16",
        "reporting: --output-dir 'a b'",
    ]


@pytest.mark.parametrize(
    ("flags", "opposite"),
    [
        ("--rollout-correction-preset disabled", "the preset disabled has none"),
        ("--no-use-tis", "--use-tis is off"),
        ("--custom-config-path off.yaml", "use_tis in off.yaml is off"),
        ("--custom-config-path verl.yaml", "rollout_is in verl.yaml is off"),
    ],
    ids=["preset", "flag", "YAML", "verl block"],
)
def test_use_rollout_correction_with_its_opposite_is_refused(base, flags, opposite, tmp_path):
    (tmp_path / "off.yaml").write_text("use_tis: false\nuse_rs: true\n")
    (tmp_path / "verl.yaml").write_text("algorithm: {rollout_correction: {rollout_is: null}}\n")
    assert opposite in refusal(f"{base} --use-rollout-correction {flags}")
    line = f"{base} --use-rollout-correction {flags} --use-tis".replace("--no-use-tis", "")
    assert configured(line).correction.use_tis


@pytest.mark.parametrize(
    ("flags", "written"),
    [
        ("algorithm.rollout_correction.rollout_is_threshold=-1", "rollout_is_threshold"),
        ("--use-rollout-correction --use-rollout-logprobs", "(--use-tis is --use-rollout-correction)"),
        ("--use-tis algorithm.rollout_correction.bypass_mode=True", "rollout_correction.bypass_mode)"),
    ],
    ids=["limit", "switch", "combination"],
)
def test_refusal_names_the_option_as_it_was_written(base, flags, written):
    assert written in refusal(base + flags)
