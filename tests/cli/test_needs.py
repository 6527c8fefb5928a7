"""Options that have no effect without another are refused, or passed over where that is switched off."""

import shlex

import pytest

from slime_tis.limits import flag
from slime_tis.trainer.cli.command_line import needs_of
from slime_tis.trainer.cli.run_options import COMMAND_LINE, OPTIONS
from tests.cli.conftest import configured, refusal

IDLE = [
    (
        "--custom-loss-function-path a.f",
        "--custom-loss-function-path is 'a.f' but has no effect without --loss-type custom_loss; add it",
    ),
    (
        "--dynamic-sampling-max-batches 3",
        "--dynamic-sampling-max-batches is 3 but has no effect without --dynamic-sampling-filter-path; add it",
    ),
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
    (
        "--routing-replay-weights",
        "--routing-replay-weights is set but has no effect without --use-rollout-routing-replay; add it",
    ),
    (
        "--rollout-engine sglang --sglang-url http://a:1 --rollout-router-bits 4",
        "--rollout-router-bits is 4 but has no effect without --rollout-engine local; add it",
    ),
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
    (
        "--weight-update-rounding stochastic",
        "--weight-update-rounding is 'stochastic' but has no effect without --rollout-precision bf16, "
        "--rollout-precision fp8, --rollout-precision int8 or --rollout-engine sglang; add one of them",
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
    assert refusal(base + flags) == f"{message} or remove {option}."
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
        assert found == f"{name} in run.yaml {message.removeprefix(option).strip()} or remove {name}."


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.needs or option.suffices])
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
