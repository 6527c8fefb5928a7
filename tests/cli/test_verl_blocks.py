"""verl's rollout-correction block, in YAML and as Hydra overrides."""

import dataclasses
import re

import pytest
import yaml

from slime_tis.integrations.verl_config import RolloutCorrectionConfig as VerlConfig
from slime_tis.trainer.cli import arguments
from tests.cli.conftest import configured, refusal

# verl's YAML blocks, as its documents give them, and what they are here.
VERL_BLOCKS = {
    "token IS": (
        "rollout_is: token\nrollout_is_threshold: 2.5\nrollout_rs: null\nbypass_mode: false",
        {"use_tis": True, "tis_level": "token", "tis_upper_bound": 2.5, "use_rs": False},
    ),
    "sequence IS and RS": (
        "rollout_is: sequence\nrollout_is_threshold: 2.0\nrollout_rs: sequence\nrollout_rs_threshold: 3.0\n"
        "rollout_rs_threshold_lower: 0.5\nrollout_is_batch_normalize: true",
        {"rs_level": "sequence", "rs_lower_bound": 0.5, "rs_upper_bound": 3.0, "tis_batch_normalize": True},
    ),
    "RS of a level with a pair": (
        "rollout_is: null\nrollout_rs: token\nrollout_rs_threshold: 0.5_2.0",
        {"use_rs": True, "rs_level": "token", "rs_lower_bound": 0.5, "rs_upper_bound": 2.0},
    ),
    "one-sided RS": (
        "rollout_is: null\nrollout_rs: sequence\nrollout_rs_threshold: 2.0\nrollout_rs_threshold_lower: 0",
        {"use_rs": True, "rs_level": "sequence", "rs_lower_bound": 0.0, "rs_upper_bound": 2.0},
    ),
    "geometric RS, veto, policy gradient": (
        "rollout_is: null\nrollout_rs: geometric\nrollout_rs_threshold: 1.001\nrollout_rs_threshold_lower: 0.999\n"
        "rollout_token_veto_threshold: 1e-4\nbypass_mode: true\nuse_policy_gradient: true",
        {"use_tis": False, "rs_veto_threshold": 1e-4, "use_rollout_logprobs": True, "policy_loss": "reinforce"},
    ),
    "bypass PPO": (
        "rollout_is: token\nrollout_is_threshold: 2.0\nbypass_mode: true\nuse_policy_gradient: false",
        {"use_tis": False, "use_rollout_logprobs": True, "policy_loss": "ppo", "get_mismatch_metrics": False},
    ),
    "bypass PPO, k1": (
        "rollout_is: sequence\nbypass_mode: true\nrollout_rs: seq_mean_k1\nrollout_rs_threshold: 0.5_2.0\n"
        "loss_type: ppo_clip",
        {"use_tis": False, "use_rs": False, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"},
    ),
    "masked token IS": (
        "rollout_is: token\nrollout_is_threshold: 0.5_5.0",
        {"tis_mode": "mask", "tis_lower_bound": 0.5, "tis_upper_bound": 5.0, "rejection_normalizer": "original"},
    ),
    "pure rollout correction": (
        "rollout_is: sequence\nbypass_old_logprob_for_rollout: true\nuse_pure_rollout_correction: true",
        {"use_tis": True, "tis_level": "sequence", "use_rollout_logprobs": True, "policy_loss": "reinforce"},
    ),
}


@pytest.mark.parametrize(("block", "expected"), VERL_BLOCKS.values(), ids=VERL_BLOCKS)
def test_verl_block_is_translated_as_verls_class_is(base, tmp_path, block, expected):
    indented = "\n".join("    " + line for line in block.splitlines())
    (tmp_path / "verl.yaml").write_text(
        f"algorithm:\n  rollout_correction:\n{indented}\nactor_rollout_ref: {{rollout: {{calculate_log_probs: Yes}}}}\n"
    )
    values = yaml.safe_load(re.sub(r": (\S*_\S*)$", r": '\1'", block, flags=re.MULTILINE))  # YAML reads 0.5_2.0 as 0.52
    of_class = VerlConfig(**{name: float(v) if v == "1e-4" else v for name, v in values.items()}).to_config()
    of_block = configured(base + "--custom-config-path verl.yaml").correction
    assert dataclasses.replace(of_class, get_mismatch_metrics=False) == of_block
    assert {name: getattr(of_block, name) for name in expected} == expected


def test_hydra_overrides_are_read_as_verls_block_is(base, tmp_path):
    block = "algorithm.rollout_correction."
    words = (
        f"{block}bypass_mode=True {block}rollout_is=token {block}rollout_rs=sequence +{block}rollout_rs_threshold=3.0"
    )
    got = configured(f"{words} {base} actor_rollout_ref.rollout.calculate_log_probs=True --eval-prompt-data eval.jsonl")
    assert got.correction == arguments.RolloutCorrectionConfig(
        use_rollout_logprobs=True, use_rs=True, rs_level="sequence", rs_upper_bound=3.0, rejection_normalizer="kept"
    )
    (tmp_path / "verl.yaml").write_text("algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 3}}")
    got = configured(base + f"--custom-config-path verl.yaml {block}bypass_mode=True").correction
    # one block, translated once
    assert (got.use_tis, got.use_rollout_logprobs, got.tis_upper_bound) == (False, True, 3.0)


def test_verls_policy_loss_is_translated(base):
    actor = "actor_rollout_ref.actor."
    words = f"{actor}policy_loss.loss_mode=dppo_kl {actor}clip_ratio_low=0.03 {actor}clip_ratio_high=0.04 "
    got = configured(words + f"{actor}clip_ratio_c=20 {base} --num-steps-per-rollout 2")
    mask, policy = got.correction, got.policy
    assert (mask.policy_loss, mask.divergence_mask, mask.divergence_mask_anchor) == ("cispo", "binary_kl", "old")
    assert mask.divergence_bounds == (0.04, 0.03) and (policy.eps_clip, policy.eps_clip_high) == (1.0, 19.0)
    assert "must be one of vanilla" in refusal(f"{actor}policy_loss.loss_mode=geo_mean {base}")
    assert "is not read" in refusal(f"{actor}ppo_epochs=3 {base}")
    bypass = "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=ppo_clip"
    assert "drop one of them" in refusal(f"{actor}policy_loss.loss_mode=sapo {bypass} {base}")
