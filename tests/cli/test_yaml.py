"""YAML files of options: what they may contain, slime's own files, and what is refused."""

import pytest
import yaml

from slime_tis.trainer.cli import arguments
from tests.cli.conftest import configured, refusal


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


# (content of run.yaml, part of the message)
YAML_REFUSALS = [
    ("tis_upper: 2.0", "did you mean tis_upper_bound?"),
    ("custom_config_path: a.yaml", "is not an option"),
    ("drop_above: 2", "no user function is given"),
    ("drop_above: 2024-01-01\ncustom_rm_path: a.b", "is a date"),
    ("use_tis: 3", "'3' but must be true or false"),
    ("rollout_stop_token_ids: [a]", "must be a list"),
    ("tis_clip: 2\ntis-upper-bound: 3", "a second time"),
    ("use_tis: true\nlr: 1e-5\nuse_tis: false", "line 3: 'use_tis' is given a second time, after line 1"),
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
        "algorithm: {rollout_correction: {bypass_mode: true, use_policy_gradient: true, loss_type: ppo_clip}}",
        "contradicts",
    ),
    ("algorithm: {rollout_correction: {rollout_is_threshold: 2.0}}", "no effect without --use-tis"),
    (
        "algorithm: {rollout_correction: {rollout_rs: token_k1, rollout_rs_threshold: 2, "
        "rollout_rs_threshold_lower: 0.5}}",
        "belongs to rollout_rs token",
    ),
    ("algorithm: {rollout_correction: {rollout_is: token}}\nuse_tis: false", "gives use_tis a second time"),
    ("actor_rollout_ref: {rollout: {calculate_log_probs: False}}", "is not read"),
    ("algorithm: {adv_estimator: grpo}", "is not read"),
]


@pytest.mark.parametrize(("text", "part"), YAML_REFUSALS, ids=[row[0][:60] for row in YAML_REFUSALS])
def test_yaml_refusals(base, tmp_path, text, part):
    (tmp_path / "run.yaml").write_text(text)
    message = refusal(base + "--custom-config-path run.yaml")
    assert "run.yaml" in message and part in message


def test_options_of_user_functions_keep_their_yaml_types(base, tmp_path):
    (tmp_path / "run.yaml").write_text("use_tis: true\ndrop_above: 1e-4\nnames: [a, '1']\ncount: 3\n")
    line = base + "--custom-config-path run.yaml --custom-tis-function-path custom_tis.mis.compute_mis_weights_with_cp"
    got = configured(line)
    assert got.user_options == {"drop_above": 1e-4, "names": ["a", "1"], "count": 3}
    assert got.namespace.drop_above == 1e-4 and got.namespace.names == ["a", "1"]
    assert arguments.effective_config(got)["count"] == 3 and "drop_above 0.0001" in arguments.describe(got)
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(arguments.options_in_force(got)))
    assert configured("--custom-config-path saved.yaml").user_options == got.user_options
