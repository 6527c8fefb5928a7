"""YAML files, presets and sources: command line over YAML over preset over default."""

import dataclasses

import pytest
import yaml

from slime_tis.correction.config import PRESETS, RolloutCorrectionConfig
from slime_tis.trainer.cli import train_arguments
from slime_tis.trainer.cli.train_arguments import describe, options_in_force
from tests.cli.conftest import configured, refusal


def test_yaml_reads_a_list(base, tmp_path):
    (tmp_path / "run.yaml").write_text("rollout_stop_token_ids: [2, 5]\n")
    got = configured(base + "--custom-config-path run.yaml")
    assert got.rollout.rollout_stop_token_ids == (2, 5)


def test_yaml_reads_a_mapping(base, tmp_path):
    (tmp_path / "run.yaml").write_text("eval-prompt-data: {easy: eval.jsonl, hard: hard.jsonl}\n")
    got = configured(base + "--custom-config-path run.yaml")
    assert got.rollout.eval_prompt_sets == (("easy", "eval.jsonl"), ("hard", "hard.jsonl"))


def test_yaml_reads_nulls(base, tmp_path):
    (tmp_path / "run.yaml").write_text("label_key: null\nsave:\n")
    got = configured(base + "--custom-config-path run.yaml")
    assert got.rollout.label_key is None and got.megatron.save is None


def test_yaml_reads_text_with_underscores(base, tmp_path):
    (tmp_path / "run.yaml").write_text("rollout_rs: token_k1\nrollout_rs_threshold: 0.5_2\n")
    got = configured(base + "--custom-config-path run.yaml")
    assert got.correction.rollout_rs_threshold == "0.5_2"  # YAML's own reading is the number 0.52
    (criterion,) = got.correction.rejections
    assert (criterion.lower, criterion.upper) == (0.5, 2.0)


# (content of run.yaml, part of the message)
YAML_REFUSALS = [
    ("tis_upper: 2.0", "did you mean tis_upper_bound?"),
    ("custom_config_path: a.yaml", "is not an option"),
    ("drop_above: 2", "no user function is given"),
    ("drop_above: 2024-01-01\ncustom_rm_path: a.b", "is a date"),
    ("use_tis: 3", "'3' but must be true or false"),
    ("rollout_stop_token_ids: [a]", "must be a list"),
    ("tis_clip: 2\ntis-upper-bound: 3", "a second time"),
    (
        "use_tis: true\nlr: 1e-5\nuse_tis: false",
        "line 3: 'use_tis' is given a second time, after line 1",
    ),
    ("a: &x [1, 2]\nlr: *x", "line 2: an alias"),
    ("lr: " + "[" * 5000, "more than 8 levels"),
    ("? [a]\n: 1", "a key must be a word"),
    ("#" * 70000, "70000 bytes"),
    ("a: [", "not YAML"),
    ("algorithm: {rollout_correction: {rollout_iz: token}}", "did you mean rollout_is?"),
    ("algorithm: {rollout_correction: {rollout_rs: geometric}}", "rollout_rs_threshold is unset"),
    ("algorithm: {rollout_correction: {rollout_is: geometric}}", "must be null, token or sequence"),
    ("algorithm: {rollout_correction: {bypass_mode: perhaps}}", "must be true or false"),
    (
        (
            "algorithm: {rollout_correction: {bypass_mode: true, use_policy_gradient: true,"
            " loss_type: ppo_clip}}"
        ),
        "contradicts",
    ),
    ("algorithm: {rollout_correction: {rollout_is_threshold: 2.0}}", "no effect without --use-tis"),
    (
        (
            "algorithm: {rollout_correction: {rollout_rs: token_k1, rollout_rs_threshold: 2, "
            "rollout_rs_threshold_lower: 0.5}}"
        ),
        "belongs to rollout_rs token",
    ),
    (
        "algorithm: {rollout_correction: {rollout_is: token}}\nuse_tis: false",
        "gives use_tis a second time",
    ),
    ("actor_rollout_ref: {rollout: {calculate_log_probs: False}}", "is not read"),
    ("algorithm: {adv_estimator: grpo}", "is not read"),
]


@pytest.mark.parametrize(
    ("text", "part"), YAML_REFUSALS, ids=[row[0][:60] for row in YAML_REFUSALS]
)
def test_yaml_refusals(base, tmp_path, text, part):
    (tmp_path / "run.yaml").write_text(text)
    message = refusal(base + "--custom-config-path run.yaml")
    assert "run.yaml" in message and part in message


def test_options_of_user_functions_keep_their_yaml_types(base, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "use_tis: true\ndrop_above: 1e-4\nnames: [a, '1']\ncount: 3\n"
    )
    line = (
        base + "--custom-config-path run.yaml --custom-tis-function-path"
        " custom_tis.mis.compute_mis_weights_with_cp"
    )
    got = configured(line)
    assert got.user_options == {"drop_above": 1e-4, "names": ["a", "1"], "count": 3}
    assert got.namespace.drop_above == 1e-4 and got.namespace.names == ["a", "1"]
    assert train_arguments.effective_config(got)[
        "count"
    ] == 3 and "drop_above 0.0001" in train_arguments.describe(got)
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(train_arguments.options_in_force(got)))
    assert configured("--custom-config-path saved.yaml").user_options == got.user_options


@pytest.mark.parametrize("name", PRESETS)
def test_preset_gives_the_fields_of_its_table(base, name):
    got = configured(base + f"--rollout-correction-preset {name}").correction
    expected = RolloutCorrectionConfig.preset(name)
    assert list(map(str, dataclasses.astuple(got))) == list(
        map(str, dataclasses.astuple(expected))
    )  # "0.01" is 0.01


# (config, field, value, its source)
PRECEDENCE = [
    ("correction", "use_tis", True, "preset"),
    ("correction", "tis_level", "sequence", "preset"),
    ("correction", "rs_lower_bound", 0.5, "preset"),
    ("correction", "rs_upper_bound", 4.0, "YAML over preset"),
    # though it is the default's value
    ("correction", "tis_upper_bound", 2.0, "flag over YAML"),
    ("correction", "rejection_normalizer", "kept", "default"),
    ("megatron", "lr", 1e-4, "YAML, as text"),
]
SOURCES = (
    "rollout-correction-preset: decoupled_seq_is_rs\nrs_upper_bound: 4.0\n"
    "tis_upper_bound: 5.0\nlr: 1e-4\n"
)


@pytest.mark.parametrize(
    ("section", "field", "value", "source"), PRECEDENCE, ids=[row[1] for row in PRECEDENCE]
)
def test_precedence_of_sources(base, tmp_path, section, field, value, source):
    (tmp_path / "run.yaml").write_text(SOURCES)
    got = configured(base + "--custom-config-path run.yaml --tis-upper-bound 2.0")
    assert getattr(getattr(got, section), field) == value, source


def test_a_preset_of_the_command_line_wins_over_yaml(base, tmp_path):
    (tmp_path / "run.yaml").write_text(SOURCES)
    flags = "--rollout-correction-preset decoupled_token_is --no-use-rs"
    correction = configured(base + f"--custom-config-path run.yaml {flags}").correction
    assert correction.tis_level == "token" and not correction.use_rs


# flags of the command line: the servers' flags, with a list in YAML
SERVER_FLAGS = {
    "none": ("", ("--config", "cpu.yaml", "--dtype", "bfloat16", "-tp", "2")),
    "one more": (
        "--{engine}-x 1",
        ("--config", "cpu.yaml", "--dtype", "bfloat16", "-tp", "2", "--x", "1"),
    ),
    # SGLang and vLLM end at a second --config.
    "an equal one": (
        "--{engine}-config=gpu.yaml",
        ("--dtype", "bfloat16", "-tp", "2", "--config=gpu.yaml"),
    ),
    "an equal one before a short one": (
        "--{engine}-dtype float32",
        ("--config", "cpu.yaml", "--dtype", "bfloat16", "-tp", "2", "--dtype", "float32"),
    ),
    "another list": ("--{engine}-server-args=--x", ("--x",)),
    "another list with one more": (
        "--{engine}-server-args=--x --{engine}-dtype float32",
        ("--x", "--dtype", "float32"),
    ),
    "no list": ("--{engine}-server-args none", None),
    "no list with one more": (
        "--{engine}-dtype float32 --{engine}-server-args none",
        ("--dtype", "float32"),
    ),
}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize(("flags", "expected"), SERVER_FLAGS.values(), ids=SERVER_FLAGS)
def test_server_flags_replace_equal_ones_of_yaml(base, tmp_path, engine, flags, expected):
    (tmp_path / "run.yaml").write_text(
        f"rollout_engine: {engine}\n{engine}_launch: 1\n"
        f"{engine}_server_args: [--config, cpu.yaml, --dtype, bfloat16, -tp, 2]\n"
    )
    flags = flags.format(engine=engine)
    got = configured(base + f"--custom-config-path run.yaml {flags}")
    assert got.servers[engine].server_args == expected


def test_server_flags_keep_a_wrong_word_of_yaml_visible(base, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "rollout_engine: vllm\nvllm_launch: 1\nvllm_server_args: [dtype, bfloat16, --x]\n"
    )
    with pytest.raises(ValueError, match=r"begins with 'dtype' but must begin with a flag"):
        configured(base + "--custom-config-path run.yaml --vllm-dtype float32")


LISTS = ["--eval-prompt-data eval.jsonl", "--rollout-stop-token-ids 2 5"]


@pytest.mark.parametrize("flags", LISTS)
def test_none_unsets_a_list(base, flags):
    assert configured(base + f"{flags} {flags.split()[0]} none") == configured(base)


def test_none_unsets_a_text(base):
    got = configured(base + "--rollout-engine sglang --sglang-url none --sglang-launch 1")
    assert got.servers["sglang"].url is None


def test_none_takes_a_number_back_to_its_default(base):
    assert configured(base + "--lr 1e-4 --lr none").megatron.lr == 1e-6


@pytest.mark.parametrize("flag", ["--use-tis=false", "--use-tis false"])
def test_a_switch_takes_a_value(base, flag):
    assert configured(base + flag) == configured(base)


def test_values_after_an_equals_sign(base):
    assert configured(base + "--use-tis=true --tis-level=sequence").correction.use_tis


def test_options_in_force_round_trip_through_yaml(base, tmp_path):
    lines = [
        "",
        (
            "--rollout-correction-preset decoupled_k3_rs_token_tis --rollout-stop-token-ids 2 5"
            " --lr 3e-5"
        ),
        (
            "--use-tis --tis-clip 3 --rs-veto-threshold 1e-4 --eval-prompt-data a eval.jsonl b"
            " hard.jsonl"
        ),
        (
            "--use-rollout-correction --num-steps-per-rollout 2 --custom-tis-function-path"
            " mine.py:fn --no-progress"
        ),
        "--eps-clip-high inf",
    ]
    for line in lines:
        first = configured(base + line)
        (tmp_path / "config.yaml").write_text(
            yaml.safe_dump(options_in_force(first), sort_keys=False)
        )
        assert configured("--custom-config-path config.yaml") == first


def test_description_has_what_departs_from_the_defaults(base):
    assert (
        describe(
            configured(
                base + "--use-tis --tis-clip 3 --rollout-stop-token-ids 2 5 --weight-decay 0.01"
            )
        )
        == "model and data: --hf-checkpoint model --prompt-data train.jsonl\n"
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
        (
            "--use-rollout-correction --use-rollout-logprobs",
            "(--use-tis is --use-rollout-correction)",
        ),
        (
            "--use-tis algorithm.rollout_correction.bypass_mode=True",
            "rollout_correction.bypass_mode)",
        ),
    ],
    ids=["limit", "switch", "combination"],
)
def test_refusal_names_the_option_as_it_was_written(base, flags, written):
    assert written in refusal(base + flags)


def test_a_newline_as_stop_text_is_one_line_of_the_log(base):
    got = configured(base + "--rollout-stop '\n' \"it's\tend\"")
    (line,) = [line for line in describe(got).splitlines() if "--rollout-stop" in line]
    assert line.startswith("sampling: ") and line.endswith(r"--rollout-stop $'\n' $'it\'s\tend'")


def test_a_newline_as_stop_text_is_read_from_yaml(base, tmp_path):
    (tmp_path / "run.yaml").write_text('rollout_stop: ["\\n", end]\n')
    got = configured(base + "--custom-config-path run.yaml")
    assert got.rollout.rollout_stop == ("\n", "end")
