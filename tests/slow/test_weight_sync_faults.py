"""Planted faults of weight updates, and fifty good ones, while a small model trains."""

import slime_tis.trainer.weight_sync
from benchmarks.weight_sync_faults import FAULTS, Planter
from tests.test_weight_sync import long_prompts

__all__ = ["long_prompts"]


def test_planted_faults_are_caught_and_fifty_good_updates_raise_no_alarm(run, task, long_prompts, monkeypatch):
    planter = Planter(checkpoint=task[task.index("--hf-checkpoint") + 1], plant_at=[2, 50])
    monkeypatch.setattr(slime_tis.trainer.weight_sync, "check_weight_sync", planter)
    rows = run(*long_prompts, "--check-weight-sync", "--num-rollout", "50", "--lr", "1e-4")
    assert len(rows) == 50 and all(0 < row["rollout/weight_sync_gap"] < 0.1 for row in rows)
    good = [row for row in planter.rows if not row.fault]
    assert len(good) == 5 * 51 and all((row.wrong_tensors, row.log_probs) == (0, "nothing") for row in good)
    faults = [row for row in planter.rows if row.fault]
    assert len(faults) == 5 * 2 * len(FAULTS) and all(row.wrong_tensors > 0 for row in faults)
    for row in faults:  # an engine that shows no weights is judged by its log-probs
        if row.fault == "no update" and row.is_judged_by_movement:
            assert row.log_probs == "movement", row
