"""Logs that W&B and verl write, in the diagnosis."""

import wandb
from verl.utils.logger.aggregate_logger import concat_dict_to_str

from slime_tis.analysis.logs.read_log import read_log

VALUES = [0.01 * (step + 1) for step in range(12)]


def test_an_offline_run_of_wandb_is_read_with_records_over_several_blocks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with wandb.init(
        project="test", mode="offline", settings=wandb.Settings(x_disable_stats=True)
    ) as run:
        for value in VALUES:
            run.log(
                {
                    "sampling/sampling_logp_difference/mean": value,
                    "rollout_corr": {"k3_kl": 1.0},
                    "text": "x" * 40_000,
                }
            )
    wandb.teardown()  # waits for the process that writes the file
    log = read_log(tmp_path)
    assert (
        log is not None
        and [row["train/train_rollout_logprob_abs_diff"] for row in log.rows] == VALUES
    )
    assert all(row["train/mismatch_k3_kl"] == 1.0 for row in log.rows)


def test_verls_console_log_is_read(tmp_path):
    path = tmp_path / "verl.log"
    path.write_text(
        "\n".join(
            concat_dict_to_str({"rollout_corr/k3_kl": v, "lr": 1e-6}, step)
            for step, v in enumerate(VALUES)
        )
    )
    log = read_log(path)
    assert log is not None and [row["train/mismatch_k3_kl"] for row in log.rows] == VALUES
