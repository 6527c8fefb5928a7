"""Logs that W&B and verl write, in the diagnosis."""

import wandb
from verl.utils.logger.aggregate_logger import concat_dict_to_str

from slime_tis.analysis.report.logs import read_log

VALUES = [0.01 * (step + 1) for step in range(12)]


def test_an_offline_run_of_wandb_is_read_with_records_over_several_blocks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with wandb.init(project="test", mode="offline", settings=wandb.Settings(x_disable_stats=True)) as run:
        for value in VALUES:
            run.log({"sampling/sampling_logp_difference/mean": value, "reward": {"a": 1.0}, "text": "x" * 40_000})
    wandb.teardown()  # waits for the process that writes the file
    rows = read_log(tmp_path)
    assert rows is not None and [row["train/train_rollout_logprob_abs_diff"] for row in rows] == VALUES
    assert all(row["reward/a"] == 1.0 for row in rows)


def test_verls_console_log_is_read(tmp_path):
    path = tmp_path / "verl.log"
    path.write_text(
        "\n".join(concat_dict_to_str({"rollout_corr/k3_kl": v, "lr": 1e-6}, step) for step, v in enumerate(VALUES))
    )
    rows = read_log(path)
    assert rows is not None and [row["train/mismatch_k3_kl"] for row in rows] == VALUES
