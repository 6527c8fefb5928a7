"""Names of metrics and options in other trainers, for the messages of `LiveHealth`."""

from slime_tis.live_health import Framework

TRL = Framework(
    name="TRL",
    prefix="correction/",
    metrics={
        "rollout/raw_reward": "reward",
        "rollout/zero_std_groups": "frac_reward_zero_std",
        "train/pg_clipfrac": "clip_ratio/region_mean",
        "train/nonfinite_gradient_steps": "grad_norm",
    },
    options={
        "learning_rate": "GRPOConfig(learning_rate)",
        "steps": "num_iterations and steps_per_generation",
        "temperature": "GRPOConfig(temperature)",
        "log_probs": "vLLM's --logprobs-mode processed_logprobs",
        "truncation": "top_p, top_k, min_p and repetition_penalty of GRPOConfig",
        "sync": "that the rollout_func or vLLM samples from the weights of the current global_step",
        "versions": "'weight_versions' from rollout_func",
        "correction": "rollout_correction",
        "rewards": "reward_funcs",
    },
)
VERL = Framework(
    name="verl",
    prefix="rollout_corr/",
    metrics={
        "rollout/raw_reward": "critic/score/mean",
        "train/pg_clipfrac": "actor/pg_clipfrac",
        "train/nonfinite_gradient_steps": "actor/grad_norm",
    },
    options={
        "learning_rate": "actor_rollout_ref.actor.optim.lr",
        "steps": "actor_rollout_ref.actor.ppo_epochs, or raise ppo_mini_batch_size",
        "temperature": "actor_rollout_ref.rollout.temperature",
        "log_probs": "the rollout's processed log-probs (rollout.calculate_log_probs)",
        "truncation": "actor_rollout_ref.rollout.top_p and top_k",
        "sync": "the weight update of the rollout workers (staleness_threshold, async training)",
        "versions": "them in a dump (docs/dumps.md)",
        "correction": "algorithm.rollout_correction",
        "rewards": "the reward function (reward.custom_reward_function)",
    },
)
TINKER = Framework(
    name="tinker",
    prefix="custom/",
    suffix=":mean",
    # A call may train on samples of weights from some steps ago.
    samples_are_fresh=False,
    options={
        "learning_rate": "learning_rate of AdamParams",
        "steps": "the forward_backward calls per batch of samples",
        "temperature": "temperature of SamplingParams",
        "truncation": "top_p and top_k of SamplingParams",
        "sync": "that each batch is sampled by save_weights_and_get_sampling_client of that step",
        "versions": "the key 'weight_age' in each datum",
        "correction": "corrected_loss",
    },
)
MS_SWIFT = Framework(
    name="ms-swift",
    prefix="correction/",
    options={
        "learning_rate": "--learning_rate",
        "steps": "--num_iterations and --steps_per_generation",
        "temperature": "--temperature",
        "truncation": "--top_p and --top_k",
        "sync": "that vLLM gets the weights of the current global_step (--async_generate)",
        "correction": "losses.ms_swift",
        "rewards": "--reward_funcs",
    },
)
