"""Refused command lines, accepted ones with warnings, and files that are checked before a run."""

import shlex

import pytest

from slime_tis.trainer.cli.train_arguments import parse_args
from tests.cli.conftest import refusal

SGLANG = "--rollout-engine sglang --sglang-launch 1 "
VLLM = "--rollout-engine vllm --vllm-launch 1 "
# (flags, part of the message)
REFUSALS = [
    # values
    ("--use-tis --tis-upper-bound 0", "--tis-upper-bound is 0.0 but must be above 0"),
    ("--tis-upper-bound nan", "'nan' but must be a number"),
    ("--lr 0.5_2", "'0.5_2' but must be a number"),
    ("--lr", "--lr has no value"),
    ("--use-tis=maybe", "must be true or false"),
    ("--no-use-tis=true", "takes no value"),
    ("--eps-clip-high -1", "above 0 and at most 1000000, or inf"),
    ("--log-probs-chunk-size 0", "1 to 100000000, or -1"),
    ("--save ''", "is empty"),
    ("--hf-checkpoint none", "is unset"),
    ("--save a\x1bb", "control characters"),
    ("--output-dir \udc80", "UTF-8"),
    (f"--save {'a' * 5000}", "4096 characters at most"),
    (f"--seed {'9' * 5000}", "(5002 characters)"),
    ("--rollout-stop-token-ids 2 -5", "-5"),
    ("--rollout-stop ''", "--rollout-stop is empty"),
    ("--rollout-stop end ''", "--rollout-stop is empty"),
    ("--rollout-stop \udc80", "UTF-8"),
    ("--eval-prompt-data a eval.jsonl a-pass@1 hard.jsonl", "eval/a-pass@1 is a metric"),
    (
        "--eval-prompt-data a/response_length eval.jsonl a hard.jsonl",
        "names 'a' and 'a/response_length'",
    ),
    ("--rollout-min-p 0.1", "training computes log-probs after temperature, top-k and top-p"),
    ("--repetition-penalty 1.1", "limit tokens with --rollout-top-p or --rollout-top-k"),
    (
        "--freeze-params-name-list embedding 'layers.(0'",
        "'layers.(0', which is no regular expression: missing )",
    ),
    ("--lora-rank 0", "--lora-rank is 0 but must be 1 to 4096"),
    ("--lora-alpha 8", "--lora-alpha is 8.0 but has no effect"),
    ("--lora-rank 8 --lora-target-modules lm_head", "has 'lm_head', but must have names of q_proj"),
    ("--lora-rank 8 --lora-target-modules ,", "--lora-target-modules names no layer"),
    ("--lora-rank 8 --lora-dropout 1", "--lora-dropout is 1.0 but must be at least 0 and below 1"),
    ("--lora-rank 8 --lora-adapter-path a", "the adapter has its rank"),
    ("--lora-adapter-path absent", "'absent' but it holds no adapter_config.json"),
    ("--merge-lora --save-hf a", "there is no adapter; add --lora-rank"),
    (
        f"{SGLANG} --lora-rank 8 --rollout-lora unmerged",
        "--rollout-lora unmerged needs --sglang-weight-sync disk",
    ),
    (
        "--rollout-engine vllm --vllm-router-ip a --vllm-router-port 1 --lora-rank 8"
        " --rollout-lora unmerged",
        "does not work with --vllm-router-ip",
    ),
    ("--rollout-lora unmerged", "--rollout-lora is 'unmerged' but has no effect"),
    ("--lora-rank 8 --merge-lora", "--merge-lora is set but has no effect without --save-hf"),
    (
        "--lora-rank 8 --freeze-params-name-list embedding",
        "--freeze-params-name-list has no effect on LoRA adapters",
    ),
    (
        "--lora-rank 8 --transformer-impl transformer_engine",
        "fuses norms into the linear layers",
    ),
    (
        "--lora-rank 8 --true-on-policy --rollout-precision fp32",
        "--true-on-policy does not work with LoRA adapters",
    ),
    (
        "--lora-rank 8 --use-kl-loss --kl-loss-coef 0.1 --ref-update-interval 2",
        "--ref-update-interval does not work with LoRA",
    ),
    (
        "--freeze-params-name-list a --only-train-params-name-list b",
        "are both given; remove one of the two",
    ),
    (
        "--debug-rollout-only --ci-train-rollout-logprob-abs-diff-threshold 1",
        "--ci-train-rollout-logprob-abs-diff-threshold has no effect",
    ),
    ("--kl-coef 0.1", "--advantage-estimator grpo has no KL in its rewards"),
    ("--gamma 0.9", "--advantage-estimator grpo has no discount"),
    (
        "--advantage-estimator reinforce_plus_plus --kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1",
        "keep one of the two",
    ),
    (
        "--advantage-estimator reinforce_plus_plus --gamma 0.9 --use-opsm",
        "--gamma does not work with --use-opsm",
    ),
    ("--use-rollout-entropy", "no effect without --custom-advantage-function-path"),
    (
        "--use-rollout-entropy --custom-advantage-function-path a.py:f --use-rollout-logprobs",
        "needs the pass for old log-probs",
    ),
    ("--eval-prompt-data eval.jsonl --eval-top-k 20", "--eval-top-k has no effect with"),
    # names
    ("--use-tiss", "did you mean --use-tis?"),
    ("--zzz", "is not a flag"),
    ("--custom-config-path a.yaml --custom-config-path=b.yaml", "is given twice"),
    ("--rollout-correction-preset decoupled_token", "did you mean"),
    ("--rollout-rs geometric", "write --use-rs"),
    (
        "--use-tis --tis-clip 2 --tis-upper-bound 3",
        "--tis-clip and --tis-upper-bound are one option",
    ),
    ("algorithm.rollout_correction.rollout_iz=token", "did you mean rollout_is?"),
    ("data.train_batch_size=4", "is an override of Hydra"),
    ("actor_rollout_ref.rollout.calculate_log_probs=false", "is not read"),
    ("--use-tis algorithm.rollout_correction.rollout_is=null", "are one option"),
    # combinations
    ("--use-routing-replay", "no pass for old log-probs"),
    ("--use-rollout-routing-replay", "the model has no experts"),
    (
        "--measure-routing-mismatch 8 --use-routing-replay --num-steps-per-rollout 2",
        "--use-rollout-routing-replay",
    ),
    (f"--routing-replay-weights --use-rollout-routing-replay {SGLANG}", "--rollout-engine local"),
    ("--opsm-policy old --use-opsm", "--num-steps-per-rollout"),
    ("--divergence-mask binary_tv --divergence-mask-anchor old", "--num-steps-per-rollout"),
    ("--rollout-correction-preset dppo_tv --divergence-mask-anchor old", "is the rollout policy"),
    (
        "--use-rs --reject-before-advantage --use-tis --tis-upper-bound-negative 1",
        "--tis-upper-bound-negative",
    ),
    ("--staleness-decay 0.5", "--partial-rollout"),
    ("--use-rollout-logprobs --use-tis", "applies the correction twice"),
    ("--policy-loss reinforce", "--use-rollout-logprobs"),
    ("--custom-tis-function-path mine.py:fn", "add --use-tis, --use-rs or --get-mismatch-metrics"),
    ("--global-batch-size 12", "a rollout has 32 samples"),
    ("--micro-batch-size 5", "a rank has 32 samples"),
    ("--rollout-batch-size 65536 --n-samples-per-prompt 4096", "a rollout has 268435456 samples"),
    ("--loss-type custom_loss", "--custom-loss-function-path"),
    ("--custom-advantage-function-path a.f --normalize-advantages", "--normalize-advantages"),
    (
        "--advantage-estimator optimal_token_baseline --normalize-advantages",
        "--normalize-advantages",
    ),
    (
        "--advantage-estimator optimal_token_baseline --old-logprobs interpolate",
        "--old-logprobs interpolate",
    ),
    ("--use-dynamic-batch-size", "--max-tokens-per-gpu"),
    (
        "--micro-batch-size 4 --use-dynamic-batch-size --max-tokens-per-gpu 64",
        "remove one of the two",
    ),
    ("--sequence-parallel", "--tensor-model-parallel-size is 1"),
    ("--n-samples-per-prompt 1", "--advantage-estimator grpo"),
    ("--share-prompts --context-parallel-size 2", "remove one of the two"),
    ("--expert-model-parallel-size 2", "no experts"),
    ("--weight-update-rounding stochastic --bf16 --rollout-precision bf16", "--bf16"),
    ("--min-lr 1 --lr-decay-style linear", "1e-06"),
    ("--recompute-granularity full", "--recompute-method"),
    ("--allow-truncation-bias", "--rollout-top-p"),
    ("--allow-truncation-bias --rollout-top-p 0.9", "--rollout-engine local"),
    ("--eval-top-p 0.9 --eval-prompt-data eval.jsonl", "--eval-temperature 0"),
    ("--eval-prompt-data a eval.jsonl b", "3 values"),
    ("--rm-type none", "--custom-rm-path"),
    ("--rm-type exact_match --custom-rm-path mine.py:score", "--custom-rm-path"),
    ("--rm-type dapo", "add --reward-key score"),
    ("--reward-key x", "gives a number"),
    ("--rm-type remote_rm", "--rm-url"),
    ("--num-rollout none", "--num-epoch"),
    ("--load-debug-rollout-data d.pt --debug-rollout-only", "--debug-rollout-only"),
    ("--save-debug-rollout-data d/{foo}.pt", "no field besides {rollout_id}"),
    ("--save-debug-rollout-data d/{{rollout_id}}.pt", "one file for all rollouts"),
    ("--load-debug-rollout-data e/{rollout_id}.pt", "no file 'e/0.pt'"),
    # files
    ("--eval-prompt-data gone.jsonl", "no such file"),
    ("--prompt-data gone.jsonl", "no such file"),
    ("--load gone", "no such directory"),
    ("--save train.jsonl", "that is a file"),
    ("--hf-checkpoint gone", "no config.json"),
    ("--custom-config-path gone.yaml", "no such file"),
    # sizes of the model
    ("--rollout-max-response-len 64", "64 tokens"),
    ("--rollout-stop-token-ids 2 16", "16 tokens"),
    ("--rollout-max-prompt-len 8 --rollout-max-context-len 8", "8 tokens"),
    # engines
    ("--rollout-engine sglang", "no server is named"),
    ("--sglang-api-key s3cret " + SGLANG, "--sglang-api-key-env"),
    (
        "--sglang-ssl-keyfile-password=s3cret " + SGLANG,
        "--sglang-ssl-keyfile-password-env VARIABLE",
    ),
    ("--sglang-port 1 " + SGLANG, "--sglang-base-port"),
    ("--rollout-engine vllm", "add --vllm-url URL, --vllm-router-ip with"),
    ("--vllm-model m " + VLLM, "--vllm-server-args has --model, which the run sets itself"),
    ("--vllm-api-key s3cret " + VLLM, "--vllm-api-key-env"),
    ("--vllm-hf-token s3cret " + VLLM, "--vllm-hf-token-env VARIABLE"),
    ("--vllm-concurrency 0 " + VLLM, "--vllm-concurrency is 0 but must be 1 to"),
    ("--vllm-dtype float32 " + SGLANG, "add --rollout-engine vllm --vllm-launch N"),
    ("--vllm-launch 1 " + SGLANG, "--rollout-engine vllm"),
    ("--routing-replay-weights --use-rollout-routing-replay " + VLLM, "vLLM returns no weights"),
    ("--sglang-ulr http://a:1 --rollout-engine sglang", "did you mean --sglang-url?"),
    ("--partial-rollout --over-sampling-batch-size 6", "--rollout-engine sglang"),
    ("--over-sampling-batch-size 6", "has no effect without --partial-rollout"),
    (SGLANG + "--partial-rollout", "--over-sampling-batch-size is None"),
    (
        SGLANG + "--partial-rollout --over-sampling-batch-size 6 --rollout-lookahead 1",
        "remove one of them",
    ),
]


@pytest.mark.parametrize(("flags", "part"), REFUSALS, ids=[ascii(row[0][:60]) for row in REFUSALS])
def test_refusal_names_the_flag_with_its_problem(base, flags, part):
    message = refusal(base + flags)
    assert part in message and "s3cret" not in message
    assert any(word.split("=")[0] in message for word in flags.split())


UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
RANKS = [
    (f"{UNIFORM} 3", 1, "must divide the 2 layers"),
    ("--tensor-model-parallel-size 2", 1, "world size is 1"),
    ("--rollout-batch-size 5 --n-samples-per-prompt 3", 2, "a multiple of 2"),
    ("--micro-batch-size 32", 2, "a divisor of 16"),
    ("--tensor-model-parallel-size 4", 4, "num_key_value_heads is 2"),
    ("--pipeline-model-parallel-size 4", 4, "num_hidden_layers is 2"),
]


@pytest.mark.parametrize(
    ("flags", "world_size", "part"), RANKS, ids=[f"{row[0]} on {row[1]}" for row in RANKS]
)
def test_sizes_that_do_not_divide_over_the_ranks(base, flags, world_size, part):
    assert part in refusal(base + flags, world_size)


def test_a_required_flag_is_named():
    assert "--hf-checkpoint is unset but required" in refusal("--prompt-data train.jsonl")


def test_an_empty_prompt_file_is_refused(base, tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    assert "the file is empty" in refusal(base)


@pytest.mark.parametrize("flags", ["--use-tiss", ""], ids=["unknown flag", "no weights"])
def test_a_refused_command_exits_with_status_2(base, capsys, flags):
    with pytest.raises(SystemExit) as stop:
        parse_args(shlex.split(base + flags))
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_a_usual_command_has_no_warning(whole, capsys):
    parse_args(shlex.split(whole))
    assert capsys.readouterr().err == ""


def test_warnings_are_one_line_each(whole, capsys):
    """Truncated sampling with recorded token sets has no warning."""
    flags = "--rollout-top-p 0.9 --get-mismatch-metrics --use-tis --tis-lower-bound 0.5"
    parse_args(shlex.split(whole + flags))
    bound, measures = capsys.readouterr().err.splitlines()
    assert bound.startswith("warning: --tis-lower-bound is 0.5") and "--use-tis" in measures


FUNCTIONS = "--dynamic-sampling-filter-path a.f --custom-generate-function-path a.g"
GEOMETRIC = "--use-rs --rs-level geometric"
STALE = "--update-weights-interval 3"
# (flags, part of the only warning; None for no warning)
WARNINGS = [
    (
        f"--load-debug-rollout-data d/0.pt {FUNCTIONS}",
        "-filter-path and --custom-generate-function-path will not be",
    ),
    ("--load-debug-rollout-data d/0.pt", None),
    (FUNCTIONS, None),
    ("--lr-warmup-iters 2", None),
    ("--lr-warmup-iters 3", "--lr-warmup-iters is 3"),
    ("--rollout-correction-preset decoupled_geo_rs", " to 1.001 of geometric "),
    (f"{GEOMETRIC} --rs-upper-bound 1.0001", " to 1.0001 of geometric "),
    (f"{GEOMETRIC} --rs-lower-bound 0 --rs-upper-bound 1.001", " to 1.001 of geometric "),
    (f"{GEOMETRIC} --rs-lower-bound 0 --rs-upper-bound 2", None),
    ("--rollout-rs seq_mean_k1 --rollout-rs-threshold 0.999_1.001", " to 1.001 of seq_mean_k1 "),
    (f"{GEOMETRIC} --rs-upper-bound 1.01", None),
    ("--rollout-correction-preset decoupled_geo_rs --rs-z-score 3", None),
    ("--rollout-rs seq_mean_k3 --rollout-rs-threshold 0.001", None),
    ("--rollout-lookahead 2", "--rollout-lookahead is 2, so samples"),
    (f"{STALE} --get-mismatch-metrics", "--update-weights-interval is 3, so samples"),
    (f"{STALE} --use-tis", None),
    (f"{STALE} --use-opsm", None),
    (f"{STALE} --rollout-pull-coef 0.1", None),
    (f"{STALE} --use-rollout-logprobs", None),
    (f"{STALE} --old-logprobs interpolate", None),
    ("--eps-clip-high 0.28", "--eps-clip-high is 0.28, but with one optimizer step"),
    ("--use-tis --eps-clip 0.1 --eps-clip-c 3", "--eps-clip is 0.1 and --eps-clip-c is 3, but"),
    ("--eps-clip-high 0.28 --num-steps-per-rollout 2", None),
    ("--eps-clip-high 0.28 --use-rollout-logprobs", None),
    ("--eps-clip-high 0.28 --old-logprobs interpolate", None),
]


@pytest.mark.parametrize(("flags", "words"), WARNINGS, ids=[row[0] for row in WARNINGS])
def test_warnings_about_combinations(whole, capsys, flags, words):
    parse_args(shlex.split(whole + flags))
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == (words is not None)
    assert all(warning.startswith("warning: ") and words in warning for warning in warnings)
