"""One generation batch on each of two processes; writes what the correction made of it to
DIRECTORY/rankN.json."""

import json
import sys
from pathlib import Path

import torch
from tiny import (
    RoundedSampler,
    trainer,
)  # this script's directory is on the path; another package is called tests

from slime_tis import RolloutCorrectionConfig

OPTIONS = {"use_tis": True, "tis_batch_normalize": True, "rs_second_moment_bound": 1e-4}


def main(directory):
    run = trainer(
        directory,
        RolloutCorrectionConfig(**OPTIONS),
        sampler=RoundedSampler(),
        extra={"log_all_metrics": True},
    )
    torch.manual_seed(run.accelerator.process_index)
    run.model.train()
    batch = run._generate_and_score_completions(next(iter(run.get_train_dataloader())))
    old, _ = run._old_policy({**batch, "old_per_token_logps": None})
    values = {
        "config": OPTIONS,
        "metrics": {
            name[11:]: row[0]
            for name, row in run._metrics["train"].items()
            if name.startswith("correction/")
        },
        "old": old.tolist(),
        "rollout": batch["sampling_per_token_logps"].tolist(),
        "mask": batch["completion_mask"].tolist(),
        "advantages": batch["advantages"].tolist(),
        "raw": list(run._logs["advantages"]),  # of all processes
    }
    (directory / f"rank{run.accelerator.process_index}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
