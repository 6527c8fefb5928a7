"""Writes docs/slime_flags.md: what happens to each flag of slime's parser; `make docs` runs it.

python docs/write_slime_flags.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_tis.options.fields import flag
from slime_tis.trainer.cli.slime_flags import (
    FIXED,
    RENAMED,
    VALUES,
    advice_for,
    experiment_of,
)
from slime_tis.trainer.cli.train_options import ALIASES, FLAGS
from slime_tis.trainer.port.gpus import PLACEMENT

PAGE = Path(__file__).with_name("slime_flags.md")
COMMIT = "624b824a"
"""Commit of slime whose slime/utils/arguments.py was read, of 21 August 2026."""
PARSER = """
actor-num-nodes actor-num-gpus-per-node rollout-num-gpus rollout-num-gpus-per-engine
num-gpus-per-node colocate offload offload-train offload-rollout distributed-backend
distributed-timeout-minutes qwen-gdn-backend train-env-vars update-weight-mode
update-weight-transport release-train update-weight-disk-dir update-weight-disk-keep-files
update-weight-delta-encoding update-weight-delta-checksum
custom-update-weight-post-write-path update-weight-local-checkpoint-dir
custom-model-provider-path recompute-loss-function log-probs-chunk-size
only-train-params-name-list freeze-params-name-list freeze-indexer allgather-cp
hf-checkpoint model-name rollout-function-path rollout-temperature rollout-top-p
rollout-top-k rollout-max-context-len rollout-max-prompt-len rollout-max-response-len
rollout-skip-special-tokens rollout-stop rollout-stop-token-ids rollout-shuffle rollout-seed
over-sampling-batch-size dynamic-sampling-filter-path partial-rollout
mask-offpolicy-in-partial-rollout custom-generate-function-path rollout-sample-hook-path
custom-rollout-log-function-path custom-eval-rollout-log-function-path buffer-filter-path
update-weight-buffer-size update-weights-interval keep-old-actor
rollout-data-postprocess-path rollout-data-transport rollout-external-engine-addrs
use-fault-tolerance rollout-health-check-interval rollout-health-check-timeout
rollout-health-check-first-wait num-rollout num-epoch disable-rollout-global-dataset
data-source-path prompt-data apply-chat-template apply-chat-template-kwargs input-key
label-key multimodal-keys metadata-key tool-key start-rollout-id rollout-batch-size
n-samples-per-prompt global-batch-size num-steps-per-rollout micro-batch-size balance-data
balance-by-flops use-dynamic-batch-size max-tokens-per-gpu log-probs-max-tokens-per-gpu
eval-function-path eval-interval eval-prompt-data eval-config skip-eval-before-train
eval-input-key eval-label-key eval-tool-key n-samples-per-eval-prompt eval-temperature
eval-top-p eval-top-k eval-max-response-len eval-max-prompt-len eval-min-new-tokens
eval-max-context-len ref-load ref-ckpt-step load save save-interval async-save no-save-optim
save-hf seed clip-grad calculate-per-token-loss lr num-critic-only-steps
megatron-config-path eps-clip eps-clip-high eps-clip-c value-clip kl-coef loss-type
custom-loss-function-path kl-loss-type advantage-estimator
disable-compute-advantages-and-returns custom-advantage-function-path use-kl-loss
kl-loss-coef use-unbiased-kl ref-update-interval entropy-coef gamma lambd
normalize-advantages disable-grpo-std-normalization disable-rewards-normalization
use-rollout-entropy get-mismatch-metrics reset-optimizer-states use-stateless-adam
use-rollout-logprobs use-tis tis-clip tis-clip-low custom-tis-function-path
custom-pg-loss-reducer-function-path use-routing-replay use-rollout-routing-replay use-opsm
opsm-delta use-opd opd-type opd-kl-coef opd-teacher-load opd-teacher-ckpt-step use-wandb
wandb-mode wandb-dir wandb-key wandb-host wandb-team wandb-group wandb-project
disable-wandb-random-suffix wandb-always-use-train-step log-multi-turn log-passrate
log-reward-category log-correct-samples wandb-run-id use-tensorboard tb-project-name
tb-experiment-name save-debug-rollout-data load-forge-rollout-data
load-debug-rollout-data-subsample save-debug-train-data dump-details memory-snapshot-dir
memory-snapshot-num-steps profile-target memory-recorder record-memory-history
check-weight-update-equal http-proxy use-distributed-post rm-type reward-key eval-reward-key
group-rm rm-url custom-rm-path custom-reward-post-process-path
custom-convert-samples-to-train-data-path rollout-buffer-url fetch-trajectory-retry-times
min-batch-collection-ratio rollout-task-type loss-mask-type data-pad-size-multiplier
rollout-sample-filter-path rollout-all-samples-process-path custom-megatron-init-path
custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path
megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules
megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules mtp-num-layers
mtp-loss-scaling-factor enable-mtp-training ci-test ci-disable-kl-checker
ci-train-rollout-logprob-abs-diff-threshold ci-save-grad-norm ci-load-grad-norm
custom-config-path padded-vocab-size train-backend debug-rollout-only debug-train-only
load-debug-rollout-data
"""
"""Flags that slime's own parser adds, without dashes and in its order. Megatron-core's flags are
not among them."""

HEAD = """# Flags of slime

`make docs` writes this page from the tables of `train.py`. It has every flag of slime's own parser (THUDM/slime
{commit}, `slime/utils/arguments.py`). Of {total} flags, {supported} are supported under their name and {renamed} under
another one; {accepted} are accepted with the value that this program has; {refused} are refused, each with the reason.

* **supported**: `train.py` has the flag. The last column has values with another spelling.
* **renamed**: `train.py` names the other flag, and [`slime-tis port`](slime.md#a-launch-script-of-slime) writes it.
* **accepted**: the flag is taken if it says what this program does anyway; other values are refused.
* **refused**: `train.py` names the reason before the model is built. `slime-tis port` drops the flag and prints the reason;
  for *another experiment* it prints no command.

slime has no flags for min-p and for repetition, presence and frequency penalties. If the `sampling_params` of a generate
function have one of them, the request is refused. Training computes log-probs after temperature, top-k and top-p. Min-p and
penalties give another distribution, and penalties depend on the tokens so far, which training does not count. The importance
weights would compare two different policies. Remove the parameter; `--rollout-top-p` and `--rollout-top-k` limit the sampled
tokens, and training computes the same limits.

| flag | | here |
|---|---|---|
"""


def judged(name: str) -> tuple[str, str]:
    """Returns the status of a flag of slime, and the text for its row.

    Raises:
        KeyError: No table has the flag.
    """
    if name in FLAGS:
        option = name.removeprefix("--").replace("-", "_")
        now = ALIASES.get(option)
        values = ", ".join(f"`{value}` is `{new}`" for value, new in VALUES.get(name, {}).items())
        if now is not None:
            return "supported", f"an old name of `{flag(now)}`"
        return "supported", values
    if name in RENAMED:
        new = RENAMED[name]
        note = f", {new.note}" if new.note else ""
        return "renamed", f"`{new.name}`{note}"
    if name in FIXED:
        return "accepted", f"always {' or '.join(FIXED[name]) or 'on'}"
    experiment = experiment_of(name)
    if experiment is not None:
        return "refused", f"another experiment: {experiment}"
    if name in VALUES:
        (replacement,) = VALUES[name].values()
        return "renamed", f"`{replacement}`"
    advice = advice_for(name)
    if advice is None:
        raise KeyError(f"{name} is in no table of slime_tis/trainer/cli/slime_flags.py")
    if name in PLACEMENT:
        advice += "; `slime-tis port` converts it"
    return "refused", advice


def render() -> str:
    """The complete page."""
    rows = []
    counts = {"supported": 0, "renamed": 0, "accepted": 0, "refused": 0}
    for word in PARSER.split():
        status, text = judged(f"--{word}")
        counts[status] += 1
        escaped = text.replace("|", "\\|")
        rows.append(f"| `--{word}` | {status} | {escaped} |")
    head = HEAD.format(commit=COMMIT, total=len(rows), **counts)
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE)
