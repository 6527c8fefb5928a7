"""The functions shown in docs/custom_functions.md, run by train.py as a user would."""

import re
from pathlib import Path

import pytest

from tests.runs import ROOT, make_task, run_here

PAGE = (ROOT / "docs" / "custom_functions.md").read_text()
CORRECTION, REWARD = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_correction_shown_trains_and_reports(tmp_path: Path) -> None:
    (tmp_path / "my_correction.py").write_text(CORRECTION)
    path = f"{tmp_path / 'my_correction.py'}:cautious_tis"
    flags = [*make_task(tmp_path), "--use-tis", "--num-rollout", "1", "--custom-tis-function-path", path]
    (row,) = run_here(flags, tmp_path / "run")
    assert row["train/grad_norm"] > 0
    assert row["train/cautious_weight"] == pytest.approx(1, abs=0.1)
    doubtful = row["train/cautious_doubtful"]
    assert 0 < doubtful < 1
    assert row["train/gradient_kept_fraction"] == pytest.approx(1 - doubtful, abs=0.05)


def test_the_reward_shown_scores(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(REWARD)
    flags = [*make_task(tmp_path), "--num-rollout", "1", "--custom-rm-path", f"{tmp_path / 'my_reward.py'}:reward"]
    (row,) = run_here(flags, tmp_path / "run")
    assert row["rollout/raw_reward"] == pytest.approx(-0.01 * row["rollout/response_len"])


@pytest.mark.parametrize("path", re.findall(r"^\| `(custom_tis\.[\w.]+)`", PAGE, re.M))
def test_the_functions_listed_are_there(path: str) -> None:
    from slime_tis.user_functions import load_function

    assert load_function(path).__doc__
