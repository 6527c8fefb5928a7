"""The command line: every flag lands in its field, sources have their order, refusals are one sentence."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import arguments
from arguments import (
    ALIASES,
    GROUPS,
    OPTIONS,
    Arguments,
    build_parser,
    configure,
    describe,
    effective_config,
    parse_args,
)
from slime_tis.correction.presets import PRESETS
from slime_tis.inputs import ARCHITECTURES
from slime_tis.megatron.architecture import FAMILIES

ROOT = Path(__file__).parents[1]


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A command line that is accepted, with its files in the current directory."""
    monkeypatch.chdir(tmp_path)
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    for directory in ("model", "reference"):
        Path(directory).mkdir()
        Path(directory, "config.json").write_text(json.dumps(model))
    for name in ("train.jsonl", "eval.jsonl", "hard.jsonl"):
        Path(name).write_text('{"input": "21>", "label": "12"}\n')
    return (
        "--hf-checkpoint model --prompt-data train.jsonl --rollout-batch-size 4 --n-samples-per-prompt 8 "
        "--rollout-max-response-len 12 --num-rollout 3 --rm-type exact_match "
    )


def configured(line, world_size=1) -> Arguments:
    torchrun = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return configure(shlex.split(line), {"WORLD_SIZE": str(world_size), **torchrun})


def refusal(line, world_size=1) -> str:
    with pytest.raises(ValueError) as error:
        configured(line, world_size)
    return str(error.value)


# (flags, room, field, value): every flag of the design and of slime that is taken over.
LANDINGS = [
    ("--use-tis", "correction", "use_tis", True),
    ("--tis-mode mask", "correction", "tis_mode", "mask"),
    ("--tis-mode clip", "correction", "tis_mode", "clip"),
    ("--tis-level sequence", "correction", "tis_level", "sequence"),
    ("--tis-level geometric", "correction", "tis_level", "geometric"),
    ("--tis-lower-bound 0.25", "correction", "tis_lower_bound", 0.25),
    ("--tis-upper-bound 1e1", "correction", "tis_upper_bound", 10.0),
    ("--tis-batch-normalize", "correction", "tis_batch_normalize", True),
    ("--use-rs", "correction", "use_rs", True),
    ("--rs-level geometric", "correction", "rs_level", "geometric"),
    ("--rs-lower-bound 0.999", "correction", "rs_lower_bound", 0.999),
    ("--rs-upper-bound 1.001", "correction", "rs_upper_bound", 1.001),
    ("--use-rs --rs-level geometric --rs-z-score 3", "correction", "rs_z_score", 3.0),
    ("--use-rs --rs-level sequence --rs-target-fraction 2e-2", "correction", "rs_target_fraction", 0.02),
    ("--rollout-correction-preset pg_rs --rs-z-score 3", "correction", "rs_upper_bound", None),
    ("--rollout-correction-preset decoupled_geo_rs_adaptive", "correction", "rs_z_score", 3.0),
    ("--rs-veto-threshold 1e-4", "correction", "rs_veto_threshold", 1e-4),
    ("--rs-veto-upper-threshold 100", "correction", "rs_veto_upper_threshold", 100.0),
    ("--rs-second-moment-bound 0.04", "correction", "rs_second_moment_bound", 0.04),
    (
        "--rollout-rs token_k1,seq_max_k3 --rollout-rs-threshold 0.5_2.0,0.01",
        "correction",
        "rollout_rs_threshold",
        "0.5_2.0,0.01",
    ),
    ("--rollout-rs token_k1 --rollout-rs-threshold 0.5_2", "correction", "rollout_rs", "token_k1"),
    ("--rejection-normalizer original", "correction", "rejection_normalizer", "original"),
    ("--nonfinite-policy neutral", "correction", "nonfinite_policy", "neutral"),
    ("--nonfinite-policy raise", "correction", "nonfinite_policy", "raise"),
    ("--use-rollout-logprobs", "correction", "use_rollout_logprobs", True),
    ("--use-rollout-logprobs --policy-loss reinforce", "correction", "policy_loss", "reinforce"),
    ("--policy-loss cispo", "correction", "policy_loss", "cispo"),
    ("--old-logprobs interpolate", "correction", "old_logprobs", "interpolate"),
    ("--get-mismatch-metrics", "correction", "get_mismatch_metrics", True),
    ("--use-rollout-correction", "correction", "use_tis", True),
    ("--use-rollout-correction --use-rs", "correction", "use_tis", False),
    ("--advantage-estimator rloo", "policy", "advantage_estimator", "rloo"),
    (
        "--advantage-estimator reinforce_plus_plus_baseline",
        "policy",
        "advantage_estimator",
        "reinforce_plus_plus_baseline",
    ),
    ("--disable-grpo-std-normalization", "policy", "disable_grpo_std_normalization", True),
    ("--normalize-advantages", "policy", "normalize_advantages", True),
    ("--eps-clip 0.1", "policy", "eps_clip", 0.1),
    ("--eps-clip-high 0.28", "policy", "clip_high", 0.28),
    ("--eps-clip 0.1", "policy", "clip_high", 0.1),
    ("--eps-clip-c 3", "policy", "eps_clip_c", 3.0),
    ("--use-opsm", "policy", "use_opsm", True),
    ("--opsm-delta 1e-3", "policy", "opsm_delta", 1e-3),
    ("--opsm-policy old", "policy", "opsm_policy", "old"),
    ("--reject-before-advantage", "policy", "reject_before_advantage", True),
    ("--use-kl-loss --kl-loss-coef 0.01", "policy", "kl_loss_coef", 0.01),
    ("--use-kl-loss", "policy", "use_kl_loss", True),
    ("--kl-loss-type low_var_kl", "policy", "kl_loss_type", "low_var_kl"),
    ("--entropy-coef 1e-3", "policy", "entropy_coef", 1e-3),
    ("--calculate-per-token-loss", "policy", "calculate_per_token_loss", True),
    ("--ref-load reference", "megatron", "ref_load", "reference"),
    ("--load ckpt --save ckpt", "megatron", "load", "ckpt"),
    ("--save ckpt --save-interval 5", "megatron", "save_interval", 5),
    ("--save-retain-count 7", "megatron", "save_retain", 7),
    ("--save-hf out", "megatron", "save_hf", "out"),
    ("--use-distributed-optimizer", "megatron", "use_distributed_optimizer", True),
    ("--micro-batch-size 16", "megatron", "micro_batch_size", 16),
    ("--use-dynamic-batch-size --max-tokens-per-gpu 512", "megatron", "max_tokens_per_gpu", 512),
    ("--log-probs-chunk-size 128", "megatron", "log_probs_chunk_size", 128),
    ("--lr 1e-4", "megatron", "lr", 1e-4),
    ("--lr 1e-4 --min-lr 1e-5", "megatron", "min_lr", 1e-5),
    ("--lr-warmup-iters 10", "megatron", "lr_warmup_iters", 10),
    ("--lr-decay-style cosine --lr-decay-iters 90", "megatron", "lr_decay_iters", 90),
    ("--weight-decay 0.1", "megatron", "weight_decay", 0.1),
    ("--adam-beta1 0.8", "megatron", "adam_beta1", 0.8),
    ("--adam-beta2 0.95", "megatron", "adam_beta2", 0.95),
    ("--adam-eps 1e-6", "megatron", "adam_eps", 1e-6),
    ("--clip-grad 0.5", "megatron", "clip_grad", 0.5),
    ("--bf16", "megatron", "bf16", True),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "megatron",
        "recompute_method",
        "uniform",
    ),
    ("--seed 7", "megatron", "seed", 7),
    ("--num-threads 2", "megatron", "num_threads", 2),
    ("--rollout-engine local", "rollout", "rollout_engine", "local"),
    ("--rollout-lookahead 2", "rollout", "rollout_lookahead", 2),
    ("--max-weight-staleness 4", "rollout", "max_weight_staleness", 4),
    ("--check-weight-sync", "rollout", "check_weight_sync", True),
    ("--weight-sync-bound 1e-3", "rollout", "weight_sync_bound", 1e-3),
    ("--eval-engine rollout", "rollout", "evaluates_locally", False),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --partial-rollout --over-sampling-batch-size 6",
        "rollout",
        "over_sampling_batch_size",
        6,
    ),
    (
        "--rollout-engine sglang --sglang-url http://a:1 http://b:2",
        "sglang",
        "server_urls",
        ("http://a:1", "http://b:2"),
    ),
    (
        "--rollout-engine sglang --sglang-router-ip 10.0.0.1 --sglang-router-port 8000",
        "sglang",
        "router_url",
        "http://10.0.0.1:8000",
    ),
    ("--rollout-engine sglang --sglang-launch 2", "sglang", "sglang_launch", 2),
    (
        "--rollout-engine sglang --sglang-launch 2 --sglang-tp-size 2 --sglang-disable-x --sglang-dtype=float32",
        "sglang",
        "sglang_server_args",
        ("--tp-size", "2", "--disable-x", "--dtype=float32"),
    ),
    (
        "--rollout-engine sglang --sglang-launch 2 --sglang-python /v/bin/python",
        "sglang",
        "sglang_python",
        "/v/bin/python",
    ),
    ("--rollout-engine sglang --sglang-launch 2 --sglang-base-port 31000", "sglang", "sglang_base_port", 31000),
    ("--rollout-engine sglang --sglang-launch 2 --sglang-log-dir logs", "sglang", "sglang_log_dir", "logs"),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --sglang-startup-timeout 60",
        "sglang",
        "sglang_startup_timeout",
        60.0,
    ),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --sglang-request-timeout 90",
        "sglang",
        "sglang_request_timeout",
        90.0,
    ),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --sglang-recovery-timeout 5",
        "sglang",
        "sglang_recovery_timeout",
        5.0,
    ),
    ("--rollout-engine sglang --sglang-url http://a:1 --sglang-concurrency 8", "sglang", "sglang_concurrency", 8),
    ("--rollout-engine sglang --sglang-url http://a:1 --sglang-max-retries 0", "sglang", "sglang_max_retries", 0),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --sglang-weight-sync disk --sglang-weight-dir w",
        "sglang",
        "sglang_weight_dir",
        "w",
    ),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --sglang-weight-sync disk",
        "sglang",
        "sglang_weight_sync",
        "disk",
    ),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --sglang-sync-address 10.0.0.9",
        "sglang",
        "sglang_sync_address",
        "10.0.0.9",
    ),
    ("--rollout-engine sglang --sglang-url http://a:1 --sglang-bucket-mb 64", "sglang", "sglang_bucket_mb", 64),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --sglang-api-key-env MY_KEY",
        "sglang",
        "sglang_api_key_env",
        "MY_KEY",
    ),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --sglang-admin-api-key-env MY_KEY",
        "sglang",
        "sglang_admin_api_key_env",
        "MY_KEY",
    ),
    ("--rollout-precision int8", "rollout", "rollout_precision", "int8"),
    ("--update-weights-interval 3", "rollout", "update_weights_interval", 3),
    ("--input-key prompt", "rollout", "input_key", "prompt"),
    ("--label-key answer", "rollout", "label_key", "answer"),
    ("--metadata-key extra", "rollout", "metadata_key", "extra"),
    ("--apply-chat-template", "rollout", "apply_chat_template", True),
    ("--rollout-max-prompt-len 20", "rollout", "rollout_max_prompt_len", 20),
    ("--rollout-max-context-len 32", "rollout", "rollout_max_context_len", 32),
    ("--rollout-temperature 0.7", "rollout", "rollout_temperature", 0.7),
    ("--rollout-top-p 0.9", "rollout", "rollout_top_p", 0.9),
    ("--rollout-top-k 50", "rollout", "rollout_top_k", 50),
    ("--rollout-top-k -1", "rollout", "rollout_top_k", -1),
    ("--rollout-stop-token-ids 2 5", "rollout", "rollout_stop_token_ids", (2, 5)),
    ("--rollout-shuffle", "rollout", "rollout_shuffle", True),
    ("--rollout-seed 3", "rollout", "rollout_seed", 3),
    ("--rm-type none --custom-rm-path mine.py:score", "rollout", "custom_rm_path", "mine.py:score"),
    ("--rm-type dapo --reward-key acc", "rollout", "reward_key", "acc"),
    (
        "--rm-type dapo --reward-key score --eval-prompt-data eval.jsonl --eval-reward-key acc",
        "rollout",
        "eval_reward_key",
        "acc",
    ),
    ("--eval-prompt-data eval.jsonl", "rollout", "eval_prompt_sets", (("accuracy", "eval.jsonl"),)),
    (
        "--eval-prompt-data easy eval.jsonl hard hard.jsonl --eval-interval 10",
        "rollout",
        "eval_prompt_sets",
        (("easy", "eval.jsonl"), ("hard", "hard.jsonl")),
    ),
    ("--n-samples-per-eval-prompt 4", "rollout", "n_samples_per_eval_prompt", 4),
    ("--eval-temperature 0.6", "rollout", "eval_temperature", 0.6),
    ("--eval-top-p 0.7", "rollout", "eval_top_p", 0.7),
    ("--eval-max-response-len 20", "rollout", "eval_max_response_len", 20),
    ("--eval-input-key q", "rollout", "eval_input_key", "q"),
    ("--eval-label-key a", "rollout", "eval_label_key", "a"),
    ("--skip-eval-before-train", "rollout", "skip_eval_before_train", True),
    ("--num-epoch 2", "loop", "num_epoch", 2),
    ("", "loop", "global_batch_size", 32),
    ("", "loop", "num_steps_per_rollout", 1),
    ("--global-batch-size 16", "loop", "num_steps_per_rollout", 2),
    ("--num-steps-per-rollout 4", "loop", "global_batch_size", 8),
    ("--debug-rollout-only", "loop", "debug_rollout_only", True),
    ("--save-debug-rollout-data d/{rollout_id}.pt", "loop", "save_debug_rollout_data", "d/{rollout_id}.pt"),
    ("--load-debug-rollout-data d/{rollout_id}.pt", "loop", "load_debug_rollout_data", "d/{rollout_id}.pt"),
    ("--output-dir runs/a", "reporting", "output_dir", "runs/a"),
    ("--no-progress", "reporting", "progress", False),
    ("--use-tensorboard", "reporting", "use_tensorboard", True),
    ("--tb-project-name p", "reporting", "tb_project_name", "p"),
    ("--tb-experiment-name e", "reporting", "tb_experiment_name", "e"),
    ("--wandb-project p", "reporting", "wandb_project", "p"),
    ("--wandb-group g", "reporting", "wandb_group", "g"),
    ("--wandb-mode offline", "reporting", "wandb_mode", "offline"),
    ("--wandb-dir w", "reporting", "wandb_dir", "w"),
]


@pytest.mark.parametrize(("flags", "room", "field", "value"), LANDINGS, ids=[row[0] or "none" for row in LANDINGS])
def test_flag_lands_in_its_field(base, flags, room, field, value):
    got = getattr(getattr(configured(base + flags), room), field)
    assert got == value and type(got) is type(value)


def test_every_option_is_landed_or_named_here(base):
    elsewhere = """
        hf_checkpoint prompt_data rollout_batch_size n_samples_per_prompt rollout_max_response_len num_rollout
        custom_config_path custom_tis_function_path use_wandb
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
        expert_model_parallel_size sequence_parallel sglang_server_args
    """
    landed = {word.removeprefix("--").replace("-", "_") for row in LANDINGS for word in row[0].split()}
    landed = {ALIASES.get(name, name).removeprefix("no_") for name in landed}
    assert set(OPTIONS) - landed == set(elsewhere.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rollout-engine sglang", "no server is named"),
        ("--sglang-url http://a:1", "--sglang-url is set but --rollout-engine is local"),
        ("--rollout-engine sglang --sglang-launch 1 --sglang-api-key s3cret", "--sglang-api-key-env names"),
        (
            "--rollout-engine sglang --sglang-launch 1 --sglang-admin-api-key s3cret",
            "--sglang-admin-api-key-env names",
        ),
        (
            "--rollout-engine sglang --sglang-launch 1 --sglang-ssl-keyfile-password=s3cret",
            "--sglang-ssl-keyfile-password-env VARIABLE",
        ),
        (
            "--rollout-engine sglang --sglang-launch 1 --rollout-precision fp8",
            "--rollout-precision is fp8 but --rollout-engine is sglang, whose servers have a precision of their own",
        ),
        ("--rollout-engine sglang --sglang-launch 1 --sglang-port 1", "--sglang-base-port"),
        ("--rollout-engine sglang --sglang-ulr http://a:1", "did you mean --sglang-url?"),
        ("--rollout-engine sglang --sglang-url http://a:1 --rollout-top-p 0.9", "could not use the same distribution"),
        ("--partial-rollout --over-sampling-batch-size 6", "--rollout-engine sglang"),
        ("--over-sampling-batch-size 6", "--partial-rollout is unset"),
        ("--rollout-engine sglang --sglang-launch 1 --partial-rollout", "--over-sampling-batch-size is None"),
        (
            "--rollout-engine sglang --sglang-launch 1 --partial-rollout --over-sampling-batch-size 6 "
            "--rollout-lookahead 1",
            "leave one of them out",
        ),
        ("--rollout-lookahead -1", "--rollout-lookahead is -1"),
    ],
)
def test_engines_that_mean_nothing_are_refused(base, flags, words):
    said = refusal(base + flags)
    assert words in said and "s3cret" not in said


@pytest.mark.parametrize(("old", "new"), ALIASES.items())
def test_old_names_are_read_as_the_new_ones(base, tmp_path, old, new):
    value = {"tis_mode": "clip", "tis_level": "geometric", "save_retain": "3"}.get(new, "0.25")
    flag = "--" + old.replace("_", "-")
    flag_and_value = flag if new == "tis_batch_normalize" else f"{flag} {value}"
    (tmp_path / "run.yaml").write_text(f"{old}: {'true' if new == 'tis_batch_normalize' else value}\n")
    by_flag = effective_config(configured(base + flag_and_value))
    by_yaml = effective_config(configured(base + "--custom-config-path run.yaml"))
    assert by_flag == by_yaml
    assert str(by_flag[new]) in (value, "True") and by_flag[new] != OPTIONS[new].default


def test_slimes_zero_lower_clip_means_no_lower_bound(base):
    assert configured(base + "--use-tis --tis-clip 2 --tis-clip-low 0").correction.tis_lower_bound is None
    assert refusal(base + "--use-tis --tis-mode clip --tis-clip-low 0").startswith("--tis-lower-bound is 0")


@pytest.mark.parametrize("name", PRESETS)
def test_preset_gives_the_fields_of_its_table(base, name):
    got = configured(base + f"--rollout-correction-preset {name}").correction
    expected = dataclasses.asdict(arguments.RolloutCorrectionConfig.preset(name))
    assert {key: _text(value) for key, value in dataclasses.asdict(got).items()} == {
        key: _text(value) for key, value in expected.items()
    }


def _text(value):
    return str(value) if isinstance(value, float) else value


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
    other = configured(base + "--custom-config-path run.yaml --rollout-correction-preset decoupled_token_is")
    assert other.correction.tis_level == "token" and not other.correction.use_rs


def test_command_line_switches_off_what_yaml_and_preset_turn_on(base, tmp_path):
    (tmp_path / "run.yaml").write_text("use_rs: on\nrs_veto_threshold: 1e-4\nbf16: yes\n")
    got = configured(base + "--custom-config-path run.yaml --no-use-rs --rs-veto-threshold none --no-bf16")
    assert (got.correction.use_rs, got.correction.rs_veto_threshold, got.megatron.bf16) == (
        False,
        None,
        False,
    )
    assert not configured(base + "--rollout-correction-preset decoupled_token_is --no-use-tis").correction.use_tis


def test_use_rollout_correction_follows_yaml_where_it_says_something(base, tmp_path):
    (tmp_path / "run.yaml").write_text("use_rollout_correction: true\nuse_rs: true\n")
    got = configured(base + "--custom-config-path run.yaml").correction
    assert (got.use_tis, got.use_rs) == (False, True)
    (tmp_path / "run.yaml").write_text("tis_level: sequence\n")
    got = configured(base + "--custom-config-path run.yaml --use-rollout-correction").correction
    assert (got.use_tis, got.tis_level) == (True, "sequence")


def test_yaml_reads_lists_mappings_nulls_and_underscored_text(base, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "eval-prompt-data: {easy: eval.jsonl, hard: hard.jsonl}\nrollout_stop_token_ids: [2, 5]\n"
        "rollout_rs: token_k1\nrollout_rs_threshold: 0.5_2\nlabel_key: null\nsave:\n"
    )
    got = configured(base + "--custom-config-path run.yaml")
    assert got.rollout.eval_prompt_sets == (("easy", "eval.jsonl"), ("hard", "hard.jsonl"))
    assert got.rollout.rollout_stop_token_ids == (2, 5)
    assert got.correction.rollout_rs_threshold == "0.5_2"  # YAML's own reading is the number 0.52
    (criterion,) = got.correction.rejections
    assert (criterion.lower, criterion.upper) == (0.5, 2.0)
    assert got.rollout.label_key is None and got.megatron.save is None


# verl's YAML blocks, as its documents give them, and what they are here.
VERL_BLOCKS = [
    (
        "rollout_is: token\nrollout_is_threshold: 2.5\nrollout_rs: null\nbypass_mode: false",
        {
            "use_tis": True,
            "tis_level": "token",
            "tis_upper_bound": 2.5,
            "use_rs": False,
            "use_rollout_logprobs": False,
        },
    ),
    (
        "rollout_is: sequence\nrollout_is_threshold: 2.0\nrollout_rs: sequence\nrollout_rs_threshold: 3.0\n"
        "rollout_rs_threshold_lower: 0.5\nrollout_is_batch_normalize: true",
        {
            "use_tis": True,
            "tis_level": "sequence",
            "use_rs": True,
            "rs_level": "sequence",
            "rs_lower_bound": 0.5,
            "rs_upper_bound": 3.0,
            "tis_batch_normalize": True,
        },
    ),
    (
        "rollout_is: null\nrollout_rs: geometric\nrollout_rs_threshold: 1.001\n"
        "rollout_rs_threshold_lower: 0.999\n"
        "rollout_token_veto_threshold: 1e-4\nbypass_mode: true\nuse_policy_gradient: true",
        {
            "use_tis": False,
            "use_rs": True,
            "rs_level": "geometric",
            "rs_lower_bound": 0.999,
            "rs_upper_bound": 1.001,
            "rs_veto_threshold": 1e-4,
            "use_rollout_logprobs": True,
            "policy_loss": "reinforce",
        },
    ),
    (
        "rollout_is: token\nrollout_is_threshold: 2.0\nbypass_mode: true\nuse_policy_gradient: false",
        {"use_tis": False, "use_rollout_logprobs": True, "policy_loss": "ppo", "get_mismatch_metrics": True},
    ),
    (
        "rollout_is: sequence\nbypass_mode: true\nrollout_rs: seq_mean_k1\nrollout_rs_threshold: 0.5_2.0\n"
        "loss_type: ppo_clip",
        {"use_tis": False, "use_rs": False, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"},
    ),
    (
        "rollout_is: token\nrollout_is_threshold: 0.5_5.0",
        {"use_tis": True, "tis_mode": "mask", "tis_lower_bound": 0.5, "tis_upper_bound": 5.0},
    ),
    (
        "rollout_is: sequence\nbypass_old_logprob_for_rollout: true\nuse_pure_rollout_correction: true",
        {"use_tis": True, "tis_level": "sequence", "use_rollout_logprobs": True, "policy_loss": "reinforce"},
    ),
]


@pytest.mark.parametrize(("block", "expected"), VERL_BLOCKS)
def test_verl_block_is_translated(base, tmp_path, block, expected):
    indented = "\n".join("    " + line for line in block.splitlines())
    (tmp_path / "verl.yaml").write_text(
        f"algorithm:\n  rollout_correction:\n{indented}\n"
        "actor_rollout_ref:\n  rollout:\n    calculate_log_probs: true\n"
    )
    got = dataclasses.asdict(configured(base + "--custom-config-path verl.yaml").correction)
    assert {name: got[name] for name in expected} == expected


def test_effective_config_round_trips_through_yaml(base, tmp_path):
    lines = [
        "",
        "--rollout-correction-preset decoupled_k3_rs_token_tis --rollout-stop-token-ids 2 5 --lr 3e-5",
        "--use-tis --tis-clip 3 --rs-veto-threshold 1e-4 --eval-prompt-data a eval.jsonl b hard.jsonl",
        "--use-rollout-correction --num-steps-per-rollout 2 --custom-tis-function-path mine.py:fn --no-progress",
        "--eps-clip-high inf",
    ]
    for line in lines:
        first = configured(base + line)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(effective_config(first), sort_keys=False))
        assert configured("--custom-config-path config.yaml") == first


def test_effective_config_holds_every_option_but_the_sources(base):
    sources = {"use_rollout_correction", "rollout_correction_preset", "custom_config_path"}
    assert set(effective_config(configured(base))) == set(OPTIONS) - sources


def test_description_has_what_departs_from_the_defaults(base):
    assert describe(configured(base + "--use-tis --tis-clip 3 --rollout-stop-token-ids 2 5 --weight-decay 0.01")) == (
        "model and data: --hf-checkpoint model --prompt-data train.jsonl\n"
        "rollout: --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 12\n"
        "sampling: --rollout-stop-token-ids 2 5\n"
        "rewards: --rm-type exact_match\n"
        "training loop: --num-rollout 3 --num-steps-per-rollout 1 --global-batch-size 32\n"
        "rollout correction: --use-tis --tis-upper-bound 3.0"
    )


def test_namespace_has_slimes_names(base):
    args = configured(base + "--use-tis --tis-clip 3 --rs-veto-threshold 1e-4 --eps-clip 0.3").namespace
    assert (args.use_tis, args.tis_mode, args.tis_level, args.tis_upper_bound) == (
        True,
        "truncate",
        "token",
        3.0,
    )
    assert (args.tis_clip, args.tis_clip_low, args.mis_upper_bound, args.mis_level) == (
        3.0,
        0.0,
        3.0,
        "token",
    )
    assert (args.use_rs, args.rs_level, args.rs_veto_threshold) == (False, "token", 1e-4)
    assert (args.eps_clip, args.eps_clip_high, args.context_parallel_size) == (0.3, 0.3, 1)
    assert configured(base + "--tis-lower-bound 0.5").namespace.tis_clip_low == 0.5
    assert args.opsm_delta == 0.1


def test_namespace_has_the_bounds_that_nobody_set(base):
    def bounds(flags):
        args = configured(base + flags).namespace
        return args.tis_lower_bound, args.rs_lower_bound, args.rs_upper_bound

    assert bounds("--use-tis --use-rs --rs-level geometric --rs-upper-bound 1.25") == (0.5, 0.8, 1.25)
    assert bounds("--use-tis --tis-upper-bound 4 --use-rs") == (0.25, 0.25, 4.0)
    assert bounds("--use-tis --use-rs --rs-lower-bound 0.9") == (0.5, 0.9, 2.0)
    assert bounds("--use-tis --tis-upper-bound 0.8")[0] is None  # mode truncate, which has no lower bound


REFUSALS = [
    (
        "--use-opsm --opsm-policy old",
        "--opsm-policy is old but with one optimizer step per rollout the old policy is the one that is trained, and "
        "nothing is ever left out; make it rollout, or raise --num-steps-per-rollout.",
    ),
    (
        "--use-rollout-logprobs --use-tis",
        "--use-rollout-logprobs with --use-tis applies the correction twice under --policy-loss ppo, whose "
        "ratio "
        "already is the importance weight; drop one of them or use --policy-loss reinforce.",
    ),
    (
        "--policy-loss reinforce",
        "--policy-loss is reinforce but it has no old policy to recompute log-probs of; add --use-rollout-logprobs.",
    ),
    (
        "--custom-tis-function-path mine.py:fn",
        "--custom-tis-function-path is 'mine.py:fn' but nothing calls it; add --use-tis, --use-rs or "
        "--get-mismatch-metrics.",
    ),
    ("--tis-upper-bound 0", "--tis-upper-bound is 0.0; give a finite number above 0."),
    ("--tis-upper-bound abc", "--tis-upper-bound is 'abc' but must be a number."),
    ("--tis-upper-bound nan", "--tis-upper-bound is 'nan' but must be a number."),
    ("--lr 0.5_2", "--lr is '0.5_2' but must be a number."),
    ("--num-rollout 1.5", "--num-rollout is '1.5' but must be a whole number."),
    ("--lr none", "--lr is unset but must be a number."),
    ("--lr", "--lr expected one argument."),
    ("--use-tiss", "--use-tiss is not a flag; did you mean --use-tis?"),
    ("--zzz", "--zzz is not a flag; --help lists what there is."),
    (
        "--rollout-correction-preset decoupled_token",
        "--rollout-correction-preset is 'decoupled_token'; did you mean decoupled_token_is?",
    ),
    ("--kl-loss-type k4", "--kl-loss-type is 'k4' but must be one of k1, k2, k3, low_var_kl."),
    ("--kl-loss-coef 0.1", "--kl-loss-coef is 0.1 but has no effect alone; add --use-kl-loss."),
    ("--eps-clip 1.5", "--eps-clip is 1.5 but must lie between 0 and 1; 0.2 is customary."),
    ("--eps-clip-high -1", "--eps-clip-high is -1.0 but must be above 0; leave it out for --eps-clip."),
    ("--eps-clip-c 0.5", "--eps-clip-c is 0.5 but must be above 1; leave it out for no dual clip."),
    (
        "--global-batch-size 12",
        "--global-batch-size is 12 but a rollout has 32 samples (--rollout-batch-size 4 × "
        "--n-samples-per-prompt 8); "
        "choose a divisor of 32.",
    ),
    (
        "--num-steps-per-rollout 3",
        "--num-steps-per-rollout is 3 but a rollout has 32 samples (--rollout-batch-size 4 × "
        "--n-samples-per-prompt 8); choose a divisor of 32.",
    ),
    (
        "--num-steps-per-rollout 4 --global-batch-size 16",
        "--num-steps-per-rollout is 4 and --global-batch-size is 16 but a rollout has 32 samples "
        "(--rollout-batch-size 4 × --n-samples-per-prompt 8); leave one of the two out or make their "
        "product 32.",
    ),
    (
        "--micro-batch-size 5",
        "--micro-batch-size is 5 but a rank has 32 samples in a step; choose a divisor of 32.",
    ),
    (
        "--use-dynamic-batch-size",
        "--use-dynamic-batch-size is on but --max-tokens-per-gpu is unset; add a token budget.",
    ),
    (
        "--max-tokens-per-gpu 64",
        "--max-tokens-per-gpu is 64 but has no effect alone; add --use-dynamic-batch-size.",
    ),
    (
        "--micro-batch-size 4 --use-dynamic-batch-size --max-tokens-per-gpu 64",
        "--micro-batch-size is 4 but --use-dynamic-batch-size packs by tokens; leave one of the two out.",
    ),
    (
        "--sequence-parallel",
        "--sequence-parallel is on but --tensor-model-parallel-size is 1; raise the size to 2 or more or "
        "leave "
        "--sequence-parallel out.",
    ),
    (
        "--n-samples-per-prompt 1",
        "--n-samples-per-prompt is 1 but --advantage-estimator grpo compares the samples of a prompt; raise "
        "it to 2 "
        "or more.",
    ),
    (
        "--n-samples-per-prompt 1 --advantage-estimator rloo",
        "--n-samples-per-prompt is 1 but --advantage-estimator rloo compares the samples of a prompt; raise "
        "it to 2 "
        "or more.",
    ),
    (
        "--tensor-model-parallel-size 2",
        "WORLD_SIZE is 1 but --tensor-model-parallel-size × --pipeline-model-parallel-size × "
        "--context-parallel-size "
        "is 2; start a multiple of that with torchrun --nproc-per-node.",
    ),
    (
        "--expert-model-parallel-size 2",
        "--expert-model-parallel-size is 2 but the model has no experts; leave it at 1.",
    ),
    ("--micro-batch-size 0", "--micro-batch-size is 0 but must be 1 or more."),
    ("--rollout-batch-size 0", "--rollout-batch-size is 0 but must be 1 or more."),
    (
        "--log-probs-chunk-size 0",
        "--log-probs-chunk-size is 0 but must be 1 or more, or -1 for all tokens at once.",
    ),
    ("--adam-beta2 1", "--adam-beta2 is 1.0 but must be at least 0 and below 1."),
    ("--min-lr 1", "--min-lr is 1.0 but must not exceed --lr, which is 1e-06."),
    ("--save-interval 2", "--save-interval is 2 but --save is unset; add --save DIR."),
    (
        "--recompute-granularity full",
        "--recompute-granularity is 'full' but --recompute-method or --recompute-num-layers is unset; add "
        "both, for "
        "example --recompute-method uniform --recompute-num-layers 1.",
    ),
    (
        "--rollout-temperature 0",
        "--rollout-temperature is 0.0 but must be above 0; greedy samples of a group are all alike and teach nothing.",
    ),
    ("--rollout-top-p 0", "--rollout-top-p is 0.0 but must be above 0 and at most 1; 1 keeps all tokens."),
    ("--rollout-top-k 0", "--rollout-top-k is 0 but must be 1 or more, or -1 for all tokens."),
    (
        "--eval-interval 5",
        "--eval-interval is 5 but --eval-prompt-data is unset; add --eval-prompt-data FILE.",
    ),
    (
        "--eval-prompt-data a eval.jsonl b",
        "--eval-prompt-data is 'a eval.jsonl b', 3 values, but needs one PATH or NAME PATH pairs.",
    ),
    (
        "--eval-prompt-data a eval.jsonl a hard.jsonl",
        "--eval-prompt-data names a, a but each name may stand only once.",
    ),
    (
        "--eval-prompt-data gone.jsonl",
        "--eval-prompt-data is 'gone.jsonl' but there is no such file; give a JSONL or parquet file.",
    ),
    (
        "--prompt-data gone.jsonl",
        "--prompt-data is 'gone.jsonl' but there is no such file; give a JSONL or parquet file.",
    ),
    (
        "--rm-type none",
        "--rm-type is unset and so is --custom-rm-path; add one of them to score responses.",
    ),
    (
        "--custom-rm-path mine.py:score",
        "--rm-type is 'exact_match' and --custom-rm-path is 'mine.py:score'; leave one of the two out.",
    ),
    ("--num-rollout none", "--num-rollout is unset and so is --num-epoch; add one of them to bound the run."),
    (
        "--debug-rollout-only --load-debug-rollout-data d.pt",
        "--load-debug-rollout-data is 'd.pt' but --debug-rollout-only does not train; leave one of the two out.",
    ),
    (
        "--load gone",
        "--load is 'gone' but there is no such directory; leave --load out to start afresh.",
    ),
    ("--save train.jsonl", "--save is 'train.jsonl' but that is a file; give a directory that can be written."),
    (
        "--hf-checkpoint gone",
        "--hf-checkpoint is 'gone' but holds no config.json; give a Hugging Face directory.",
    ),
    (
        "--ref-load gone",
        "--ref-load is 'gone' but holds no config.json; give a Hugging Face directory.",
    ),
    (
        "--rollout-max-response-len 64",
        "--rollout-max-response-len is 64 but the model's context of 64 tokens holds the prompt too; choose "
        "fewer "
        "tokens.",
    ),
    (
        "--custom-config-path gone.yaml",
        "--custom-config-path is 'gone.yaml' but there is no such file; give a YAML file.",
    ),
    ("--wandb-mode loud", "--wandb-mode is 'loud' but must be one of online, offline, disabled."),
]


@pytest.mark.parametrize(("flags", "sentence"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_refusal_is_one_sentence_with_flag_value_and_mend(base, flags, sentence):
    assert refusal(base + flags) == sentence


@pytest.mark.parametrize(
    ("flags", "world_size", "sentence"),
    [
        (
            "--rollout-batch-size 5 --n-samples-per-prompt 3",
            2,
            "--global-batch-size is 15 but 2 data-parallel ranks share it; choose a multiple of 2.",
        ),
        (
            "--micro-batch-size 32",
            2,
            "--micro-batch-size is 32 but a rank has 16 samples in a step; choose a divisor of 16.",
        ),
        (
            "--tensor-model-parallel-size 4",
            4,
            "--tensor-model-parallel-size is 4 but the model's num_key_value_heads is 2; choose a divisor of it.",
        ),
        (
            "--pipeline-model-parallel-size 4",
            4,
            "--pipeline-model-parallel-size is 4 but the model's num_hidden_layers is 2; choose a divisor of it.",
        ),
    ],
)
def test_sizes_that_do_not_divide_over_the_ranks(base, flags, world_size, sentence):
    assert refusal(base + flags, world_size) == sentence


def test_parallel_sizes_land_when_the_ranks_are_there(base):
    line = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    got = configured(base + line + "--context-parallel-size 2 --micro-batch-size 16", world_size=16).megatron
    assert got.model_parallel_size == 8
    assert (got.tensor_model_parallel_size, got.sequence_parallel) == (2, True)


def test_missing_required_flag_is_named(base):
    assert refusal("--prompt-data train.jsonl") == "--hf-checkpoint is unset but required; add --hf-checkpoint DIR."


def test_empty_prompt_file_is_refused(base, tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    assert refusal(base) == "--prompt-data is 'train.jsonl' but the file is empty; give one prompt a row."


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            '{"architectures": ["MambaForCausalLM"]}',
            "--hf-checkpoint is 'model' of the architecture MambaForCausalLM but supported are "
            "LlamaForCausalLM, "
            "Qwen2ForCausalLM, Qwen3ForCausalLM; give a checkpoint of one of these.",
        ),
        (
            "[]",
            "--hf-checkpoint is 'model' of the architecture unknown but supported are LlamaForCausalLM, "
            "Qwen2ForCausalLM, Qwen3ForCausalLM; give a checkpoint of one of these.",
        ),
        (
            "{",
            "--hf-checkpoint is 'model' but its config.json is not JSON: Expecting property name enclosed in "
            "double quotes: line 1 column 2 (char 1).",
        ),
    ],
)
def test_unusable_checkpoint_is_refused(base, tmp_path, config, sentence):
    (tmp_path / "model" / "config.json").write_text(config)
    assert refusal(base) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tis_upper: 2.0", "tis_upper in run.yaml is not an option; did you mean tis_upper_bound?"),
        ("custom_config_path: a.yaml", "custom_config_path in run.yaml is not an option; --help lists what there is."),
        ("use_tis: 3", "use_tis in run.yaml is '3' but must be true or false."),
        ("lr: true", "lr in run.yaml is 'true' but must be a number."),
        ("lr: [1, 2]", "lr in run.yaml is ['1', '2'] but must be a number."),
        ("seed: 1.5", "seed in run.yaml is '1.5' but must be a whole number."),
        (
            "rollout_stop_token_ids: [a]",
            "rollout_stop_token_ids in run.yaml is ['a'] but must be a list, each a whole",
        ),
        (
            "tis_clip: 2\ntis-upper-bound: 3",
            "tis-upper-bound in run.yaml gives tis_upper_bound a second time; leave",
        ),
        ("- lr", "--custom-config-path is 'run.yaml' but it holds no keys; write one `key: value` a line."),
        ("a: [", "--custom-config-path is 'run.yaml' but it is not YAML: while parsing a flow node"),
        (
            "algorithm: {rollout_correction: {rollout_iz: token}}",
            "algorithm.rollout_correction.rollout_iz in run.yaml is not an option; did you mean rollout_is?",
        ),
        (
            "algorithm: {adv_estimator: grpo}",
            "algorithm in run.yaml may only hold a rollout_correction block; give the rest as flags.",
        ),
        ("actor_rollout_ref: {rollout: {n: 8}}", "actor_rollout_ref in run.yaml is not an option; "),
    ],
)
def test_yaml_refusals(base, tmp_path, text, sentence):
    (tmp_path / "run.yaml").write_text(text)
    assert refusal(base + "--custom-config-path run.yaml").startswith(sentence)


def test_refusal_exits_with_code_2_and_the_sentence_alone(base, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(shlex.split(base + "--use-tiss"))
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err == "--use-tiss is not a flag; did you mean --use-tis?\n" and captured.out == ""


def test_truncated_sampling_warns_in_one_sentence(base, capsys):
    parse_args(shlex.split(base))
    assert capsys.readouterr().err == ""
    parse_args(shlex.split(base + "--rollout-top-p 0.9 --use-tis --tis-lower-bound 0.5"))
    assert capsys.readouterr().err == (
        "warning: --rollout-top-p is 0.9, so rollout log-probs are those of the truncated distribution, and "
        "mismatch "
        "figures and weights include the truncation.\n"
        "warning: --tis-lower-bound is 0.5 but --tis-mode truncate has no lower bound; choose clip or mask "
        "for both.\n"
    )


@pytest.mark.parametrize(
    ("flags", "criterion"),
    [
        ("--rollout-correction-preset decoupled_geo_rs", "geometric"),
        ("--use-rs --rs-level geometric --rs-upper-bound 1.001", "geometric"),
        ("--rollout-rs seq_mean_k1 --rollout-rs-threshold 0.999_1.001", "seq_mean_k1"),
        ("--use-rs --rs-level geometric --rs-upper-bound 1.01", None),
        ("--rollout-correction-preset decoupled_geo_rs --rs-z-score 3", None),
        ("--rollout-rs seq_mean_k3 --rollout-rs-threshold 0.001", None),
    ],
)
def test_geometric_bounds_that_no_precision_fits_are_warned_about(base, capsys, flags, criterion):
    parse_args(shlex.split(base + flags))
    lower = "0.999" if criterion else ""
    assert capsys.readouterr().err == (
        f"warning: the bounds {lower} to 1.001 of {criterion} on the mean log-ratio are within ±1 %, which already "
        "rejects 25 % of healthy sequences of 26 tokens in bf16 and 94 % in fp8 (docs/choosing.md); use --use-rs "
        "--rs-level geometric --rs-z-score 3 in place of the bounds.\n"
        if criterion
        else ""
    )


def test_help_is_grouped_and_every_option_has_a_sentence_and_a_default():
    text = build_parser().format_help()
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["options", *GROUPS]
    assert sorted(" ".join(GROUPS.values()).split()) == sorted(OPTIONS)
    unwrapped = "".join(text.split())
    for option in OPTIONS.values():
        assert option.help.endswith(".")
        assert "".join(f"{option.help}({option.default_text})".split()) in unwrapped


def test_accepted_architectures_are_those_the_training_engine_builds():
    assert set(ARCHITECTURES) == set(FAMILIES)


def test_importing_arguments_loads_no_engine():
    code = "import sys, arguments; print([m for m in ('transformers', 'megatron') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
