"""Mismatch metrics in the logs of other frameworks, and how each framework writes tokens.

Read in the sources of November 2026: TRL 1.16.0, verl 0.9.1 (`utils/debug/metrics.py`,
`rollout_corr_helper.py`), AReaL (`areal/trainer/ppo/actor.py`), SkyRL (`trainer.py`), NeMo-RL
(`algorithms/loss/loss_functions.py`), prime-rl, open-instruct, tinker-cookbook, OpenRLHF 0.9,
slime.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

ABS = "train/train_rollout_logprob_abs_diff"
K3 = "train/mismatch_k3_kl"
K1 = "train/mismatch_kl"
AGE = "rollout/weight_staleness"


class PeerMetric(NamedTuple):
    """Another framework's metric: our name, and the function that gives our value."""

    framework: str
    metric: str
    convert: Callable[[float], float] = float


def log_of_mean_ratio(value: float) -> float:
    """Returns an estimate of mean abs(Δ) from NeMo-RL's mean of exp(abs(Δ)), at least 1."""
    if value > 0:
        return math.log(value)
    return -math.inf


def negated(value: float) -> float:
    """Returns −value."""
    return -value


# AReaL logs "behave_approx_kl", the mean of log π_proximal − log π_behave, which is −k1.
PEER_METRICS: dict[str, PeerMetric] = {
    "sampling/sampling_logp_difference/mean": PeerMetric("TRL", ABS),
    "training/rollout_probs_diff_mean": PeerMetric("verl", "training/rollout_probs_diff_mean"),
    "training/rollout_actor_probs_pearson_corr": PeerMetric(
        "verl", "training/rollout_actor_probs_pearson_corr"
    ),
    "rollout_corr/k3_kl": PeerMetric("verl", K3),
    "rollout_corr/kl": PeerMetric("verl", K1),
    "actor/rollout_corr/k3_kl": PeerMetric("verl", K3),
    "actor/rollout_corr/kl": PeerMetric("verl", K1),
    "ppo_actor/update/behave_approx_kl/avg": PeerMetric("AReaL", K1, negated),
    "ppo_actor/behave_approx_kl/avg": PeerMetric("AReaL", K1, negated),
    "grpo_actor/update/behave_approx_kl/avg": PeerMetric("AReaL", K1, negated),
    "grpo_actor/behave_approx_kl/avg": PeerMetric("AReaL", K1, negated),
    "ppo_actor/update/version_stats/sample_staleness_theta_avg": PeerMetric("AReaL", AGE),
    "policy/rollout_train_logprobs_abs_diff_mean": PeerMetric("SkyRL", ABS),
    "train/token_mult_prob_error": PeerMetric("NeMo-RL", ABS, log_of_mean_ratio),
    "train/gen_kl_error": PeerMetric("NeMo-RL", K3),
    "train/avg_trajectory_age": PeerMetric("NeMo-RL", AGE),
    "mismatch_kl/mean": PeerMetric("prime-rl", K3),
    "mismatch_kl/all/mean": PeerMetric("prime-rl", K3),  # from 0.6
    "debug/vllm_vs_local_logprob_diff_mean": PeerMetric("open-instruct", ABS),
    "optim/kl_sample_train_v1": PeerMetric("tinker-cookbook", K1),
    "optim/kl_sample_train_v2": PeerMetric("tinker-cookbook", K3),  # Δ²/2
    "train/vllm_kl": PeerMetric("OpenRLHF", K1),
    "train/mis_k3_kl": PeerMetric("slime", K3),
}
OWN_PREFIXES = {"correction/": "TRL"}
"""Frameworks whose logs have our metrics, by the prefix of our adapter."""

DUMP_ADVICE = {
    "TRL": "pass dump_dir=DIR to RolloutCorrectionMixin (docs/adapters.md)",
    "verl": 'set trainer.rollout_data_dir=DIR with the patch of docs/dumps.md ("Dumps from verl")',
    "NeMo-RL": "give its train_data_step*.jsonl, which it writes below logger.log_dir",
    "prime-rl": "give its token_exports directory",
    "slime": "add --save-debug-train-data (slime's and miles's flag)",
    "SkyRL": (
        "convert the pickles of trainer.dump_data_batch with the script in docs/dumps.md"
        ' ("Dumps from SkyRL")'
    ),
    "AReaL": (
        'write its batches as JSONL with the patch in docs/dumps.md ("Dumps from AReaL"); its own'
        " rollout files have no log-probs"
    ),
}
OTHER_DUMP_ADVICE = (
    "write JSONL with train_log_probs, rollout_log_probs and loss_mask (docs/dumps.md)"
)


def dump_advice(framework: str) -> str:
    """Returns how users of a framework write tokens that this program reads."""
    return DUMP_ADVICE.get(framework, OTHER_DUMP_ADVICE)
