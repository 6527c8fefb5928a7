"""Wrong values and combinations: one message with the flag, its value and a fix, and exit status 2."""

import shlex

import pytest

from slime_tis.trainer.cli.arguments import parse_args
from tests.cli.conftest import refusal

REFUSALS = [
    (
        "--use-routing-replay",
        "--use-routing-replay is on but there is no pass for old log-probs to",
    ),
    (
        "--use-routing-replay --use-rollout-logprobs --num-steps-per-rollout 2",
        "--use-routing-replay is on but there is no pass for old log-probs to",
    ),
    (
        "--use-rollout-routing-replay",
        "--use-rollout-routing-replay is given but the model has no experts, and",
    ),
    (
        "--use-routing-replay --num-steps-per-rollout 2",
        "--use-routing-replay is given but the model has no experts, and with them",
    ),
    (
        "--rollout-router-bits 4",
        "--rollout-router-bits is given but the model has no experts, and with them",
    ),
    (
        "--measure-routing-mismatch 8",
        "--measure-routing-mismatch is given but the model has no experts, and with",
    ),
    (
        "--measure-routing-mismatch 8 --use-routing-replay --num-steps-per-rollout 2",
        "--measure-routing-mismatch is 8, which compares training with and without",
    ),
    ("--rollout-router-bits 1", "--rollout-router-bits is 1 but must be 2 to 16."),
    (
        "--use-rollout-routing-replay --routing-replay-weights --rollout-engine sglang --sglang-url http://a:1",
        "--routing-replay-weights is on but an SGLang server returns experts without",
    ),
    (
        "--use-opsm --opsm-policy old",
        "--opsm-policy is old but with one optimizer step per rollout the old policy",
    ),
    (
        "--use-rollout-logprobs --use-tis",
        "--use-rollout-logprobs with --use-tis applies the correction twice under",
    ),
    (
        "--policy-loss reinforce",
        "--policy-loss is reinforce but it has no old policy to recompute log-probs",
    ),
    (
        "--custom-tis-function-path mine.py:fn",
        "--custom-tis-function-path is 'mine.py:fn' but nothing calls it",
    ),
    ("--use-tis --tis-upper-bound 0", "--tis-upper-bound is 0.0 but must be above 0 and finite."),
    ("--tis-upper-bound abc", "--tis-upper-bound is 'abc' but must be a number, above 0 and finite."),
    ("--tis-upper-bound nan", "--tis-upper-bound is 'nan' but must be a number, above 0 and finite."),
    ("--lr 0.5_2", "--lr is '0.5_2' but must be a number, 0 to 1."),
    ("--num-rollout 1.5", "--num-rollout is '1.5' but must be a whole number, 1 to 10000000."),
    ("--lr", "--lr expected one argument."),
    ("--use-tiss", "--use-tiss is not a flag"),
    ("--zzz", "--zzz is not a flag"),
    (
        "--rollout-correction-preset decoupled_token",
        "--rollout-correction-preset is 'decoupled_token'",
    ),
    ("--kl-loss-type k4", "--kl-loss-type is 'k4' but must be one of k1, k2, k3, low_var_kl."),
    (
        "--kl-loss-coef 0.1",
        "--kl-loss-coef is 0.1 but has no effect without --use-kl-loss",
    ),
    ("--eps-clip 1.5", "--eps-clip is 1.5 but must be above 0 and below 1"),
    (
        "--eps-clip-high -1",
        "--eps-clip-high is -1.0 but must be above 0 and at most 1000000, or inf",
    ),
    ("--eps-clip-c 0.5", "--eps-clip-c is 0.5 but must be above 1 and at most 1000000"),
    (
        "--global-batch-size 12",
        "--global-batch-size is 12 but a rollout has 32 samples",
    ),
    (
        "--num-steps-per-rollout 3",
        "--num-steps-per-rollout is 3 but a rollout has 32 samples",
    ),
    (
        "--num-steps-per-rollout 4 --global-batch-size 16",
        "--num-steps-per-rollout is 4 and --global-batch-size is 16 but a rollout",
    ),
    (
        "--micro-batch-size 5",
        "--micro-batch-size is 5 but a rank has 32 samples in a step",
    ),
    (
        "--loss-type custom_loss",
        "--loss-type is custom_loss but --custom-loss-function-path is unset",
    ),
    (
        "--loss-type custom_loss --custom-loss-function-path a.f --use-tis --custom-tis-function-path a.g",
        "--loss-type custom_loss is given and so is --custom-tis-function-path,",
    ),
    (
        "--custom-advantage-function-path a.f --normalize-advantages",
        "--custom-advantage-function-path is given and so is --normalize-advantages,",
    ),
    (
        "--custom-reward-post-process-path a.f --disable-grpo-std-normalization",
        "--custom-reward-post-process-path is given and so is",
    ),
    (
        "--use-dynamic-batch-size",
        "--use-dynamic-batch-size is on but --max-tokens-per-gpu is unset",
    ),
    (
        "--max-tokens-per-gpu 64",
        "--max-tokens-per-gpu is 64 but has no effect without",
    ),
    (
        "--micro-batch-size 4 --use-dynamic-batch-size --max-tokens-per-gpu 64",
        "--micro-batch-size is 4 but --use-dynamic-batch-size packs by tokens",
    ),
    (
        "--sequence-parallel",
        "--sequence-parallel is on but --tensor-model-parallel-size is 1",
    ),
    (
        "--n-samples-per-prompt 1",
        "--n-samples-per-prompt is 1 but --advantage-estimator grpo compares the",
    ),
    (
        "--n-samples-per-prompt 1 --advantage-estimator rloo",
        "--n-samples-per-prompt is 1 but --advantage-estimator rloo compares the",
    ),
    (
        "--tensor-model-parallel-size 2",
        "WORLD_SIZE is 1 but --tensor-model-parallel-size ×",
    ),
    (
        "--context-parallel-size 2 --share-prompts",
        "--share-prompts is on but --context-parallel-size is 2, which cuts every",
    ),
    (
        "--expert-model-parallel-size 2",
        "--expert-model-parallel-size is 2 but the model has no experts",
    ),
    ("--micro-batch-size 0", "--micro-batch-size is 0 but must be 1 to 1000000."),
    ("--rollout-batch-size 0", "--rollout-batch-size is 0 but must be 1 to 65536."),
    (
        "--log-probs-chunk-size 0",
        "--log-probs-chunk-size is 0 but must be 1 to 100000000, or -1.",
    ),
    (
        "--bf16 --rollout-precision bf16 --weight-update-rounding stochastic",
        "--weight-update-rounding is stochastic but with --bf16 the weights that are",
    ),
    ("--adam-beta2 1", "--adam-beta2 is 1.0 but must be at least 0 and below 1."),
    ("--lr-decay-style linear --min-lr 1", "--min-lr is 1.0 but must not exceed --lr, which is 1e-06."),
    (
        "--save-interval 2",
        "--save-interval is 2 but has no effect without --save",
    ),
    (
        "--recompute-granularity full",
        "--recompute-granularity is 'full' but --recompute-method or",
    ),
    (
        "--rollout-temperature 0",
        "--rollout-temperature is 0.0 but must be 0.01 to 100",
    ),
    ("--rollout-top-p 0", "--rollout-top-p is 0.0 but must be above 0 and at most 1."),
    ("--rollout-top-k 0", "--rollout-top-k is 0 but must be 1 to 10000000, or -1."),
    (
        "--allow-truncation-bias",
        "--allow-truncation-bias is set but has no effect without --rollout-top-p or",
    ),
    (
        "--rollout-top-p 0.9 --allow-truncation-bias",
        "--allow-truncation-bias is set but has no effect with --rollout-engine",
    ),
    (
        "--eval-interval 5",
        "--eval-interval is 5 but has no effect without --eval-prompt-data",
    ),
    (
        "--eval-prompt-data a eval.jsonl b",
        "--eval-prompt-data is 'a eval.jsonl b', 3 values, but needs one PATH or",
    ),
    (
        "--eval-prompt-data a eval.jsonl a hard.jsonl",
        "--eval-prompt-data names a, a but each name may be given only once.",
    ),
    (
        "--eval-prompt-data gone.jsonl",
        "--eval-prompt-data is 'gone.jsonl' but there is no such file",
    ),
    (
        "--prompt-data gone.jsonl",
        "--prompt-data is 'gone.jsonl' but there is no such file",
    ),
    (
        "--rm-type none",
        "--rm-type is unset and so is --custom-rm-path",
    ),
    (
        "--custom-rm-path mine.py:score",
        "--rm-type is 'exact_match' and --custom-rm-path is 'mine.py:score'",
    ),
    ("--num-rollout none", "--num-rollout is unset and so is --num-epoch"),
    (
        "--debug-rollout-only --load-debug-rollout-data d.pt",
        "--load-debug-rollout-data is 'd.pt' but --debug-rollout-only does not train",
    ),
    (
        "--load gone",
        "--load is 'gone' but there is no such directory",
    ),
    ("--save train.jsonl", "--save is 'train.jsonl' but that is a file"),
    (
        "--hf-checkpoint gone",
        "--hf-checkpoint is 'gone' but holds no config.json",
    ),
    (
        "--use-kl-loss --ref-load gone",
        "--ref-load is 'gone' but holds no config.json",
    ),
    (
        "--rollout-max-response-len 64",
        "--rollout-max-response-len is 64 but the model's context of 64 tokens holds",
    ),
    (
        "--custom-config-path gone.yaml",
        "--custom-config-path is 'gone.yaml' but there is no such file",
    ),
    ("--save ''", "--save is empty but must be text"),
    ("--load ' '", "--load is empty but must be text"),
    ("--custom-tis-function-path ''", "--custom-tis-function-path is empty but must be text"),
    ("--eval-prompt-data a ''", "--eval-prompt-data is empty but must be a list, each text"),
    ("--hf-checkpoint none", "--hf-checkpoint is unset but must be text."),
    ("--save a\x1bb", "--save is 'a\\x1bb' but must be text without control characters and in UTF-8."),
    ("--output-dir \udc80", "--output-dir is '\\udc80' but must be text without control characters and in"),
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
        "--rollout-temperature is 1e-300 but must be 0.01 to 100",
    ),
    ("--rollout-batch-size 1000000000", "--rollout-batch-size is 1000000000 but must be 1 to 65536."),
    (
        "--rollout-batch-size 65536 --n-samples-per-prompt 4096",
        "a rollout has 268435456 samples (--rollout-batch-size 65536 ×",
    ),
    ("--rollout-stop-token-ids 2 -5", "--rollout-stop-token-ids is -5 but must be 0 to 2147483647."),
    (
        "--rollout-stop-token-ids 2 16",
        "--rollout-stop-token-ids has 16 but the model's vocabulary has 16 tokens,",
    ),
    (
        "--rollout-max-context-len 65",
        "--rollout-max-context-len is 65 but the model's context has 64 tokens",
    ),
    (
        "--rollout-max-prompt-len 64",
        "--rollout-max-prompt-len is 64 but the model's context of 64 tokens holds",
    ),
    (
        "--rollout-max-context-len 8 --rollout-max-prompt-len 8",
        "--rollout-max-prompt-len is 8 but the --rollout-max-context-len of 8 tokens",
    ),
    (
        "--eval-prompt-data eval.jsonl --eval-max-response-len 64",
        "--eval-max-response-len is 64 but the model's context of 64 tokens holds",
    ),
    (
        "--eval-prompt-data eval.jsonl --eval-top-p 0.9",
        "--eval-top-p is 0.9 but --eval-temperature is 0, which takes the likeliest",
    ),
    (
        "--lr-warmup-iters 3000",
        "--lr-warmup-iters is 3000 but the run has 3 optimizer steps, so that the",
    ),
    ("--num-epoch 2", "--num-rollout is 3 and --num-epoch is 2, but a run has one length"),
    (
        "--use-tis --tis-clip 2 --tis-upper-bound 3",
        "--tis-clip and --tis-upper-bound are one option",
    ),
    ("--use-tis=maybe", "--use-tis is 'maybe' but must be true or false."),
    ("--no-use-tis=true", "--no-use-tis takes no value."),
    (
        "--rollout-rs geometric",
        "--rollout-rs names 'geometric'; write --use-rs",
    ),
    (
        "--rollout-rs ,",
        "--rollout-rs names ','",
    ),
    (
        "--save-debug-rollout-data d/{foo}.pt",
        "--save-debug-rollout-data is 'd/{foo}.pt' but may have no field besides",
    ),
    (
        "--save-debug-rollout-data d/{}.pt",
        "--save-debug-rollout-data is 'd/{}.pt' but may have no field besides",
    ),
    (
        "--save-debug-rollout-data d/{rollout_id:9999999}",
        "--save-debug-rollout-data is 'd/{rollout_id:9999999}' but may have no field",
    ),
    (
        "--save-debug-rollout-data d/all.pt",
        "--save-debug-rollout-data is 'd/all.pt', one file for all rollouts",
    ),
    (
        "--load-debug-rollout-data d/{",
        "--load-debug-rollout-data is 'd/{' but may have no field besides",
    ),
    (
        "--load-debug-rollout-data e/{rollout_id}.pt",
        "--load-debug-rollout-data is 'e/{rollout_id}.pt' but there is no file",
    ),
    (
        "algorithm.rollout_correction.rollout_iz=token",
        "algorithm.rollout_correction.rollout_iz is not an option",
    ),
    (
        "data.train_batch_size=4",
        "data.train_batch_size=4 is an override of Hydra",
    ),
    (
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        "actor_rollout_ref.rollout.calculate_log_probs is 'false' but rollouts here",
    ),
    (
        "--use-tis algorithm.rollout_correction.rollout_is=null",
        "--use-tis and algorithm.rollout_correction.rollout_is are one option",
    ),
    ("--wandb-mode loud", "--wandb-mode is 'loud' but must be one of online, offline, disabled."),
]


@pytest.mark.parametrize(("flags", "message"), REFUSALS, ids=[ascii(row[0][:60]) for row in REFUSALS])
def test_refusal_names_flag_value_and_fix(base, flags, message):
    assert refusal(base + flags).startswith(message)


MEANINGLESS_ENGINES = [
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
    ("--partial-rollout --over-sampling-batch-size 6", "--rollout-engine sglang"),
    ("--over-sampling-batch-size 6", "has no effect without --partial-rollout"),
    ("--rollout-engine sglang --sglang-launch 1 --partial-rollout", "--over-sampling-batch-size is None"),
    (
        "--rollout-engine sglang --sglang-launch 1 --partial-rollout --over-sampling-batch-size 6 "
        "--rollout-lookahead 1",
        "remove one of them",
    ),
    ("--rollout-lookahead -1", "--rollout-lookahead is -1"),
]


@pytest.mark.parametrize(("flags", "words"), MEANINGLESS_ENGINES, ids=[row[0][:60] for row in MEANINGLESS_ENGINES])
def test_engines_that_mean_nothing_are_refused(base, flags, words):
    said = refusal(base + flags)
    assert words in said and "s3cret" not in said


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
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
    ids=["global batch", "micro-batch", "tensor-parallel", "pipeline-parallel"],
)
def test_sizes_that_do_not_divide_over_the_ranks(base, flags, world_size, message):
    assert refusal(base + flags, world_size) == message


def test_missing_required_flag_is_named(base):
    assert refusal("--prompt-data train.jsonl") == "--hf-checkpoint is unset but required; add --hf-checkpoint DIR."


def test_refusal_exits_with_code_2_and_the_message_alone(base, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(shlex.split(base + "--use-tiss"))
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err == "--use-tiss is not a flag; did you mean --use-tis?\n" and captured.out == ""
