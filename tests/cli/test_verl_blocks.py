"""verl's rollout-correction block, in YAML and as Hydra overrides."""

import dataclasses
import re

import pytest
import yaml

from slime_tis.integrations.verl_config import RolloutCorrectionConfig as VerlConfig
from slime_tis.trainer.cli import train_arguments
from tests.cli.conftest import configured, refusal

# verl's YAML blocks, as its documents give them, and what they are here.
VERL_BLOCKS = {
    "token IS": (
        "rollout_is: token\nrollout_is_threshold: 2.5\nrollout_rs: null\nbypass_mode: false",
        {"use_tis": True, "tis_level": "token", "tis_upper_bound": 2.5, "use_rs": False},
    ),
    "sequence IS and RS": (
        (
            "rollout_is: sequence\nrollout_is_threshold: 2.0\nrollout_rs:"
            " sequence\nrollout_rs_threshold: 3.0\nrollout_rs_threshold_lower:"
            " 0.5\nrollout_is_batch_normalize: true"
        ),
        {
            "rs_level": "sequence",
            "rs_lower_bound": 0.5,
            "rs_upper_bound": 3.0,
            "tis_batch_normalize": True,
        },
    ),
    "RS of a level with a pair": (
        "rollout_is: null\nrollout_rs: token\nrollout_rs_threshold: 0.5_2.0",
        {"use_rs": True, "rs_level": "token", "rs_lower_bound": 0.5, "rs_upper_bound": 2.0},
    ),
    "one-sided RS": (
        (
            "rollout_is: null\nrollout_rs: sequence\nrollout_rs_threshold:"
            " 2.0\nrollout_rs_threshold_lower: 0"
        ),
        {"use_rs": True, "rs_level": "sequence", "rs_lower_bound": 0.0, "rs_upper_bound": 2.0},
    ),
    "geometric RS, veto, policy gradient": (
        (
            "rollout_is: null\nrollout_rs: geometric\nrollout_rs_threshold:"
            " 1.001\nrollout_rs_threshold_lower: 0.999\nrollout_token_veto_threshold:"
            " 1e-4\nbypass_mode: true\nuse_policy_gradient: true"
        ),
        {
            "use_tis": False,
            "rs_veto_threshold": 1e-4,
            "use_rollout_logprobs": True,
            "policy_loss": "reinforce",
        },
    ),
    "bypass PPO": (
        (
            "rollout_is: token\nrollout_is_threshold: 2.0\nbypass_mode: true\nuse_policy_gradient:"
            " false"
        ),
        {
            "use_tis": False,
            "use_rollout_logprobs": True,
            "policy_loss": "ppo",
            "get_mismatch_metrics": False,
        },
    ),
    "bypass PPO, k1": (
        (
            "rollout_is: sequence\nbypass_mode: true\nrollout_rs:"
            " seq_mean_k1\nrollout_rs_threshold: 0.5_2.0\nloss_type: ppo_clip"
        ),
        {
            "use_tis": False,
            "use_rs": False,
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": "0.5_2.0",
        },
    ),
    "masked token IS": (
        "rollout_is: token\nrollout_is_threshold: 0.5_5.0",
        {
            "tis_mode": "mask",
            "tis_lower_bound": 0.5,
            "tis_upper_bound": 5.0,
            "rejection_normalizer": "original",
        },
    ),
    "pure rollout correction": (
        (
            "rollout_is: sequence\nbypass_old_logprob_for_rollout:"
            " true\nuse_pure_rollout_correction: true"
        ),
        {
            "use_tis": True,
            "tis_level": "sequence",
            "use_rollout_logprobs": True,
            "policy_loss": "reinforce",
        },
    ),
}


@pytest.mark.parametrize(("block", "expected"), VERL_BLOCKS.values(), ids=VERL_BLOCKS)
def test_verl_block_is_translated_as_verls_class_is(base, tmp_path, block, expected):
    indented = "\n".join("    " + line for line in block.splitlines())
    (tmp_path / "verl.yaml").write_text(
        f"algorithm:\n  rollout_correction:\n{indented}\nactor_rollout_ref: {{rollout:"
        " {calculate_log_probs: Yes}}\n"
    )
    values = yaml.safe_load(
        re.sub(r": (\S*_\S*)$", r": '\1'", block, flags=re.MULTILINE)
    )  # YAML reads 0.5_2.0 as 0.52
    of_class = VerlConfig(
        **{name: float(v) if v == "1e-4" else v for name, v in values.items()}
    ).to_config()
    of_block = configured(base + "--custom-config-path verl.yaml").correction
    assert dataclasses.replace(of_class, get_mismatch_metrics=False) == of_block
    assert {name: getattr(of_block, name) for name in expected} == expected


def test_hydra_overrides_are_read_as_verls_block_is(base, tmp_path):
    block = "algorithm.rollout_correction."
    words = (
        f"{block}bypass_mode=True {block}rollout_is=token {block}rollout_rs=sequence"
        f" +{block}rollout_rs_threshold=3.0"
    )
    got = configured(
        f"{words} {base} actor_rollout_ref.rollout.calculate_log_probs=True --eval-prompt-data"
        " eval.jsonl"
    )
    assert got.correction == train_arguments.RolloutCorrectionConfig(
        use_rollout_logprobs=True,
        use_rs=True,
        rs_level="sequence",
        rs_upper_bound=3.0,
        rejection_normalizer="kept",
    )
    (tmp_path / "verl.yaml").write_text(
        "algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 3}}"
    )
    got = configured(base + f"--custom-config-path verl.yaml {block}bypass_mode=True").correction
    # one block, translated once
    assert (got.use_tis, got.use_rollout_logprobs, got.tis_upper_bound) == (False, True, 3.0)


def test_verls_policy_loss_is_translated(base):
    actor = "actor_rollout_ref.actor."
    words = (
        f"{actor}policy_loss.loss_mode=dppo_kl {actor}clip_ratio_low=0.03"
        f" {actor}clip_ratio_high=0.04 {actor}clip_ratio_c=20 "
    )
    got = configured(f"{words}{base} --num-steps-per-rollout 2")
    loss = (got.correction.policy_loss, got.correction.divergence_mask)
    assert loss == ("cispo", "binary_kl")
    assert got.correction.divergence_mask_anchor == "old"
    assert got.correction.divergence_bounds == (0.04, 0.03)
    assert (got.policy.eps_clip, got.policy.eps_clip_high) == (1.0, 19.0)


BYPASS = (
    "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=ppo_clip"
)
# (overrides, part of the message)
BAD_POLICY_LOSSES = {
    "unknown loss": (
        "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
        "must be one of vanilla",
    ),
    "other option": ("actor_rollout_ref.actor.ppo_epochs=3", "is not read"),
    "two losses": (
        f"actor_rollout_ref.actor.policy_loss.loss_mode=sapo {BYPASS}",
        "drop one of them",
    ),
}


@pytest.mark.parametrize(("words", "part"), BAD_POLICY_LOSSES.values(), ids=BAD_POLICY_LOSSES)
def test_wrong_policy_losses_are_refused(base, words, part):
    assert part in refusal(f"{words} {base}")


# (overrides of actor_rollout_ref.actor as in verl's scripts, options here)
ACTOR_BLOCKS = {
    "token mean": ("loss_agg_mode=token-mean", {"calculate_per_token_loss": True}),
    "mean over sequences": (
        "loss_agg_mode=seq-mean-token-mean",
        {"calculate_per_token_loss": False},
    ),
    "token mean of a sequence loss": (
        (
            "policy_loss.loss_mode=gspo loss_agg_mode=token-mean clip_ratio_low=3e-4"
            " clip_ratio_high=4e-4 clip_ratio_c=10"
        ),
        {
            "calculate_per_token_loss": False,
            "eps_clip": 3e-4,
            "eps_clip_high": 4e-4,
            "eps_clip_c": None,
        },
    ),
    "cispo without a lower bound": (
        "policy_loss.loss_mode=cispo clip_ratio_low=10 clip_ratio_high=0.2",
        {"eps_clip": 1.0, "eps_clip_high": 0.2},
    ),
    "cispo with a dual clip that verl ignores": (
        "policy_loss.loss_mode=cispo clip_ratio_c=10.0",
        {"eps_clip_c": None},
    ),
    "dual clip": (
        "clip_ratio_low=0.2 clip_ratio_high=0.28 clip_ratio_c=10.0",
        {"eps_clip_c": 10.0},
    ),
    "only a lower ratio": ("clip_ratio_low=0.1", {"eps_clip": 0.1, "eps_clip_high": 0.2}),
    "ratios replace their common value": (
        "clip_ratio=0.5 clip_ratio_low=0.1 clip_ratio_high=0.3",
        {"eps_clip": 0.1, "eps_clip_high": 0.3},
    ),
    "sapo": (
        (
            "policy_loss.loss_mode=sapo policy_loss.tau_pos=1.1 policy_loss.tau_neg=1.2"
            " clip_ratio_low=0.2"
        ),
        {"sapo_tau_pos": 1.1, "sapo_tau_neg": 1.2},
    ),
    "temperatures of another loss": ("tau_pos=1.0 tau_neg=1.05", {"sapo_tau_pos": 1.0}),
}


@pytest.mark.parametrize(("overrides", "expected"), ACTOR_BLOCKS.values(), ids=ACTOR_BLOCKS)
def test_actor_blocks_of_verls_scripts(base, overrides, expected):
    words = " ".join(f"actor_rollout_ref.actor.{word}" for word in overrides.split())
    policy = configured(f"{words} {base} --num-steps-per-rollout 2").policy
    assert {name: getattr(policy, name) for name in expected} == expected


# (overrides, part of the message)
BAD_ACTOR_BLOCKS = {
    "sums over tokens": (
        "loss_agg_mode=seq-mean-token-sum-norm",
        "must be one of token-mean, seq-mean-token-mean",
    ),
    "not a number": ("clip_ratio_low=low", "clip_ratio_low is 'low' but must be a number"),
    "two temperatures": (
        "policy_loss.loss_mode=sapo tau_pos=1.1 policy_loss.tau_pos=1.2",
        "policy_loss.tau_pos contradicts",
    ),
}


@pytest.mark.parametrize(("overrides", "part"), BAD_ACTOR_BLOCKS.values(), ids=BAD_ACTOR_BLOCKS)
def test_wrong_actor_blocks_are_refused(base, overrides, part):
    words = " ".join(f"actor_rollout_ref.actor.{word}" for word in overrides.split())
    assert part in refusal(f"{words} {base} --num-steps-per-rollout 2")


def test_a_list_as_verls_threshold_is_one_message(base, tmp_path):
    block = "rollout_is: token, rollout_is_threshold: [2.0]"
    (tmp_path / "verl.yaml").write_text(f"algorithm: {{rollout_correction: {{{block}}}}}")
    assert "must be a number or text, not a list" in refusal(
        f"{base} --custom-config-path verl.yaml"
    )
