"""A dump with every column, masked tokens and hostile text, and its run directory."""

import json

import numpy as np

from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
    "<!--\u202eevil\u0000\u0007 &amp; \u2028"
)
MASKED_SAMPLE = 0
SAMPLES = 24


def make_table(samples=SAMPLES, tokens=24):
    """Two groups of four samples per step; every fifth has four masked tokens with −30 nats."""
    chance = np.random.default_rng(0)
    parts = []
    for i in range(samples):
        entropy = chance.gamma(1.0, 0.8, tokens)
        train = -chance.exponential(entropy + 0.05)
        rollout = train + 0.05 * (1 - np.exp(train)) * chance.normal(size=tokens)
        mask = np.ones(tokens)
        if i % 5 == MASKED_SAMPLE:
            mask[5:9], rollout[5:9] = 0, -30.0
        weight = np.exp(np.clip(train - rollout, -20, 20)) * mask
        parts.append(
            SampleParts(
                train_log_prob=train,
                rollout_log_prob=np.minimum(rollout, 0),
                loss_mask=mask,
                token=chance.integers(0, 40, tokens),
                weight=weight,
                bounded_weight=np.minimum(weight, 2.0),
                rejected=(np.abs(train - rollout) > 0.12) * mask,
                vetoed=np.full(tokens, i == 3),
                advantage=np.full(tokens, chance.normal()),
                entropy=entropy,
                weight_version=max(i // 8 - i % 2, 0)
                + ((np.arange(tokens) >= 9) & (i == 17)),  # resumed
                turn=(np.arange(tokens) >= 9) & (i % 5 == 0),
                experts=chance.integers(0, 8, (tokens, 3, 2)),
                prompt=chance.integers(0, 40, 6),
                step=i // 8,
                sample_index=i % 8,
                group=i % 8 // 4,
                reward=float(i % 3 == 0),
                truncated=i % 7 == 0,
                text=HOSTILE if i == 2 else f"answer {i}",
                prompt_text=HOSTILE if i == 1 else f"question {i}",
            )
        )
    return TokenTable.from_parts(
        parts, {"source": "slime_tis", "criteria": ["token_k1"], "old_policy": "current"}
    )


def make_run(directory, steps=20):
    """A run directory with metrics, a warning at steps 8 to 11, and the configured dumps."""
    (directory / "dumps").mkdir(parents=True)
    rows = []
    for step in range(steps):
        row = {
            "step": step,
            "rollout/raw_reward": 0.2 + step / 100,
            "train/mismatch_k3_kl": 0.06 if 8 <= step < 12 else 0.001,
            "train/mismatch_chi2_token": 0.002,
            "train/mis_eff_sample_size": 0.95,
            "train/grad_norm": None if step == 3 else 0.5,
        }
        if 8 <= step <= 12:
            row["health/mismatch"] = float(step < 12)
        rows.append(row)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(directory / "dumps" / "0.parquet", make_table())
    pattern = directory / "dumps" / "{rollout_id}.parquet"
    (directory / "config.yaml").write_text(f"save_debug_train_data: {pattern}\n")
    return directory
