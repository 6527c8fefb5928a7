"""The study of engines: its measures by hand, its formulas, and the tables of its page."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.tables import read_rows
from slime_tis.analysis.diagnosis.causes import CAUSES
from studies.collapse.report import END, begin
from studies.engines import page, servers
from studies.engines.clients import MASKED, _vllm_top
from studies.engines.diagnosis_rows import DIAGNOSIS, DiagnosisRow
from studies.engines.dumps import Case, cases, chosen, table, verdict
from studies.engines.measures import Top, common_length, compare, kl_divergence, likeliest
from studies.engines.models import TransformersModel, megatron, megatron_scores, scored
from studies.engines.records import PLAIN, TRUNCATED, Records, Scorer, Scores, TokenSet
from studies.engines.results import RESULTS, greedy_row, pairs, read_results
from studies.engines.servers import MissingEnvironment, ServerConfig, running
from tests.checkpoints import make_checkpoint

LOG2 = math.log(2)
INFINITY = math.inf


def logs(**probabilities: float) -> dict[int, float]:
    """Log-probs of tokens 0, 1, 2, … with these probabilities, in alphabetical order."""
    return {token: math.log(p) for token, (_, p) in enumerate(sorted(probabilities.items()))}


def test_differences_by_hand() -> None:
    found = compare([-1.0, -1.0], [-1.0 + LOG2, -1.0 - LOG2])
    assert found.mean_abs == pytest.approx(LOG2)
    assert found.max_abs == pytest.approx(LOG2)
    # exp(Δ) − 1 − Δ is 1 − log 2 and −1/2 + log 2.
    assert found.k3 == pytest.approx(0.25)
    assert found.kl is None


def test_k3_keeps_the_digits_of_small_differences() -> None:
    found = compare([-1.0], [-1.0 + 2**-30])
    assert found.k3 == pytest.approx(2**-61, rel=1e-6)


def test_removed_tokens_are_counted_apart() -> None:
    found = compare([-1.0, -2.0, -INFINITY], [-1.5, -INFINITY, -INFINITY])
    assert (found.tokens, found.outside, found.mean_abs) == (1, 2, 0.5)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        pytest.param([-1.0], [math.nan], "NaN", id="NaN"),
        pytest.param([-1.0], [-1.0, -2.0], "1 and 2 tokens", id="lengths"),
        pytest.param([], [], "no token", id="nothing"),
        pytest.param([-1.0], [-INFINITY], "no token", id="nothing in common"),
    ],
)
def test_lists_that_cannot_be_compared_are_refused(
    first: list[float], second: list[float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        compare(first, second)


def test_kl_of_complete_distributions_by_hand() -> None:
    first = logs(a=0.5, b=0.25, c=0.25)
    second = logs(a=0.25, b=0.5, c=0.25)
    # 0.5 · log 2 − 0.25 · log 2
    assert kl_divergence(first, second) == pytest.approx(0.25 * LOG2)


def test_kl_takes_all_other_tokens_as_one_outcome() -> None:
    first = logs(a=0.5, b=0.25)
    second = logs(a=0.25, b=0.25)
    # The rest has 0.25 and 0.5: 0.5 · log 2 − 0.25 · log 2.
    assert kl_divergence(first, second) == pytest.approx(0.25 * LOG2)


def test_a_token_that_one_engine_did_not_record_is_in_the_rest() -> None:
    first = {7: math.log(0.5), 8: math.log(0.25)}
    second = {7: math.log(0.25)}
    # Token 8 and the rest have 0.5 and 0.75.
    expected = 0.5 * LOG2 + 0.5 * math.log(0.5 / 0.75)
    assert kl_divergence(first, second) == pytest.approx(expected)


def test_kl_takes_the_union_of_eight_tokens_each() -> None:
    first = {token: math.log(0.1) - 0.001 * token for token in range(9)}
    ninth = dict(first)
    ninth[8] -= 0.0005
    assert likeliest(first) == list(range(8))
    # The ninth token changes the rest, not the union.
    assert kl_divergence(first, ninth) == pytest.approx(0.0, abs=1e-16)


def test_kl_is_infinite_if_the_second_engine_removes_a_token() -> None:
    assert kl_divergence(logs(a=0.5, b=0.5), logs(a=1.0)) == INFINITY


def test_kl_is_finite_if_the_first_engine_removes_a_token() -> None:
    assert kl_divergence(logs(a=1.0), logs(a=0.5, b=0.5)) == pytest.approx(LOG2)


def test_the_mean_kl_leaves_infinite_positions_out() -> None:
    half = logs(a=0.5, b=0.5)
    quarter = logs(a=0.25, b=0.75)
    one = logs(a=1.0)
    found = compare([-1.0, -1.0], [-1.0, -1.0], [half, half], [quarter, one])
    assert found.kl == pytest.approx(0.5 * LOG2 + 0.5 * math.log(2 / 3))


@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=12),
    st.lists(st.floats(-1e-6, 1e-6), min_size=12, max_size=12),
)
def test_kl_of_rounding_noise_is_not_negative(logits: list[float], noise: list[float]) -> None:
    first = torch.tensor(logits, dtype=torch.float32, device="cpu").log_softmax(0)
    second = (first + torch.tensor(noise[: len(first)], device="cpu")).log_softmax(0)
    tops = [dict(enumerate(row.tolist())) for row in (first, second)]
    assert 0 <= kl_divergence(*tops) < 1e-9


def test_common_tokens_end_at_the_first_difference() -> None:
    assert common_length([1, 2, 3, 4], [1, 2, 5, 4, 6]) == 2


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        pytest.param("raw", math.log(0.5), id="raw"),
        # Squares of the probabilities: 0.25, 0.09, 0.04.
        pytest.param("temperature", math.log(0.25 / 0.38), id="temperature"),
        # The third token is removed: 0.34 / 0.38 is above top-p.
        pytest.param("processed", math.log(0.25 / 0.34), id="top-p"),
    ],
)
def test_the_three_distributions_by_hand(report: str, expected: float) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]], device="cpu").log()
    sampling = type(PLAIN)(temperature=0.5, top_p=0.8)
    found = scored(logits, [0], sampling, report)  # type: ignore[arg-type]
    assert found.log_probs == pytest.approx([expected], rel=1e-6)


def test_a_removed_token_has_no_entry_among_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]], device="cpu").log()
    found = scored(logits, [2], type(PLAIN)(temperature=0.5, top_p=0.8), "processed")
    assert found.log_probs == [-INFINITY]
    assert set(found.top[0]) == {0, 1}


def test_tokens_that_vllm_removed_are_not_among_the_likeliest() -> None:
    entries = [{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": MASKED}]
    assert _vllm_top(entries) == {3: -0.5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("engines") / "model", "qwen3")


@pytest.fixture(scope="module")
def tokens() -> TokenSet:
    return TokenSet(
        name="x",
        sampled_by="a test",
        sampling=TRUNCATED,
        prompts=[[1, 5, 9], [1, 7]],
        responses=[[4, 30, 6], [8, 9, 10, 11]],
    )


@pytest.fixture(scope="module")
def by_transformers(checkpoint: Path, tokens: TokenSet) -> list[torch.Tensor]:
    model = TransformersModel(checkpoint, "fp32")
    pairs = zip(tokens.prompts, tokens.responses, strict=True)
    return [model.in_one_pass(prompt, response) for prompt, response in pairs]


def test_decoding_gives_the_logits_of_one_pass(
    checkpoint: Path, tokens: TokenSet, by_transformers: list[torch.Tensor]
) -> None:
    model = TransformersModel(checkpoint, "fp32")
    decoded = model.decoded(tokens.prompts[1], tokens.responses[1])
    torch.testing.assert_close(decoded, by_transformers[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per_row", [1, 64], ids=["one by one", "packed"])
def test_the_trainers_layers_agree_with_transformers(
    per_row: int, checkpoint: Path, tokens: TokenSet, by_transformers: list[torch.Tensor]
) -> None:
    with megatron(checkpoint) as models:
        found = megatron_scores(models.load("fp32"), tokens, per_row)
    assert set(found) == {"raw", "temperature", "processed"}
    for report, rows in found.items():
        for row, logits, response in zip(rows, by_transformers, tokens.responses, strict=True):
            expected = scored(logits, response, TRUNCATED, report)
            assert row.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def scores(engine: str, log_probs: list[list[float]], method: str = "one pass") -> Scores:
    scorer = Scorer(engine=engine, precision="fp32", method=method, batch=64)
    top: list[list[Top]] = [[{0: value} for value in row] for row in log_probs]
    return Scores(token_set="x", scorer=scorer, version="1", log_probs=log_probs, top=top)


def test_log_probs_survive_their_file(tmp_path: Path) -> None:
    written = scores("vLLM", [[-1.5, -INFINITY]])
    Records(tmp_path).write_scores(written)
    assert Records(tmp_path).scores("x") == [written]


def test_of_sampled_tokens_the_sampler_is_the_first_of_each_pair(tokens: TokenSet) -> None:
    own = scores("vLLM", [[-1.0]], "decoded")
    others = [scores("SGLang", [[-1.0]]), scores("Megatron", [[-1.0]])]
    assert list(pairs(tokens, [others[0], own, others[1]])) == [(own, other) for other in others]


def test_greedy_answers_are_compared_up_to_the_first_difference(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for engine, response, values in (
        ("SGLang", [5, 6, 7], [-1.0, -2.0, -3.0]),
        ("vLLM", [5, 6, 8], [-1.1, -2.2, -9.0]),
    ):
        name = f"{engine}_fp32_greedy"
        records.write_set(
            TokenSet(name=name, sampled_by="", sampling=PLAIN, prompts=[[1]], responses=[response])
        )
        own = scores(engine, [values], "decoded")
        records.write_scores(Scores(**{**vars(own), "token_set": name}))
    row = greedy_row("m", records, "fp32")
    assert row.tokens == 2
    assert row.mean_abs == pytest.approx(0.15)


def test_a_missing_environment_names_the_command_that_builds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(servers, "ROOT", tmp_path)
    config = ServerConfig(engine="vLLM", checkpoint=tmp_path, precision="fp32", max_length=8)
    with (
        pytest.raises(MissingEnvironment, match="run `make vllm-env`"),
        running(config, tmp_path / "log"),
    ):
        pass


def test_names_of_dumps_are_unique() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names) == 22


def test_expected_causes_are_causes_of_the_diagnosis() -> None:
    expected = {cause for case in cases() for cause in case.expected}
    assert expected <= set(CAUSES)


def test_a_dump_has_the_log_probs_of_its_two_engines(tmp_path: Path, tokens: TokenSet) -> None:
    records = Records(tmp_path)
    records.write_set(tokens)
    records.write_scores(scores("vLLM", [[-1.0] * 3, [-2.0] * 4], "decoded"))
    records.write_scores(scores("Megatron", [[-1.5] * 3, [-2.0] * 4]))
    case = Case(
        name="x",
        token_set="x",
        rollout=("vLLM", "fp32", "decoded", "raw"),
        training=("Megatron", "fp32", "one pass", "raw"),
        expected=(),
    )
    dump = table(records, case)
    assert dump.rollout_log_prob.tolist() == [-1.0] * 3 + [-2.0] * 4
    assert dump.train_log_prob.tolist() == [-1.5] * 3 + [-2.0] * 4
    assert dump.token is not None and dump.token.tolist() == [4, 30, 6, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        pytest.param(["rounding"], "named", id="first"),
        pytest.param(["unexplained", "rounding"], "candidate", id="candidate"),
        pytest.param(["unexplained", "temperature"], "misleading", id="other candidate"),
        pytest.param(["temperature", "rounding"], "misleading", id="second"),
    ],
)
def test_verdicts_by_hand(causes: list[str], expected: str) -> None:
    side: Any = ("vLLM", "fp32", "decoded", "raw")
    case = Case(name="x", token_set="x", rollout=side, training=side, expected=("rounding",))
    assert verdict(case, causes) == expected


def test_missing_log_probs_name_the_command_that_makes_them() -> None:
    with pytest.raises(ValueError, match=r"no log-probs of vLLM fp32 .* run `make study-engines`"):
        chosen([], ("vLLM", "fp32", "decoded", "raw"))


def marked_tables() -> Iterator[tuple[str, str]]:
    yield from page.tables(read_results(RESULTS)).items()
    yield "diagnosis", page.diagnosis(read_rows(DIAGNOSIS, DiagnosisRow))


@pytest.mark.parametrize(("name", "shown"), marked_tables(), ids=lambda value: str(value)[:12])
def test_the_page_shows_the_results(name: str, shown: str) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert f"{begin(name)}{shown}\n{END}" in text, "run `make docs`"
