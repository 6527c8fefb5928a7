"""Every flag reaches its field, under its own and its old names, and slime's functions find it."""

import json

import pytest

from slime_tis.trainer.cli.arguments import effective_config
from slime_tis.trainer.cli.run_options import ALIASES, OPTIONS
from slime_tis.trainer.engines.build import evaluation_sampling, training_sampling
from tests.cli.conftest import configured

SERVER = "--rollout-engine sglang --sglang-url http://a:1 "
LAUNCH = "--rollout-engine sglang --sglang-launch 2 "
# fmt: off
LANDINGS = [
    # flags, config, field, value: every flag of this program and of slime that is taken over
    ("--custom-advantage-function-path a.py:f", "policy", "custom_advantage_function_path", "a.py:f"),
    ("--custom-pg-loss-reducer-function-path a.f", "policy", "custom_pg_loss_reducer_function_path", "a.f"),
    ("--token-pass-path a.f", "policy", "token_pass_path", "a.f"),
    ("--loss-type custom_loss --custom-loss-function-path a.f", "policy", "custom_loss_function_path", "a.f"),
    ("--loss-type policy_loss", "policy", "loss_type", "policy_loss"),
    ("--data-source-path a.py:C", "rollout", "data_source_path", "a.py:C"),
    ("--rollout-function-path a.py:f", "rollout", "rollout_function_path", "a.py:f"),
    ("--dynamic-sampling-filter-path a.py:f", "rollout", "dynamic_sampling_filter_path", "a.py:f"),
    ("--custom-generate-function-path a.py:f", "rollout", "custom_generate_function_path", "a.py:f"),
    (
        "--custom-generate-function-path a.py:f --generate-concurrency 8",
        "rollout",
        "generate_concurrency",
        8,
    ),
    ("--custom-generate-function-path a.py:f --generate-timeout 2.5", "rollout", "generate_timeout", 2.5),
    ("--custom-generate-function-path a.py:f --retokenization keep-mask", "rollout", "retokenization", "keep-mask"),
    (
        "--dynamic-sampling-filter-path a.py:f --dynamic-sampling-max-batches 3",
        "rollout",
        "dynamic_sampling_max_batches",
        3,
    ),
    (
        "--rollout-engine sglang --sglang-url http://127.0.0.1:1 --partial-rollout --over-sampling-batch-size 100 "
        "--buffer-filter-path a.py:f",
        "rollout",
        "buffer_filter_path",
        "a.py:f",
    ),
    ("--rollout-sample-filter-path a.py:f", "rollout", "rollout_sample_filter_path", "a.py:f"),
    ("--rollout-all-samples-process-path a.py:f", "rollout", "rollout_all_samples_process_path", "a.py:f"),
    ("--custom-reward-post-process-path a.py:f", "rollout", "custom_reward_post_process_path", "a.py:f"),
    ("--custom-rollout-log-function-path a.py:f", "rollout", "custom_rollout_log_function_path", "a.py:f"),
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
    ("--use-rollout-correction --use-rs", "correction", "use_tis", True),
    ("--use-rs --rs-lower-bound 0", "correction", "rs_lower_bound", 0.0),
    ("--use-tis --tis-mode clip --tis-clip-low 0", "correction", "tis_lower_bound", 0.0),
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
    ("--use-kl-loss --use-unbiased-kl", "policy", "use_unbiased_kl", True),
    ("--rollout-pull-coef 1e-3", "policy", "rollout_pull_coef", 1e-3),
    ("--policy-loss sapo --sapo-tau-pos 2", "policy", "sapo_tau_pos", 2.0),
    ("--policy-loss sapo --sapo-tau-neg 2", "policy", "sapo_tau_neg", 2.0),
    ("--policy-loss dro --dro-beta 0.2", "policy", "dro_beta", 0.2),
    ("--divergence-mask binary_kl", "correction", "divergence_mask", "binary_kl"),
    ("--divergence-mask binary_tv --divergence-mask-bound 0.1", "correction", "divergence_mask_bound", 0.1),
    (
        "--divergence-mask binary_tv --divergence-mask-bound-negative 0.1",
        "correction",
        "divergence_mask_bound_negative",
        0.1,
    ),
    ("--divergence-mask binary_tv --divergence-mask-direction both", "correction", "divergence_mask_direction", "both"),
    (
        "--divergence-mask binary_kl --divergence-mask-direction both --divergence-mask-level sequence",
        "correction",
        "divergence_mask_level",
        "sequence",
    ),
    (
        "--divergence-mask binary_tv --divergence-mask-anchor old --num-steps-per-rollout 2",
        "correction",
        "divergence_mask_anchor",
        "old",
    ),
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
    ("--share-prompts", "megatron", "share_prompts", True),
    ("--no-share-prompts", "megatron", "share_prompts", False),
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
    (
        "--rollout-precision bf16 --weight-update-rounding stochastic",
        "rollout",
        "weight_update_rounding",
        "stochastic",
    ),
    ("--rollout-lookahead 2", "rollout", "rollout_lookahead", 2),
    ("--max-weight-staleness 4", "rollout", "max_weight_staleness", 4),
    ("--check-weight-sync", "rollout", "check_weight_sync", True),
    ("--check-weight-sync --weight-sync-bound 1e-3", "rollout", "weight_sync_bound", 1e-3),
    ("--eval-prompt-data eval.jsonl --eval-engine rollout", "rollout", "evaluates_locally", False),
    (SERVER + "--partial-rollout --over-sampling-batch-size 6", "rollout", "over_sampling_batch_size", 6),
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
        LAUNCH + "--sglang-tp-size 2 --sglang-disable-x --sglang-dtype=float32",
        "sglang",
        "sglang_server_args",
        ("--tp-size", "2", "--disable-x", "--dtype=float32"),
    ),
    (LAUNCH + "--sglang-python /v/bin/python", "sglang", "sglang_python", "/v/bin/python"),
    (LAUNCH + "--sglang-base-port 31000", "sglang", "sglang_base_port", 31000),
    (LAUNCH + "--sglang-log-dir logs", "sglang", "sglang_log_dir", "logs"),
    (SERVER + "--sglang-startup-timeout 60", "sglang", "sglang_startup_timeout", 60.0),
    (SERVER + "--sglang-request-timeout 90", "sglang", "sglang_request_timeout", 90.0),
    (SERVER + "--sglang-recovery-timeout 5", "sglang", "sglang_recovery_timeout", 5.0),
    (SERVER + "--sglang-concurrency 8", "sglang", "sglang_concurrency", 8),
    (SERVER + "--sglang-max-retries 0", "sglang", "sglang_max_retries", 0),
    (SERVER + "--sglang-weight-sync disk --sglang-weight-dir w", "sglang", "sglang_weight_dir", "w"),
    (SERVER + "--sglang-weight-sync disk", "sglang", "sglang_weight_sync", "disk"),
    (SERVER + "--sglang-sync-address 10.0.0.9", "sglang", "sglang_sync_address", "10.0.0.9"),
    (SERVER + "--sglang-bucket-mb 64", "sglang", "sglang_bucket_mb", 64),
    (SERVER + "--sglang-api-key-env MY_KEY", "sglang", "sglang_api_key_env", "MY_KEY"),
    (SERVER + "--sglang-admin-api-key-env MY_KEY", "sglang", "sglang_admin_api_key_env", "MY_KEY"),
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
    (
        SERVER + "--rollout-top-k 50 --allow-truncation-bias",
        "rollout",
        "allow_truncation_bias",
        True,
    ),
    ("--rollout-stop-token-ids 2 5", "rollout", "rollout_stop_token_ids", (2, 5)),
    ("--rollout-shuffle", "rollout", "rollout_shuffle", True),
    ("--rollout-seed 3", "rollout", "rollout_seed", 3),
    ("--rm-type none --custom-rm-path mine.py:score", "rollout", "custom_rm_path", "mine.py:score"),
    ("--rm-type remote_rm --rm-url http://a:1/", "rollout", "rm_url", "http://a:1/"),
    ("--rm-type remote_rm --rm-url http://a:1/ --rm-timeout 3", "rollout", "rm_timeout", 3.0),
    ("--rm-type remote_rm --rm-url http://a:1/ --rm-max-retries 0", "rollout", "rm_max_retries", 0),
    ("--rm-type remote_rm --rm-url http://a:1/ --rm-concurrency 2", "rollout", "rm_concurrency", 2),
    ("--rm-type dapo --reward-weights acc=1,score=2", "rollout", "reward_weights", "acc=1,score=2"),
    (
        "--eval-prompt-data eval.jsonl --custom-eval-rollout-log-function-path a.py:f",
        "rollout",
        "custom_eval_rollout_log_function_path",
        "a.py:f",
    ),
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
    ("--save-debug-rollout-data d/saved_{rollout_id}.pt", "loop", "save_debug_rollout_data", "d/saved_{rollout_id}.pt"),
    ("--save-debug-train-data d/{rollout_id}_{rank}.pt", "loop", "save_debug_train_data", "d/{rollout_id}_{rank}.pt"),
    ("--dump-details d", "loop", "save_debug_train_data", "d/train_data/{rollout_id}_{rank}.parquet"),
    ("--dump-details d", "loop", "save_debug_rollout_data", "d/rollout_data/{rollout_id}.jsonl"),
    ("--load-debug-rollout-data d/{rollout_id}.pt", "loop", "load_debug_rollout_data", "d/{rollout_id}.pt"),
    ("--output-dir runs/a", "reporting", "output_dir", "runs/a"),
    ("--no-progress", "reporting", "progress", False),
    ("--no-summary-plot", "reporting", "summary_plot", False),
    ("--use-tensorboard", "reporting", "use_tensorboard", True),
    ("--use-tensorboard --tb-project-name p", "reporting", "tb_project_name", "p"),
    ("--use-tensorboard --tb-experiment-name e", "reporting", "tb_experiment_name", "e"),
]
# fmt: on


@pytest.mark.parametrize(("flags", "section", "field", "value"), LANDINGS, ids=[row[0] or "none" for row in LANDINGS])
def test_flag_lands_in_its_field(base, flags, section, field, value):
    got = getattr(getattr(configured(base + flags), section), field)
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
        expert_model_parallel_size expert_tensor_parallel_size sequence_parallel sglang_server_args
        use_rollout_routing_replay routing_replay_weights use_routing_replay measure_routing_mismatch
        rollout_router_bits
    """
    landed = {word.removeprefix("--").replace("-", "_") for row in LANDINGS for word in row[0].split()}
    landed = {ALIASES.get(name, name).removeprefix("no_") for name in landed}
    assert set(OPTIONS) - landed == set(elsewhere.split())


def test_parallel_sizes_land_when_the_ranks_are_there(base):
    line = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    got = configured(base + line + "--context-parallel-size 2 --micro-batch-size 16", world_size=16).megatron
    assert got.model_parallel_size == 8
    assert (got.tensor_model_parallel_size, got.sequence_parallel) == (2, True)


def test_routing_options_land_where_the_model_has_experts(base, tmp_path):
    model = json.loads((tmp_path / "model/config.json").read_text())
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "model_type": "qwen3_moe"}
    model |= experts | {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 16, "intermediate_size": 16}
    (tmp_path / "model/config.json").write_text(json.dumps(model))
    line = "--use-rollout-routing-replay --routing-replay-weights --measure-routing-mismatch 8 --rollout-router-bits 4 "
    got = configured(base + line + "--use-routing-replay --num-steps-per-rollout 2")
    assert (got.rollout.use_rollout_routing_replay, got.rollout.routing_replay_weights) == (True, True)
    assert (got.megatron.use_routing_replay, got.rollout.measure_routing_mismatch) == (True, 8)
    assert got.rollout.rollout_router_bits == 4
    sampling = training_sampling(got.rollout)
    assert (sampling.return_routed_experts, sampling.return_routing_weights) == (True, True)
    assert not evaluation_sampling(got.rollout).records_routing


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
    assert bounds("--use-tis --use-rs --tis-clip-low 0") == (0.0, 0.0, 2.0)
    assert bounds("--use-tis --tis-upper-bound 0.8")[0] is None  # mode truncate, which has no lower bound
