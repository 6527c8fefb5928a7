"""The command line: every flag lands in its field, sources have their order, refusals are one sentence."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from slime_tis.cli import arguments
from slime_tis.cli.arguments import (
    ALIASES,
    COMMAND_LINE,
    GROUPS,
    NEEDS,
    OPTIONS,
    Arguments,
    build_parser,
    configure,
    describe,
    effective_config,
    options_in_force,
    parse_args,
)
from slime_tis.cli.command_line import help_notes
from slime_tis.correction.presets import PRESETS
from slime_tis.hf_directory import ARCHITECTURES
from slime_tis.megatron.architecture import FAMILIES
from tests.checkpoints import make_checkpoint


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
        "vocab_size": 16,
    }
    for directory in ("model", "reference"):
        Path(directory).mkdir()
        Path(directory, "config.json").write_text(json.dumps(model))
    Path("d").mkdir()
    for name in ("train.jsonl", "eval.jsonl", "hard.jsonl", "d/0.pt"):
        Path(name).write_text('{"input": "21>", "label": "12"}\n')
    return (
        "--hf-checkpoint model --prompt-data train.jsonl --rollout-batch-size 4 --n-samples-per-prompt 8 "
        "--rollout-max-response-len 12 --num-rollout 3 --rm-type exact_match "
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", max_position_embeddings=64)


@pytest.fixture
def whole(base, checkpoint):
    """`base` with weights in its checkpoint, at which `parse_args` looks too."""
    shutil.copytree(checkpoint, "model", dirs_exist_ok=True)
    return base


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
    ("--use-tis --tis-mode mask", "correction", "tis_mode", "mask"),
    ("--use-tis --tis-mode clip", "correction", "tis_mode", "clip"),
    ("--use-tis --tis-level sequence", "correction", "tis_level", "sequence"),
    ("--use-tis --tis-level geometric", "correction", "tis_level", "geometric"),
    ("--use-tis --tis-lower-bound 0.25", "correction", "tis_lower_bound", 0.25),
    ("--use-tis --tis-upper-bound 1e1", "correction", "tis_upper_bound", 10.0),
    ("--use-tis --tis-batch-normalize", "correction", "tis_batch_normalize", True),
    ("--use-rs", "correction", "use_rs", True),
    ("--use-rs --rs-level geometric", "correction", "rs_level", "geometric"),
    ("--use-rs --rs-lower-bound 0.999", "correction", "rs_lower_bound", 0.999),
    ("--use-rs --rs-upper-bound 1.001", "correction", "rs_upper_bound", 1.001),
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
    ("--use-rs --rejection-normalizer original", "correction", "rejection_normalizer", "original"),
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
    ("--use-opsm --opsm-delta 1e-3", "policy", "opsm_delta", 1e-3),
    ("--use-opsm --opsm-policy old --num-steps-per-rollout 2", "policy", "opsm_policy", "old"),
    ("--use-rs --reject-before-advantage", "policy", "reject_before_advantage", True),
    ("--use-kl-loss --kl-loss-coef 0.01", "policy", "kl_loss_coef", 0.01),
    ("--use-kl-loss", "policy", "use_kl_loss", True),
    ("--use-kl-loss --kl-loss-type low_var_kl", "policy", "kl_loss_type", "low_var_kl"),
    ("--entropy-coef 1e-3", "policy", "entropy_coef", 1e-3),
    ("--calculate-per-token-loss", "policy", "calculate_per_token_loss", True),
    ("--use-kl-loss --ref-load reference", "megatron", "ref_load", "reference"),
    ("--load ckpt --save ckpt", "megatron", "load", "ckpt"),
    ("--save ckpt --save-interval 5", "megatron", "save_interval", 5),
    ("--save ckpt --save-retain-count 7", "megatron", "save_retain", 7),
    ("--save-hf out", "megatron", "save_hf", "out"),
    ("--use-distributed-optimizer", "megatron", "use_distributed_optimizer", True),
    ("--micro-batch-size 16", "megatron", "micro_batch_size", 16),
    ("--use-dynamic-batch-size --max-tokens-per-gpu 512", "megatron", "max_tokens_per_gpu", 512),
    ("--log-probs-chunk-size 128", "megatron", "log_probs_chunk_size", 128),
    ("--lr 1e-4", "megatron", "lr", 1e-4),
    ("--lr-decay-style linear --lr 1e-4 --min-lr 1e-5", "megatron", "min_lr", 1e-5),
    ("--num-rollout 11 --lr-warmup-iters 10", "megatron", "lr_warmup_iters", 10),
    ("--lr-decay-style cosine --lr-decay-iters 90", "megatron", "lr_decay_iters", 90),
    ("--weight-decay 0.1", "megatron", "weight_decay", 0.1),
    ("--adam-beta1 0.8", "megatron", "adam_beta1", 0.8),
    ("--adam-beta2 0.95", "megatron", "adam_beta2", 0.95),
    ("--adam-eps 1e-6", "megatron", "adam_eps", 1e-6),
    ("--clip-grad 0.5", "megatron", "clip_grad", 0.5),
    ("--nonfinite-gradient skip", "megatron", "nonfinite_gradient", "skip"),
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
    ("--check-weight-sync --weight-sync-bound 1e-3", "rollout", "weight_sync_bound", 1e-3),
    ("--eval-prompt-data eval.jsonl --eval-engine rollout", "rollout", "evaluates_locally", False),
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
    ("--eval-prompt-data eval.jsonl --n-samples-per-eval-prompt 4", "rollout", "n_samples_per_eval_prompt", 4),
    ("--eval-prompt-data eval.jsonl --eval-temperature 0.6", "rollout", "eval_temperature", 0.6),
    ("--eval-prompt-data eval.jsonl --eval-temperature 1 --eval-top-p 0.7", "rollout", "eval_top_p", 0.7),
    ("--eval-prompt-data eval.jsonl --eval-top-p 1", "rollout", "eval_temperature", 0.0),
    ("--eval-prompt-data eval.jsonl --eval-max-response-len 20", "rollout", "eval_max_response_len", 20),
    ("--eval-prompt-data eval.jsonl --eval-input-key q", "rollout", "eval_input_key", "q"),
    ("--eval-prompt-data eval.jsonl --eval-label-key a", "rollout", "eval_label_key", "a"),
    ("--eval-prompt-data eval.jsonl --skip-eval-before-train", "rollout", "skip_eval_before_train", True),
    ("--num-rollout none --num-epoch 2", "loop", "num_epoch", 2),
    ("", "loop", "global_batch_size", 32),
    ("", "loop", "num_steps_per_rollout", 1),
    ("--global-batch-size 16", "loop", "num_steps_per_rollout", 2),
    ("--num-steps-per-rollout 4", "loop", "global_batch_size", 8),
    ("--debug-rollout-only", "loop", "debug_rollout_only", True),
    ("--save-debug-rollout-data d/{rollout_id}.pt", "loop", "save_debug_rollout_data", "d/{rollout_id}.pt"),
    ("--load-debug-rollout-data d/{rollout_id}.pt", "loop", "load_debug_rollout_data", "d/{rollout_id}.pt"),
    ("--output-dir runs/a", "reporting", "output_dir", "runs/a"),
    ("--no-progress", "reporting", "progress", False),
    ("--no-summary-plot", "reporting", "summary_plot", False),
    ("--use-tensorboard", "reporting", "use_tensorboard", True),
    ("--use-tensorboard --tb-project-name p", "reporting", "tb_project_name", "p"),
    ("--use-tensorboard --tb-experiment-name e", "reporting", "tb_experiment_name", "e"),
]


@pytest.mark.parametrize(("flags", "room", "field", "value"), LANDINGS, ids=[row[0] or "none" for row in LANDINGS])
def test_flag_lands_in_its_field(base, flags, room, field, value):
    got = getattr(getattr(configured(base + flags), room), field)
    assert got == value and type(got) is type(value)


def test_flags_of_weights_and_biases_land_where_it_is_installed(base, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)
    line = "--use-wandb --wandb-project p --wandb-group g --wandb-mode offline --wandb-dir w"
    got = configured(base + line).reporting
    assert (got.wandb_project, got.wandb_group, got.wandb_mode, got.wandb_dir) == ("p", "g", "offline", "w")


def test_every_option_is_landed_or_named_here(base):
    elsewhere = """
        hf_checkpoint prompt_data rollout_batch_size n_samples_per_prompt rollout_max_response_len
        custom_config_path custom_tis_function_path
        use_wandb wandb_project wandb_group wandb_mode wandb_dir
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
        (
            "--sglang-url http://a:1",
            "--sglang-url is ('http://a:1',) but has no effect without --rollout-engine sglang",
        ),
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
            "--rollout-precision is 'fp8' but has no effect without --rollout-engine local",
        ),
        ("--rollout-engine sglang --sglang-launch 1 --sglang-port 1", "--sglang-base-port"),
        ("--rollout-engine sglang --sglang-ulr http://a:1", "did you mean --sglang-url?"),
        ("--rollout-engine sglang --sglang-url http://a:1 --rollout-top-p 0.9", "could not use the same distribution"),
        ("--partial-rollout --over-sampling-batch-size 6", "--rollout-engine sglang"),
        ("--over-sampling-batch-size 6", "has no effect without --partial-rollout"),
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
    base += "--use-tis --save ckpt "
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
    other = configured(
        base + "--custom-config-path run.yaml --rollout-correction-preset decoupled_token_is --no-use-rs"
    )
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
        {"use_tis": False, "use_rollout_logprobs": True, "policy_loss": "ppo", "get_mismatch_metrics": False},
    ),
    (
        "rollout_is: sequence\nbypass_mode: true\nrollout_rs: seq_mean_k1\nrollout_rs_threshold: 0.5_2.0\n"
        "loss_type: ppo_clip",
        {"use_tis": False, "use_rs": False, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"},
    ),
    (
        "rollout_is: token\nrollout_is_threshold: 0.5_5.0",
        {
            "use_tis": True,
            "tis_mode": "mask",
            "tis_lower_bound": 0.5,
            "tis_upper_bound": 5.0,
            "rejection_normalizer": "original",
        },
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


@pytest.mark.parametrize("on", ["true", "True", "TRUE", "yes", "on", "On"])
@pytest.mark.parametrize("off", ["false", "False", "no", "off", "OFF"])
def test_switches_read_alike_in_verls_block(base, tmp_path, on, off):
    (tmp_path / "verl.yaml").write_text(
        f"algorithm: {{rollout_correction: {{rollout_is: token, rollout_is_batch_normalize: {off}, bypass_mode: {on}, "
        f"use_policy_gradient: {on}}}}}\nactor_rollout_ref: {{rollout: {{calculate_log_probs: {on}}}}}\n"
        f"use_kl_loss: {on}\ncalculate_per_token_loss: {off}\n"
    )
    got = configured(base + "--custom-config-path verl.yaml")
    correction, policy = got.correction, got.policy
    assert (correction.use_tis, correction.use_rollout_logprobs, correction.policy_loss) == (True, True, "reinforce")
    assert (policy.use_kl_loss, policy.calculate_per_token_loss) == (True, False)


def test_hydra_overrides_are_read_as_verls_block_is(base, tmp_path):
    block = "algorithm.rollout_correction."
    words = (
        f"{block}bypass_mode=True {block}rollout_is=token {block}rollout_rs=sequence +{block}rollout_rs_threshold=3.0"
    )
    got = configured(f"{words} {base} actor_rollout_ref.rollout.calculate_log_probs=True --eval-prompt-data eval.jsonl")
    assert got.correction == arguments.RolloutCorrectionConfig(
        use_rollout_logprobs=True, use_rs=True, rs_level="sequence", rs_upper_bound=3.0
    )
    (tmp_path / "verl.yaml").write_text("algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 3}}")
    got = configured(base + f"--custom-config-path verl.yaml {block}bypass_mode=True").correction
    assert (got.use_tis, got.use_rollout_logprobs, got.tis_upper_bound) == (
        False,
        True,
        3.0,
    )  # one block, translated once


@pytest.mark.parametrize("name", ["ppo_is_bypass", "decoupled_token_icepop"])
def test_verls_yaml_of_a_preset_is_the_preset(base, tmp_path, name):
    block = {
        "ppo_is_bypass": "rollout_is: token, rollout_is_threshold: 2.0, bypass_mode: True, use_policy_gradient: False",
        "decoupled_token_icepop": "rollout_is: token, rollout_is_threshold: 0.5_5.0",
    }[name]
    (tmp_path / "verl.yaml").write_text(f"algorithm: {{rollout_correction: {{{block}}}}}\n")
    by_yaml = configured(base + "--custom-config-path verl.yaml")
    assert by_yaml == configured(base + f"--rollout-correction-preset {name}")


SLIME_PURE_IS = """
use_tis: true
use_rs: false
tis_level: "sequence"
tis_mode: "truncate"
tis_lower_bound: null  # 1.0 / tis_upper_bound
tis_upper_bound: 2.0
rs_level: null
rs_lower_bound: null
rs_upper_bound: null
rs_veto_threshold: null
tis_batch_normalize: true
"""
SLIME_GEO_RS = """
use_tis: false
use_rs: true
tis_level: "token"
tis_mode: "truncate"
tis_lower_bound: null
tis_upper_bound: 2.0
rs_level: "geometric"
rs_lower_bound: 0.9999
rs_upper_bound: 1.0001
rs_veto_threshold: 1.0e-4
tis_batch_normalize: false
"""


def test_slimes_own_files_are_accepted(base, tmp_path):
    (tmp_path / "slime.yaml").write_text(SLIME_PURE_IS)
    got = configured(base + "--custom-config-path slime.yaml").correction
    assert got == arguments.RolloutCorrectionConfig(use_tis=True, tis_level="sequence", tis_batch_normalize=True)
    (tmp_path / "slime.yaml").write_text(SLIME_GEO_RS)
    got = configured(base + "--custom-config-path slime.yaml").correction
    assert got == arguments.RolloutCorrectionConfig(
        use_rs=True, rs_level="geometric", rs_lower_bound=0.9999, rs_upper_bound=1.0001, rs_veto_threshold=1e-4
    )


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


def test_options_in_force_are_all_but_those_that_lack_what_they_need(base):
    sources = {"use_rollout_correction", "rollout_correction_preset", "custom_config_path"}
    idle = {name for names in NEEDS for name in names.split()}
    in_force = {"rollout_precision", "eps_clip", "eps_clip_high", "eps_clip_c", "disable_grpo_std_normalization"}
    found = configured(base)
    assert set(effective_config(found)) == set(OPTIONS) - sources
    assert set(options_in_force(found)) == set(OPTIONS) - sources - (idle - in_force)


def test_description_has_what_departs_from_the_defaults(base):
    assert describe(configured(base + "--use-tis --tis-clip 3 --rollout-stop-token-ids 2 5 --weight-decay 0.01")) == (
        "model and data: --hf-checkpoint model --prompt-data train.jsonl\n"
        "rollout: --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 12\n"
        "sampling: --rollout-stop-token-ids 2 5\n"
        "rewards: --rm-type exact_match\n"
        "training loop: --num-rollout 3 --num-steps-per-rollout 1 --global-batch-size 32\n"
        "rollout correction: --use-tis --tis-upper-bound 3.0\n"
        "parallelism and precision: --no-bf16 (trains in float32)"
    )
    assert describe(configured(base + "--bf16 --output-dir 'a b'")).splitlines()[-2:] == [
        "parallelism and precision: --bf16",
        "reporting: --output-dir 'a b'",
    ]


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
    assert configured(base + "--use-tis --tis-lower-bound 0.5").namespace.tis_clip_low == 0.5
    assert args.opsm_delta == 0.1


def test_namespace_has_the_bounds_that_nobody_set(base):
    def bounds(flags):
        args = configured(base + flags).namespace
        return args.tis_lower_bound, args.rs_lower_bound, args.rs_upper_bound

    assert bounds("--use-tis --use-rs --rs-level geometric --rs-upper-bound 1.25") == (0.5, 0.8, 1.25)
    assert bounds("--use-tis --tis-upper-bound 4 --use-rs") == (0.25, 0.25, 4.0)
    assert bounds("--use-tis --use-rs --rs-lower-bound 0.9") == (0.5, 0.9, 2.0)
    assert bounds("--use-tis --tis-upper-bound 0.8")[0] is None  # mode truncate, which has no lower bound


IDLE = [
    ("--rs-upper-bound 1.1", "--rs-upper-bound is 1.1 but has no effect without --use-rs; add it"),
    ("--rs-lower-bound 0.9", "--rs-lower-bound is 0.9 but has no effect without --use-rs; add it"),
    ("--rs-level token", "--rs-level is 'token' but has no effect without --use-rs; add it"),
    ("--tis-mode truncate", "--tis-mode is 'truncate' but has no effect without --use-tis; add it"),
    ("--tis-level sequence", "--tis-level is 'sequence' but has no effect without --use-tis; add it"),
    ("--mis-level sequence", "--tis-level is 'sequence' but has no effect without --use-tis; add it"),
    ("--tis-batch-normalize", "--tis-batch-normalize is set but has no effect without --use-tis; add it"),
    (
        "--tis-upper-bound 2",
        "--tis-upper-bound is 2.0 but has no effect without --use-tis or --use-rs; add one of them",
    ),
    (
        "--tis-lower-bound 1",
        "--tis-lower-bound is 1.0 but has no effect without --use-tis or --use-rs; add one of them",
    ),
    ("--rollout-rs-threshold 2", "--rollout-rs-threshold is '2' but has no effect without --rollout-rs; add it"),
    (
        "--rejection-normalizer original",
        "--rejection-normalizer is 'original' but has no effect without --use-rs, --rollout-rs, --rs-veto-threshold, "
        "--rs-veto-upper-threshold, --rs-second-moment-bound or --tis-mode mask; add one of them",
    ),
    (
        "--use-tis --reject-before-advantage",
        "--reject-before-advantage is set but has no effect without --use-rs, --rollout-rs, --rs-veto-threshold, "
        "--rs-veto-upper-threshold, --rs-second-moment-bound or --tis-mode mask; add one of them",
    ),
    ("--kl-loss-type k2", "--kl-loss-type is 'k2' but has no effect without --use-kl-loss; add it"),
    ("--kl-loss-coef 0", "--kl-loss-coef is 0.0 but has no effect without --use-kl-loss; add it"),
    ("--ref-load reference", "--ref-load is 'reference' but has no effect without --use-kl-loss; add it"),
    ("--opsm-delta 1e-4", "--opsm-delta is 0.0001 but has no effect without --use-opsm; add it"),
    (
        "--advantage-estimator rloo --disable-grpo-std-normalization",
        "--disable-grpo-std-normalization is set but has no effect without --advantage-estimator grpo; add it",
    ),
    ("--policy-loss cispo --eps-clip-c 3", "--eps-clip-c is 3.0 but has no effect without --policy-loss ppo; add it"),
    (
        "--use-rollout-logprobs --policy-loss reinforce --eps-clip 0.2",
        "--eps-clip is 0.2 but has no effect without --policy-loss ppo, --policy-loss cispo or --policy-loss gspo; add "
        "one of them",
    ),
    (
        "--lr-decay-style constant --lr-decay-iters 9",
        "--lr-decay-iters is 9 but has no effect without --lr-decay-style linear or --lr-decay-style cosine; add one "
        "of them",
    ),
    (
        "--min-lr 0",
        "--min-lr is 0.0 but has no effect without --lr-decay-style linear or --lr-decay-style cosine; add one of them",
    ),
    (
        "--recompute-method uniform",
        "--recompute-method is 'uniform' but has no effect without --recompute-granularity full; add it",
    ),
    (
        "--recompute-num-layers 1",
        "--recompute-num-layers is 1 but has no effect without --recompute-granularity full; add it",
    ),
    ("--weight-sync-bound 1", "--weight-sync-bound is 1.0 but has no effect without --check-weight-sync; add it"),
    ("--save-interval 2", "--save-interval is 2 but has no effect without --save; add it"),
    ("--save-retain 2", "--save-retain is 2 but has no effect without --save; add it"),
    ("--eval-interval 2", "--eval-interval is 2 but has no effect without --eval-prompt-data; add it"),
    ("--eval-temperature 1", "--eval-temperature is 1.0 but has no effect without --eval-prompt-data; add it"),
    (
        "--eval-temperature 1 --eval-top-p 1",
        "--eval-temperature is 1.0 but has no effect without --eval-prompt-data; add it",
    ),
    (
        "--eval-top-p 1",
        "--eval-top-p is 1.0 but has no effect without --eval-prompt-data; add it",
    ),
    (
        "--skip-eval-before-train",
        "--skip-eval-before-train is set but has no effect without --eval-prompt-data; add it",
    ),
    ("--tb-project-name p", "--tb-project-name is 'p' but has no effect without --use-tensorboard; add it"),
    ("--wandb-project p", "--wandb-project is 'p' but has no effect without --use-wandb; add it"),
    ("--wandb-mode offline", "--wandb-mode is 'offline' but has no effect without --use-wandb; add it"),
    ("--sglang-launch 1", "--sglang-launch is 1 but has no effect without --rollout-engine sglang; add it"),
    (
        "--sglang-sync-address a",
        "--sglang-sync-address is 'a' but has no effect without --rollout-engine sglang; add it",
    ),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --sglang-python p",
        "--sglang-python is 'p' but has no effect without --sglang-launch; add it",
    ),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --sglang-weight-dir w",
        "--sglang-weight-dir is 'w' but has no effect without --sglang-weight-sync disk; add it",
    ),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --rollout-precision fp8",
        "--rollout-precision is 'fp8' but has no effect without --rollout-engine local; add it",
    ),
]


@pytest.mark.parametrize(("flags", "message"), IDLE, ids=[row[0] for row in IDLE])
def test_an_option_without_effect_is_refused_on_the_command_line_and_in_yaml(base, tmp_path, flags, message):
    option = message.split()[0]
    assert refusal(base + flags) == f"{message} or leave {option} out."
    values = {}
    for word in shlex.split(flags):
        if word.startswith("--"):
            key = word[2:].replace("-", "_")
            values[key] = "true"
        else:
            values[key] = word
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    name = option[2:].replace("-", "_")
    found = refusal(base + "--custom-config-path run.yaml")
    if "mis_level" not in values:
        assert found == f"{name} in run.yaml {message.removeprefix(option).strip()} or leave {name} out."


def test_every_option_that_needs_another_is_refused_alone():
    tried = {row[1].split()[0][2:].replace("-", "_") for row in IDLE}
    alike = """over_sampling_batch_size max_tokens_per_gpu eval_input_key eval_label_key n_samples_per_eval_prompt
        eval_max_response_len eval_engine tb_experiment_name wandb_group wandb_dir eps_clip_high sglang_url
        sglang_router_ip sglang_router_port sglang_startup_timeout sglang_request_timeout sglang_concurrency
        sglang_max_retries sglang_recovery_timeout sglang_weight_sync sglang_bucket_mb sglang_api_key_env
        sglang_server_args sglang_base_port sglang_log_dir rs_z_score rs_target_fraction opsm_policy eval_reward_key
        sglang_admin_api_key_env"""
    assert {name for names in NEEDS for name in names.split()} == tried | set(alike.split())


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
    ids=[
        "off beside it",
        "null beside it",
        "off over YAML",
        "another value over YAML",
        "none over YAML",
        "null",
        "preset",
    ],
)
def test_options_of_what_is_switched_off_in_so_many_words_are_passed_over(base, tmp_path, yaml_text, flags):
    (tmp_path / "run.yaml").write_text(yaml_text)
    assert configured(base + "--custom-config-path run.yaml " + flags) == configured(base)


def test_a_custom_function_may_read_any_option(base):
    line = "--get-mismatch-metrics --custom-tis-function-path custom_tis.tis.vanilla_tis --tis-upper-bound 3"
    assert configured(base + line).namespace.tis_upper_bound == 3.0


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
    ("--use-tis --tis-upper-bound 0", "--tis-upper-bound is 0.0 but must be above 0 and finite."),
    ("--tis-upper-bound abc", "--tis-upper-bound is 'abc' but must be a number, above 0 and finite."),
    ("--tis-upper-bound nan", "--tis-upper-bound is 'nan' but must be a number, above 0 and finite."),
    ("--lr 0.5_2", "--lr is '0.5_2' but must be a number, 0 to 1."),
    ("--num-rollout 1.5", "--num-rollout is '1.5' but must be a whole number, 1 to 10000000."),
    ("--lr", "--lr expected one argument."),
    ("--use-tiss", "--use-tiss is not a flag; did you mean --use-tis?"),
    ("--zzz", "--zzz is not a flag; --help lists what there is."),
    (
        "--rollout-correction-preset decoupled_token",
        "--rollout-correction-preset is 'decoupled_token'; did you mean decoupled_token_is?",
    ),
    ("--kl-loss-type k4", "--kl-loss-type is 'k4' but must be one of k1, k2, k3, low_var_kl."),
    (
        "--kl-loss-coef 0.1",
        "--kl-loss-coef is 0.1 but has no effect without --use-kl-loss; add it or leave --kl-loss-coef out.",
    ),
    ("--eps-clip 1.5", "--eps-clip is 1.5 but must be above 0 and below 1; 0.2 is customary."),
    (
        "--eps-clip-high -1",
        "--eps-clip-high is -1.0 but must be above 0 and at most 1000000, or inf; leave it out for --eps-clip.",
    ),
    ("--eps-clip-c 0.5", "--eps-clip-c is 0.5 but must be above 1 and at most 1000000; leave it out for no dual clip."),
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
        "--max-tokens-per-gpu is 64 but has no effect without --use-dynamic-batch-size; add it or leave "
        "--max-tokens-per-gpu out.",
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
    ("--micro-batch-size 0", "--micro-batch-size is 0 but must be 1 to 1000000."),
    ("--rollout-batch-size 0", "--rollout-batch-size is 0 but must be 1 to 65536."),
    (
        "--log-probs-chunk-size 0",
        "--log-probs-chunk-size is 0 but must be 1 to 100000000, or -1.",
    ),
    ("--adam-beta2 1", "--adam-beta2 is 1.0 but must be at least 0 and below 1."),
    ("--lr-decay-style linear --min-lr 1", "--min-lr is 1.0 but must not exceed --lr, which is 1e-06."),
    (
        "--save-interval 2",
        "--save-interval is 2 but has no effect without --save; add it or leave --save-interval out.",
    ),
    (
        "--recompute-granularity full",
        "--recompute-granularity is 'full' but --recompute-method or --recompute-num-layers is unset; add "
        "both, for "
        "example --recompute-method uniform --recompute-num-layers 1.",
    ),
    (
        "--rollout-temperature 0",
        "--rollout-temperature is 0.0 but must be 0.01 to 100; greedy samples of a group are all alike and teach "
        "nothing.",
    ),
    ("--rollout-top-p 0", "--rollout-top-p is 0.0 but must be above 0 and at most 1."),
    ("--rollout-top-k 0", "--rollout-top-k is 0 but must be 1 to 10000000, or -1."),
    (
        "--eval-interval 5",
        "--eval-interval is 5 but has no effect without --eval-prompt-data; add it or leave --eval-interval out.",
    ),
    (
        "--eval-prompt-data a eval.jsonl b",
        "--eval-prompt-data is 'a eval.jsonl b', 3 values, but needs one PATH or NAME PATH pairs.",
    ),
    (
        "--eval-prompt-data a eval.jsonl a hard.jsonl",
        "--eval-prompt-data names a, a but each name may be given only once.",
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
        "--use-kl-loss --ref-load gone",
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
    ("--save ''", "--save is empty but must be text; write none to unset it."),
    ("--load ' '", "--load is empty but must be text; write none to unset it."),
    ("--custom-tis-function-path ''", "--custom-tis-function-path is empty but must be text; write none to unset it."),
    ("--eval-prompt-data a ''", "--eval-prompt-data is empty but must be a list, each text; write none to unset it."),
    ("--hf-checkpoint none", "--hf-checkpoint is unset but must be text."),
    ("--save a\x1bb", "--save is 'a\\x1bb' but must be text without control characters and in UTF-8."),
    ("--output-dir \udc80", "--output-dir is '\\udc80' but must be text without control characters and in UTF-8."),
    (f"--save {'a' * 5000}", f"--save is '{'a' * 59}… (5002 characters) but may have 4096 characters at most."),
    (f"--seed {'9' * 5000}", f"--seed is '{'9' * 59}… (5002 characters) but must be a whole number, 0 to 2147483647."),
    ("--seed 2147483648", "--seed is 2147483648 but must be 0 to 2147483647."),
    ("--rollout-seed -1", "--rollout-seed is -1 but must be 0 to 2147483647."),
    ("--num-threads 100000", "--num-threads is 100000 but must be 1 to 1024."),
    ("--entropy-coef inf", "--entropy-coef is inf but must be -100 to 100."),
    ("--lr 1e308", "--lr is 1e+308 but must be 0 to 1."),
    ("--lr 1e999", "--lr is '1e999' but must be a number, 0 to 1."),
    (
        "--rollout-temperature 1e-300",
        "--rollout-temperature is 1e-300 but must be 0.01 to 100; greedy samples of a "
        "group are all alike and teach nothing.",
    ),
    ("--rollout-batch-size 1000000000", "--rollout-batch-size is 1000000000 but must be 1 to 65536."),
    (
        "--rollout-batch-size 65536 --n-samples-per-prompt 4096",
        "a rollout has 268435456 samples (--rollout-batch-size "
        "65536 × --n-samples-per-prompt 4096), more than the 1048576 that are allowed; lower one of the two.",
    ),
    ("--rollout-stop-token-ids 2 -5", "--rollout-stop-token-ids is -5 but must be 0 to 2147483647."),
    (
        "--rollout-stop-token-ids 2 16",
        "--rollout-stop-token-ids has 16 but the model's vocabulary has 16 tokens, from 0; give the ids of this model.",
    ),
    (
        "--rollout-max-context-len 65",
        "--rollout-max-context-len is 65 but the model's context has 64 tokens; choose at most that.",
    ),
    (
        "--rollout-max-prompt-len 64",
        "--rollout-max-prompt-len is 64 but the model's context of 64 tokens holds the "
        "response too; choose fewer tokens.",
    ),
    (
        "--rollout-max-context-len 8 --rollout-max-prompt-len 8",
        "--rollout-max-prompt-len is 8 but the "
        "--rollout-max-context-len of 8 tokens holds the response too; choose fewer tokens.",
    ),
    (
        "--eval-prompt-data eval.jsonl --eval-max-response-len 64",
        "--eval-max-response-len is 64 but the model's context of 64 tokens holds the prompt too; choose fewer tokens.",
    ),
    (
        "--eval-prompt-data eval.jsonl --eval-top-p 0.9",
        "--eval-top-p is 0.9 but --eval-temperature is 0, which takes the likeliest token; raise the temperature or "
        "leave --eval-top-p out.",
    ),
    (
        "--lr-warmup-iters 3000",
        "--lr-warmup-iters is 3000 but the run has 3 optimizer steps, so that the learning rate would stay below "
        "--lr / 1000; lower it.",
    ),
    ("--num-epoch 2", "--num-rollout is 3 and --num-epoch is 2, but a run has one length; leave one of the two out."),
    (
        "--use-tis --tis-clip 2 --tis-upper-bound 3",
        "--tis-clip and --tis-upper-bound are one option; leave one of the two out.",
    ),
    ("--use-tis=maybe", "--use-tis is 'maybe' but must be true or false."),
    ("--no-use-tis=true", "--no-use-tis takes no value."),
    (
        "--rollout-rs geometric",
        "--rollout-rs names 'geometric', which is a level; write --use-rs --rs-level geometric with --rs-upper-bound.",
    ),
    (
        "--rollout-rs ,",
        "--rollout-rs is ',', which names no criterion; choose from token_k1, token_k2, token_k3, "
        "seq_sum_k1, seq_sum_k2, seq_sum_k3, seq_mean_k1, seq_mean_k2, seq_mean_k3, seq_max_k2, seq_max_k3.",
    ),
    (
        "--save-debug-rollout-data d/{foo}.pt",
        "--save-debug-rollout-data is 'd/{foo}.pt' but may have no field besides "
        "{rollout_id}; write other braces twice.",
    ),
    (
        "--save-debug-rollout-data d/{}.pt",
        "--save-debug-rollout-data is 'd/{}.pt' but may have no field besides {rollout_id}; write other braces twice.",
    ),
    (
        "--save-debug-rollout-data d/{rollout_id:9999999}",
        "--save-debug-rollout-data is 'd/{rollout_id:9999999}' but may "
        "have no field besides {rollout_id}; write other braces twice.",
    ),
    (
        "--save-debug-rollout-data d/all.pt",
        "--save-debug-rollout-data is 'd/all.pt', one file for all rollouts; put "
        "{rollout_id} into it, or each would overwrite the last.",
    ),
    (
        "--load-debug-rollout-data d/{",
        "--load-debug-rollout-data is 'd/{' but may have no field besides {rollout_id}; write other braces twice.",
    ),
    (
        "--load-debug-rollout-data e/{rollout_id}.pt",
        "--load-debug-rollout-data is 'e/{rollout_id}.pt' but there is no "
        "file 'e/0.pt'; --save-debug-rollout-data writes it.",
    ),
    (
        "algorithm.rollout_correction.rollout_iz=token",
        "algorithm.rollout_correction.rollout_iz is not an option; did you mean rollout_is?",
    ),
    (
        "data.train_batch_size=4",
        "data.train_batch_size=4 is an override of Hydra, of which only "
        "algorithm.rollout_correction.KEY=VALUE is read; give it as a flag.",
    ),
    (
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        "actor_rollout_ref.rollout.calculate_log_probs is 'false' "
        "but rollouts here always have log-probs; make it true or leave it out.",
    ),
    (
        "--use-tis algorithm.rollout_correction.rollout_is=null",
        "--use-tis and algorithm.rollout_correction.rollout_is are one option; leave one of the two out.",
    ),
    ("--wandb-mode loud", "--wandb-mode is 'loud' but must be one of online, offline, disabled."),
]


@pytest.mark.parametrize(("flags", "sentence"), REFUSALS, ids=[ascii(row[0][:60]) for row in REFUSALS])
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
            "--hf-checkpoint is 'model' but its config.json is JSON of type list and must be an object.",
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
        ("lr: true", "lr in run.yaml is 'true' but must be a number, 0 to 1."),
        ("lr: [1, 2]", "lr in run.yaml is ['1', '2'] but must be a number, 0 to 1."),
        ("seed: 1.5", "seed in run.yaml is '1.5' but must be a whole number, 0 to 2147483647."),
        (
            "rollout_stop_token_ids: [a]",
            "rollout_stop_token_ids in run.yaml is ['a'] but must be a list, each a whole",
        ),
        (
            "tis_clip: 2\ntis-upper-bound: 3",
            "tis-upper-bound in run.yaml gives tis_upper_bound a second time, besides tis_clip in run.yaml",
        ),
        (
            "use_tis: true\nlr: 1e-5\nuse_tis: false",
            "run.yaml, line 3: 'use_tis' is given a second time, after line 1; leave one of the two out.",
        ),
        (
            "algorithm:\n  rollout_correction: {rollout_is: token, rollout_is: null}",
            "run.yaml, line 2: 'rollout_is' is given a second time, after line 2; leave one of the two out.",
        ),
        (
            "a: &x [1, 2]\nlr: *x",
            "run.yaml, line 2: *x is an alias, which is not read; write the value out.",
        ),
        ("lr: " + "[" * 500, "run.yaml, line 1: more than 8 levels are nested; write one `key: value` per line."),
        ("? [a]\n: 1", "run.yaml, line 1: a key must be a word; write `key: value`."),
        ("#" * 70000, "--custom-config-path is 'run.yaml' but it has 70000 bytes, more than the 65536 that are read; "),
        ("save: ''", "save in run.yaml is empty but must be text; write none to unset it."),
        ("lr: [[1]]", "lr in run.yaml is [['1']] but must be a number, 0 to 1."),
        ("eval_prompt_data: []", "eval_prompt_data in run.yaml is empty but must be a list, each text; write none"),
        ("hf_checkpoint: null", "hf_checkpoint in run.yaml is unset but must be text."),
        (
            "algorithm: {rollout_correction: {rollout_rs: geometric}}",
            "algorithm.rollout_correction.rollout_rs in run.yaml is 'geometric' but rollout_rs_threshold is unset; add "
            "it, as verl requires too.",
        ),
        (
            "algorithm: {rollout_correction: {rollout_is: geometric}}",
            "algorithm.rollout_correction.rollout_is in run.yaml is 'geometric' but must be null, token or sequence; "
            "tis_level outside of verl's block takes more.",
        ),
        (
            "algorithm: {rollout_correction: {bypass_mode: perhaps}}",
            "algorithm.rollout_correction.bypass_mode in run.yaml is 'perhaps' but must be true or false.",
        ),
        (
            "algorithm: {rollout_correction: {bypass_mode: true, use_policy_gradient: true, loss_type: ppo_clip}}",
            "algorithm.rollout_correction.loss_type in run.yaml contradicts "
            "algorithm.rollout_correction.use_policy_gradient in run.yaml; leave one of the two out.",
        ),
        (
            "algorithm: {rollout_correction: {rollout_is_threshold: 2.0}}",
            "algorithm.rollout_correction.rollout_is_threshold in run.yaml is 2.0 but has no effect without --use-tis",
        ),
        (
            "algorithm: {rollout_correction: {rollout_rs: token_k1, rollout_rs_threshold: 2, "
            "rollout_rs_threshold_lower: 0.5}}",
            "algorithm.rollout_correction.rollout_rs_threshold_lower in run.yaml belongs to rollout_rs token,",
        ),
        (
            "algorithm: {rollout_correction: {rollout_is: token}}\nuse_tis: false",
            "use_tis in run.yaml gives use_tis a second time, besides algorithm.rollout_correction.rollout_is",
        ),
        (
            "actor_rollout_ref: {rollout: {calculate_log_probs: False}}",
            "actor_rollout_ref.rollout.calculate_log_probs in run.yaml is 'False' but rollouts here always have "
            "log-probs; make it true or leave it out.",
        ),
        ("- lr", "--custom-config-path is 'run.yaml' but it holds no keys; write one `key: value` per line."),
        ("a: [", "--custom-config-path is 'run.yaml' but it is not YAML: while parsing a flow node"),
        (
            "algorithm: {rollout_correction: {rollout_iz: token}}",
            "algorithm.rollout_correction.rollout_iz in run.yaml is not an option; did you mean rollout_is?",
        ),
        (
            "algorithm: {adv_estimator: grpo}",
            "algorithm.adv_estimator in run.yaml is not read: of verl's options algorithm.rollout_correction.* and "
            "actor_rollout_ref.rollout.calculate_log_probs are; give it as a flag.",
        ),
        ("actor_rollout_ref: {rollout: {n: 8}}", "actor_rollout_ref.rollout.n in run.yaml is not read: of verl's"),
    ],
)
def test_yaml_refusals(base, tmp_path, text, sentence):
    (tmp_path / "run.yaml").write_text(text)
    assert refusal(base + "--custom-config-path run.yaml").startswith(sentence)


def test_a_checkpoint_without_weights_is_refused_with_code_2(base, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(shlex.split(base))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("model has no model.safetensors and no model.safetensors.index.json; only checkpoints in")
    assert error.count("\n") == 1


def test_refusal_exits_with_code_2_and_the_sentence_alone(base, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(shlex.split(base + "--use-tiss"))
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err == "--use-tiss is not a flag; did you mean --use-tis?\n" and captured.out == ""


def test_truncated_sampling_warns_in_one_sentence(whole, capsys):
    parse_args(shlex.split(whole))
    assert capsys.readouterr().err == ""
    parse_args(shlex.split(whole + "--rollout-top-p 0.9 --get-mismatch-metrics --use-tis --tis-lower-bound 0.5"))
    assert capsys.readouterr().err == (
        "warning: --rollout-top-p is 0.9, so rollout log-probs are those of the truncated distribution, and "
        "mismatch "
        "metrics and weights include the truncation.\n"
        "warning: --tis-lower-bound is 0.5 but --tis-mode truncate has no lower bound; choose clip or mask "
        "for both.\n"
        "warning: --get-mismatch-metrics measures alone only where nothing corrects, but --use-tis act on the loss; "
        "leave them out to measure alone.\n"
    )


@pytest.mark.parametrize(("flags", "warns"), [("2", False), ("3", True), ("2999", True)])
def test_a_warm_up_longer_than_the_run_is_warned_about(whole, capsys, flags, warns):
    parse_args(shlex.split(whole + "--lr-warmup-iters " + flags))
    assert capsys.readouterr().err == (
        f"warning: --lr-warmup-iters is {flags} but the run has 3 optimizer steps, so that the learning rate never "
        "reaches --lr.\n"
        if warns
        else ""
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
def test_geometric_bounds_that_no_precision_fits_are_warned_about(whole, capsys, flags, criterion):
    parse_args(shlex.split(whole + flags))
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
        assert "".join(f"{option.help}({'; '.join(help_notes(COMMAND_LINE, option))})".split()) in unwrapped


def test_accepted_architectures_are_those_the_training_engine_builds():
    assert set(ARCHITECTURES) == set(FAMILIES)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--eps-clip-high 0.28", "--eps-clip-high is 0.28"),
        ("--use-tis --eps-clip 0.1 --eps-clip-c 3", "--eps-clip is 0.1 and --eps-clip-c is 3"),
        ("--use-tis --tis-batch-normalize --policy-loss gspo --eps-clip 3e-4", "--eps-clip is 0.0003"),
        ("--use-tis", None),
        ("--eps-clip-high 0.28 --num-steps-per-rollout 2", None),
        ("--eps-clip-high 0.28 --use-rollout-logprobs", None),
        ("--eps-clip-high 0.28 --old-logprobs interpolate", None),
    ],
)
def test_a_clip_range_without_effect_is_warned_about(base, capsys, flags, words):
    make_checkpoint("model", "qwen3")  # parse_args looks at the weights, too
    capsys.readouterr()  # the bar of transformers
    parse_args(shlex.split(base + flags))
    assert capsys.readouterr().err == (
        f"warning: {words}, but with one optimizer step per rollout the policy is its own old policy, all ratios are "
        "1, and nothing is clipped; raise --num-steps-per-rollout, or add --use-rollout-logprobs, which clips the "
        "ratio to the policy that sampled.\n"
        if words
        else ""
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rollout-lookahead 2", "--rollout-lookahead is 2"),
        ("--update-weights-interval 3 --get-mismatch-metrics", "--update-weights-interval is 3"),
        (
            "--rollout-lookahead 1 --update-weights-interval 2",
            "--rollout-lookahead is 1 and --update-weights-interval is 2",
        ),
        ("--update-weights-interval 3 --use-tis", None),
        ("--update-weights-interval 3 --use-rollout-logprobs", None),
        ("--update-weights-interval 3 --old-logprobs interpolate", None),
    ],
)
def test_stale_samples_that_nothing_corrects_are_warned_about(base, capsys, flags, words):
    make_checkpoint("model", "qwen3")  # parse_args looks at the weights, too
    capsys.readouterr()  # the bar of transformers
    parse_args(shlex.split(base + flags))
    assert capsys.readouterr().err == (
        f"warning: {words}, so samples come from older weights than those being trained, and nothing corrects that; "
        "add --use-tis, or --use-rollout-logprobs, whose ratios are to the policy that sampled.\n"
        if words
        else ""
    )
