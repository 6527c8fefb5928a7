"""Every option from its field: flag, YAML, what it needs, --help."""

import json

import pytest

from slime_tis.main import main
from slime_tis.options.command_line import help_notes, needs_of, read_flags
from slime_tis.options.fields import flag
from slime_tis.options.flags import flags_of
from slime_tis.options.yaml_file import read_yaml
from slime_tis.trainer.cli.train_arguments import build_parser, effective_config
from slime_tis.trainer.cli.train_options import ALIASES, COMMAND_LINE, OPTIONS, TITLES
from slime_tis.trainer.configs.eval_config import EvalSet
from slime_tis.trainer.engines.build import evaluation_sampling, training_sampling
from tests.cli.conftest import configured, refusal

HELD_OUT = EvalSet(name="easy", path="eval.jsonl")
SERVER = "--rollout-engine sglang --sglang-url http://a:1 "
SAMPLES = {bool: ("true", True), int: ("7", 7), float: ("2e-1", 0.2), str: ("word", "word")}


NAMES = [name for name in OPTIONS if name != "custom_config_path"]


def sample_value(name):
    """A text for an option, and its value."""
    option = OPTIONS[name]
    if option.type.choices:
        text = value = option.type.choices[-1]
    else:
        text, value = SAMPLES[option.type.item]
    return text, (value,) if option.type.is_list else value


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_read_from_its_flag(name):
    """`build` passes each value to the field of this name."""
    text, expected = sample_value(name)
    flags = read_flags(COMMAND_LINE, flags_of([flag(name), text]), {})
    value = flags.given[name].value
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_read_from_yaml(name, tmp_path):
    text, expected = sample_value(name)
    (tmp_path / "run.yaml").write_text(f"{name}: {text}\n")
    assert read_yaml(tmp_path / "run.yaml", {}, OPTIONS, ALIASES)[name].value == expected


LANDINGS = [
    # flags, config, field, value
    ("--use-tis --tis-upper-bound 1e1", "correction", "tis_upper_bound", 10.0),
    ("--rollout-correction-preset pg_rs --rs-z-score 3", "correction", "rs_upper_bound", None),
    ("--rollout-correction-preset decoupled_geo_rs_adaptive", "correction", "rs_z_score", 3.0),
    ("--use-tis --tis-mode clip --tis-clip-low 0", "correction", "tis_lower_bound", 0.0),
    ("--eps-clip-high 0.28", "policy", "clip_high", 0.28),
    ("--no-share-prompts", "megatron", "share_prompts", False),
    ("--lr-decay-style linear --lr 1e-4 --min-lr 1e-5", "megatron", "min_lr", 1e-5),
    (
        "--custom-generate-function-path a.py:f --generate-concurrency 8",
        "rollout",
        "generate_concurrency",
        8,
    ),
    ("--eval-prompt-data eval.jsonl --eval-engine rollout", "rollout", "evaluates_locally", False),
    ("--rollout-stop '\n' ' end'", "rollout", "rollout_stop", ("\n", " end")),
    ("--rollout-stop-token-ids 2 5", "rollout", "rollout_stop_token_ids", (2, 5)),
    ("--rm-type dapo --reward-weights acc=1,score=2", "rollout", "reward_weights", "acc=1,score=2"),
    ("--eval-prompt-data eval.jsonl", "rollout", "eval_prompt_sets", (("accuracy", "eval.jsonl"),)),
    (
        "--eval-prompt-data easy eval.jsonl hard hard.jsonl --eval-interval 10",
        "rollout",
        "eval_prompt_sets",
        (("easy", "eval.jsonl"), ("hard", "hard.jsonl")),
    ),
    ("--eval-prompt-data eval.jsonl --eval-top-p 1", "rollout", "eval_temperature", 0.0),
    (
        SERVER + "--partial-rollout --over-sampling-batch-size 6",
        "rollout",
        "over_sampling_batch_size",
        6,
    ),
    (SERVER + "http://b:2/", "sglang", "server_urls", ("http://a:1", "http://b:2")),
    (
        "--rollout-engine sglang --sglang-router-ip 10.0.0.1 --sglang-router-port 8000",
        "sglang",
        "router_url",
        "http://10.0.0.1:8000",
    ),
    (
        (
            "--rollout-engine sglang --sglang-launch 2 --sglang-tp-size 2 --sglang-disable-x"
            " --sglang-dtype=float32"
        ),
        "sglang",
        "server_args",
        ("--tp-size", "2", "--disable-x", "--dtype=float32"),
    ),
    (
        "--rollout-engine vllm --vllm-launch 2 --vllm-dtype float32 --vllm-tensor-parallel-size=2",
        "vllm",
        "server_args",
        ("--dtype", "float32", "--tensor-parallel-size=2"),
    ),
    ("--rollout-engine vllm --vllm-launch 1", "vllm", "weight_sync", "disk"),
    ("", "loop", "global_batch_size", 32),
    ("", "loop", "num_steps_per_rollout", 1),
    ("--global-batch-size 16", "loop", "num_steps_per_rollout", 2),
    ("--num-steps-per-rollout 4", "loop", "global_batch_size", 8),
    (
        "--dump-details d",
        "loop",
        "save_debug_train_data",
        "d/train_data/{rollout_id}_{rank}.parquet",
    ),
    ("--dump-details d", "loop", "save_debug_rollout_data", "d/rollout_data/{rollout_id}.jsonl"),
]


@pytest.mark.parametrize(
    ("flags", "section", "field", "value"), LANDINGS, ids=[row[0] or "none" for row in LANDINGS]
)
def test_values_of_several_options(base, flags, section, field, value):
    arguments = configured(base + flags)
    config = arguments.servers.get(section) or getattr(arguments, section)
    got = getattr(config, field)
    assert got == value and type(got) is type(value)


def test_routing_options_land_where_the_model_has_experts(base, tmp_path):
    model = json.loads((tmp_path / "model/config.json").read_text())
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "model_type": "qwen3_moe",
    }
    model |= experts | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 16,
    }
    (tmp_path / "model/config.json").write_text(json.dumps(model))
    line = (
        "--use-rollout-routing-replay --routing-replay-weights --measure-routing-mismatch 8"
        " --rollout-router-bits 4 "
    )
    got = configured(base + line + "--use-routing-replay --num-steps-per-rollout 2")
    assert (got.rollout.use_rollout_routing_replay, got.rollout.routing_replay_weights) == (
        True,
        True,
    )
    assert (got.megatron.use_routing_replay, got.rollout.measure_routing_mismatch) == (True, 8)
    assert got.rollout.rollout_router_bits == 4
    sampling = training_sampling(got.rollout)
    assert (sampling.return_routed_experts, sampling.return_routing_weights) == (True, True)
    assert not evaluation_sampling(got.rollout, HELD_OUT).records_routing


def test_evaluation_records_no_sets(base):
    line = "--rollout-top-p 0.9 --eval-prompt-data eval.jsonl --eval-temperature 1 --eval-top-p 0.7"
    config = configured(base + line).rollout
    assert training_sampling(config).return_sampling_mask
    assert (
        evaluation_sampling(config, HELD_OUT).return_sampling_mask,
        evaluation_sampling(config, HELD_OUT).top_p,
    ) == (False, 0.7)


VALUES = {
    "tis_mode": "clip",
    "tis_level": "geometric",
    "tis_batch_normalize": "true",
    "save_retain": "3",
    "lora_rank": "8",
    "lora_target_modules": "q_proj",
}
"""Values of options that have an old name, other than 0.25."""


@pytest.mark.parametrize(("old", "new"), ALIASES.items())
def test_old_names_are_read_as_the_new_ones(base, tmp_path, old, new):
    value = VALUES.get(new, "0.25")
    (tmp_path / "run.yaml").write_text(f"{old}: {value}\n")
    base += "--use-tis --save ckpt "
    if new == "lora_target_modules":
        base += "--lora-rank 8 "
    by_flag = effective_config(configured(f"{base}{flag(old)}={value}"))
    by_yaml = effective_config(configured(base + "--custom-config-path run.yaml"))
    assert by_flag == by_yaml
    assert str(by_flag[new]) in (value, "True", f"['{value}']")
    assert by_flag[new] != OPTIONS[new].default


# (name of slime or of this program, value)
NAMESPACE = {
    "use_tis": True,
    "tis_mode": "truncate",
    "tis_level": "token",
    "tis_upper_bound": 3.0,
    "tis_clip": 3.0,
    "tis_clip_low": 0.0,
    "mis_upper_bound": 3.0,
    "mis_level": "token",
    "use_rs": False,
    "rs_level": "token",
    "rs_veto_threshold": 1e-4,
    "eps_clip": 0.3,
    "eps_clip_high": 0.3,
    "context_parallel_size": 1,
    "opsm_delta": 0.1,
}


def test_the_namespace_has_slimes_names(base):
    line = base + "--use-tis --tis-clip 3 --rs-veto-threshold 1e-4 --eps-clip 0.3"
    args = configured(line).namespace
    assert {name: getattr(args, name) for name in NAMESPACE} == NAMESPACE


# (flags, attributes of the namespace)
DERIVED_BOUNDS = [
    (
        "--use-tis --use-rs --rs-level geometric --rs-upper-bound 1.25",
        {"tis_lower_bound": 0.5, "rs_lower_bound": 0.8, "rs_upper_bound": 1.25},
    ),
    (
        "--use-tis --tis-upper-bound 4 --use-rs",
        {"tis_lower_bound": 0.25, "rs_lower_bound": 0.25, "rs_upper_bound": 4.0},
    ),
    (
        "--use-tis --use-rs --rs-lower-bound 0.9",
        {"tis_lower_bound": 0.5, "rs_lower_bound": 0.9, "rs_upper_bound": 2.0},
    ),
    (
        "--use-tis --use-rs --tis-clip-low 0",
        {"tis_lower_bound": 0.0, "rs_lower_bound": 0.0, "rs_upper_bound": 2.0},
    ),
    # mode truncate, which has no lower bound
    ("--use-tis --tis-upper-bound 0.8", {"tis_lower_bound": None}),
    ("--use-tis --tis-lower-bound 0.5", {"tis_clip_low": 0.5}),
    (
        (
            "--get-mismatch-metrics --custom-tis-function-path custom_tis.tis.vanilla_tis"
            " --tis-upper-bound 3"
        ),
        {"tis_upper_bound": 3.0},
    ),
]


@pytest.mark.parametrize(
    ("flags", "bounds"), DERIVED_BOUNDS, ids=[flags for flags, _ in DERIVED_BOUNDS]
)
def test_the_namespace_has_derived_bounds(base, flags, bounds):
    args = configured(base + flags).namespace
    assert {name: getattr(args, name) for name in bounds} == bounds


# (flags, option without effect, part of the message)
IDLE = [
    ("--custom-loss-function-path a.f", "--custom-loss-function-path", "--loss-type custom_loss"),
    ("--tis-upper-bound 2", "--tis-upper-bound", "--use-tis or --use-rs"),
    (
        "--use-tis --reject-before-advantage",
        "--reject-before-advantage",
        "--divergence-mask or --tis-mode mask",
    ),
    (
        "--use-rollout-logprobs --policy-loss reinforce --eps-clip 0.2",
        "--eps-clip",
        "--policy-loss ppo, --policy-loss cispo, --policy-loss gspo, ",
    ),
]


@pytest.mark.parametrize(("flags", "option", "part"), IDLE, ids=[row[0] for row in IDLE])
def test_a_flag_without_effect_is_refused(base, flags, option, part):
    """tests/faults/test_command_lines.py tries every option."""
    message = refusal(base + flags)
    assert message.startswith(f"{option} is ")
    assert "no effect without" in message and part in message


@pytest.mark.parametrize(("flags", "option", "part"), IDLE, ids=[row[0] for row in IDLE])
def test_a_yaml_key_without_effect_is_refused(base, tmp_path, flags, option, part):
    values = [words.partition(" ") for words in flags.removeprefix("--").split(" --")]
    lines = [f"{name.replace('-', '_')}: {value or 'true'}\n" for name, _, value in values]
    (tmp_path / "run.yaml").write_text("".join(lines))
    message = refusal(base + "--custom-config-path run.yaml")
    key = option[2:].replace("-", "_")
    assert message.startswith(f"{key} in run.yaml is ") and part in message


@pytest.mark.parametrize(
    "name", [name for name, option in OPTIONS.items() if option.needs or option.suffices]
)
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


def test_help_has_the_titles_of_the_groups():
    lines = build_parser().format_help().splitlines()
    titles = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["options", *TITLES]


def test_help_has_the_text_of_every_option():
    unwrapped = "".join(build_parser().format_help().split())
    for option in OPTIONS.values():
        notes = "; ".join(help_notes(COMMAND_LINE, option))
        text = f"{option.help}({notes})"
        assert option.help.endswith(".") and "".join(text.split()) in unwrapped, option.name


@pytest.mark.parametrize(
    "argv", [["--help"], ["DUMP", "--help"], ["DUMP", "--use-tis", "-h"]], ids=" ".join
)
def test_help_of_what_if_at_every_position(argv, capsys):
    with pytest.raises(SystemExit) as end:
        main(["what-if", *argv])
    assert end.value.code == 0
    assert "slime-tis what-if [-h]" in capsys.readouterr().out


def test_help_shows_both_forms_of_a_switch_that_is_on():
    text = " ".join(build_parser().format_help().split())
    assert "--progress, --no-progress One line on stderr" in text
    assert "--no-use-tis" not in text


@pytest.mark.parametrize("switch", ["--use-wandb", "--report-to tensorboard wandb"])
def test_an_item_of_a_list_meets_a_need(switch, base, monkeypatch):
    monkeypatch.setattr("slime_tis.trainer.configs.loop._is_installed", lambda package: True)
    got = configured(base + switch + " --wandb-group sort").reporting
    assert "wandb" in got.destinations and got.wandb_group == "sort"


def test_a_wrong_item_of_a_list_is_refused(base):
    assert refusal(base + "--report-to wandb comet") == (
        "--report-to is ['wandb', 'comet'] but must be a list, each one of tensorboard, wandb,"
        " trackio, mlflow, prometheus."
    )
