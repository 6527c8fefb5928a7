"""The probe of --check-weight-sync, and what is refused when set-up ends half-way."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.correction.context_parallel import Ranks
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.weight_sync import PROBE_PROMPTS, PROBE_TOKENS, compare, make_probe, max_gap
from tests.runs import read_metrics, run_apart, run_here


def prompts(*texts):
    return [SimpleNamespace(token_ids=ids) for ids in texts]


def test_the_probe_begins_with_the_longest_prompt():
    assert make_probe(prompts((1,), (4, 5, 6), (1,), (2, 3))) == (4, 5, 6, 1, 2, 3)


def test_the_probe_is_cut_to_its_limit():
    assert make_probe(prompts((1,), (4, 5, 6), (2, 3)), 5) == (4, 5, 6, 1, 2)
    assert make_probe(prompts((9,) * 1000)) == (9,) * PROBE_TOKENS


def test_the_probe_of_one_token_repeats_it():
    assert make_probe(prompts((7,))) == (7, 7)


def test_the_probe_takes_a_limited_number_of_prompts():
    assert len(make_probe(prompts(*((number,) for number in range(1000))))) == PROBE_PROMPTS


@pytest.mark.parametrize(
    ("tokens", "trains_in", "precision", "bound"),
    [
        pytest.param(16, "fp32", "fp32", 0.02, id="0.01 · (1 + 4/√16)"),
        pytest.param(256, "fp32", "bf16", 0.1875, id="0.15 · (1 + 4/√256)"),
        pytest.param(256, "bf16", "fp32", 0.1875, id="training is coarser"),
        pytest.param(256, "bf16", "fp8", 0.625, id="the engine is coarser"),
        pytest.param(256, "fp32", None, 0.625, id="an engine that does not say"),
    ],
)
def test_the_bound_of_the_gap(tokens, trains_in, precision, bound):
    assert max_gap(trains_in, precision, tokens) == pytest.approx(bound)


ALONE = SimpleNamespace(
    is_last_stage=True, data_size=1, ranks=Ranks(), broadcast_from_last_stage=lambda value: value
)


def compared(r, n, earlier, trained):
    now = torch.tensor(r), torch.tensor(n)
    before = [None if one is None else torch.tensor(one) for one in (earlier, trained)]
    return compare(ALONE, *now, *before)


def test_half_of_an_update_arrived():
    found = compared([1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0])
    assert (found.gap, found.gap_before, found.movement, found.received) == (0.5, 0.5, 1.0, 0.5)
    assert found.movement_received == 0.5 and not found.is_missed()


def test_no_part_of_an_update_arrived():
    # the same as before but for a shift: nothing arrived
    missed = compared([0.3, 0.3, 0.3], [1.0, -2.0, 0.5], [0.3, 0.3, 0.3], [0.0, 0.0, 0.0])
    assert (missed.received, missed.movement_received, missed.is_missed()) == (0.0, 0.0, True)


def test_an_update_is_missed_relative_to_its_share():
    little = compared([0.2, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0])
    assert little.is_missed()  # 0.1 is below a quarter of 1
    assert not little.is_missed(share=0.3)


def test_the_first_comparison_has_no_movement():
    first = compared([0.5, math.nan], [0.0, 0.0], None, None)
    assert first.gap == math.inf and math.isnan(first.received) and not first.is_missed()


def test_weights_that_did_not_move_miss_nothing():
    unmoved = compared([0.5, 0.1], [0.0, 0.0], [0.5, 0.2], [0.0, 0.0])
    assert math.isnan(unmoved.received) and not unmoved.is_missed()


@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(16, 200),
    noise=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
)
def test_noise_of_both_engines_is_never_called_a_missed_update(seed, tokens, noise):
    generator = torch.Generator().manual_seed(seed)
    moved, first, second, third, fourth, shift = torch.randn(6, tokens, generator=generator)
    n, n_before = (moved + noise * first).tolist(), (noise * second).tolist()
    r, r_before = (moved + shift + noise * third).tolist(), (shift + noise * fourth).tolist()
    assert not compared(r, n, r_before, n_before).is_missed()
    assert compared(r_before, n, r_before, n_before).is_missed()


def write_long_prompts(directory: Path) -> tuple[str, str]:
    """Writes eight prompts of 41 tokens; returns the flag that names them."""
    chance = random.Random(0)
    rows = []
    for _ in range(8):
        text = "".join(chance.choices("0123456789abcdef", k=40))
        rows.append(json.dumps({"prompt": f"<bos>{text}>", "label": "1"}))
    file = directory / "long.jsonl"
    file.write_text("\n".join(rows) + "\n")
    return "--prompt-data", str(file)


@pytest.fixture
def long_prompts(tmp_path: Path) -> tuple[str, str]:
    return write_long_prompts(tmp_path)


@pytest.fixture
def late_engine(monkeypatch):
    """A rollout engine that misses all updates after the first."""
    usual = LocalEngine.update_weights

    def late(self, source, version):
        new = list(source())
        if version == 0:
            usual(self, lambda: new, version)
        self.weight_version = version

    monkeypatch.setattr(LocalEngine, "update_weights", late)


def message_of_the_run(run, capsys, *flags: str) -> str:
    """The error message of a run that ends with one."""
    with pytest.raises(AssertionError):
        run("--check-weight-sync", "--rollout-precision", "fp32", *flags)
    message: str = capsys.readouterr().err
    return message


def test_tensors_that_were_not_updated_stop_the_run(run, long_prompts, late_engine, capsys):
    message = message_of_the_run(run, capsys, *long_prompts)
    assert "error: parameter-sync error: after the update to step 1" in message
    assert "of the local engine differ" in message


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        pytest.param(
            "100", "on average in training and by 0 in the local engine", id="no movement"
        ),
        pytest.param("1e-9", "more than --weight-sync-bound 1e-09", id="too large a gap"),
    ],
)
def test_log_probs_that_were_not_updated_stop_the_run(
    bound, text, run, long_prompts, late_engine, monkeypatch, capsys
):
    monkeypatch.setattr(LocalEngine, "wrong_weights", lambda self, sent: {})
    message = message_of_the_run(run, capsys, *long_prompts, "--weight-sync-bound", bound)
    assert text in message


@pytest.mark.parametrize(
    "layout", [("--context-parallel-size", "2"), ("--pipeline-model-parallel-size", "2"), ()]
)
def test_ranks_agree(task, long_prompts, tmp_path, layout):
    flags = [*task, *long_prompts, "--check-weight-sync", "--num-rollout", "2"]
    alone = run_here(flags, tmp_path / "alone")
    ended = run_apart([*flags, *layout], tmp_path / "two", ranks=2)
    assert ended.returncode == 0, ended.stderr
    for row, expected in zip(read_metrics(tmp_path / "two"), alone, strict=True):
        for name in ("rollout/weight_sync_gap", "rollout/probe_movement", "rollout/probe_received"):
            assert row[name] == pytest.approx(expected[name], rel=1e-2)


@pytest.mark.parametrize(
    ("flags", "versions"),
    [
        pytest.param(("--rollout-precision", "fp32"), [1], id="the engine has loaded the weights"),
        pytest.param(("--rollout-precision", "int8"), [0, 1], id="rounded for the engine"),
        pytest.param(("--rollout-precision", "fp32", "--bf16"), [0, 1], id="rounded in training"),
    ],
)
def test_weights_that_the_engine_has_loaded_are_not_sent(flags, versions, run, monkeypatch):
    sent = []
    usual = LocalEngine.update_weights

    def recorded(self, source, version):
        sent.append(version)
        usual(self, source, version)

    monkeypatch.setattr(LocalEngine, "update_weights", recorded)
    run("--num-rollout", "1", *flags)
    assert sent == versions


def test_an_engine_with_loaded_weights_has_no_mismatch(run):
    (row,) = run("--num-rollout", "1", "--rollout-precision", "fp32")
    assert row["train/mismatch_k3_kl"] < 1e-9
