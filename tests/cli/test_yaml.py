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


YAML_REFUSALS = [
    ("tis_upper: 2.0", "tis_upper in run.yaml is not an option; did you mean tis_upper_bound?"),
    ("custom_config_path: a.yaml", "custom_config_path in run.yaml is not an option; --help lists"),
    ("drop_above: 2", "drop_above in run.yaml is not an option, and no user function is given"),
    ("drop_above: 2024-01-01\ncustom_rm_path: a.b", "drop_above in run.yaml has a value of type date"),
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
        "run.yaml, line 3: 'use_tis' is given a second time, after line 1; remove one of the two.",
    ),
    (
        "algorithm:\n  rollout_correction: {rollout_is: token, rollout_is: null}",
        "run.yaml, line 2: 'rollout_is' is given a second time, after line 2; remove one of the two.",
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
        "algorithm.rollout_correction.use_policy_gradient in run.yaml; remove one of the two.",
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
        "log-probs; make it true or remove it.",
    ),
    ("- lr", "--custom-config-path is 'run.yaml' but it contains no keys; write one `key: value` per line."),
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
]


@pytest.mark.parametrize(("text", "message"), YAML_REFUSALS, ids=[row[0][:60] for row in YAML_REFUSALS])
def test_yaml_refusals(base, tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    assert refusal(base + "--custom-config-path run.yaml").startswith(message)


def test_options_of_user_functions_keep_their_yaml_types(base, tmp_path):
    (tmp_path / "run.yaml").write_text("use_tis: true\ndrop_above: 1e-4\nnames: [a, '1']\ncount: 3\n")
    line = base + "--custom-config-path run.yaml --custom-tis-function-path custom_tis.mis.compute_mis_weights_with_cp"
    got = configured(line)
    assert got.user_options == {"drop_above": 1e-4, "names": ["a", "1"], "count": 3}
    assert got.namespace.drop_above == 1e-4 and got.namespace.names == ["a", "1"]
    assert arguments.effective_config(got)["count"] == 3 and "drop_above 0.0001" in arguments.describe(got)
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(arguments.options_in_force(got)))
    assert configured("--custom-config-path saved.yaml").user_options == got.user_options


def test_two_files_are_refused(base):
    with pytest.raises(ValueError, match="given twice"):
        configured(base + "--custom-config-path a.yaml --custom-config-path=b.yaml")
