"""The in-process engine against independent forward passes and transformers."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from slime_tis.trainer.data.sample import STATUS, Prompt, Sample, Sampling
from slime_tis.trainer.engines.function_rollouts import FunctionCall, numbered, resumed_groups
from slime_tis.trainer.engines.local import local_engine as local_engine
from slime_tis.trainer.engines.local.continuous_batching import ContinuousBatching
from slime_tis.trainer.engines.local.load_model import eos_token_ids, load_model, load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.local.token_sampling import filtered_logits, log_softmax
from slime_tis.trainer.rank_collectives import map_over_ranks
from slime_tis.trainer.stop_signals import Interrupted
from tests.checkpoints import EOS, make_checkpoint
from tests.rollout.conftest import make_prompts
from tests.runs import spawn
from tests.samples import flat

TEXTS = ["31415>", "7>", "abc def + 12>", "Q: 2*3?", "00"]
ATOL = 1e-5
"""Largest difference of log-probs, nats."""
Groups = list[list[Sample]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Checkpoints by family and seed."""
    root = tmp_path_factory.mktemp("checkpoints")
    paths = {}
    for family, seed in [("qwen2", 0), ("qwen3", 0), ("llama", 0), ("qwen3", 1)]:
        paths[family, seed] = make_checkpoint(root / f"{family}{seed}", family, seed=seed)
    return paths


def make_engine(path: Path, **options: Any) -> LocalEngine:
    return LocalEngine(path, load_tokenizer(path), **options)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict())


def forward_log_probs(path: Path, sample: Sample, sampling: Sampling) -> torch.Tensor:
    """Log-probs of the response by one forward pass over the unpadded sequence, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([sample.tokens])
    start = len(sample.row.token_ids)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
    filtered = filtered_logits(
        logits, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
    )
    response = torch.tensor(sample.response_ids)[:, None]
    return log_softmax(filtered).gather(-1, response).squeeze(-1)


def assert_log_probs(path: Path, sample: Sample, sampling: Sampling) -> None:
    reported = torch.tensor(sample.rollout_log_probs)
    torch.testing.assert_close(
        reported, forward_log_probs(path, sample, sampling), rtol=0.0, atol=ATOL
    )


def assert_same_samples(one: Groups, other: Groups) -> None:
    for first, second in zip(flat(one), flat(other), strict=True):
        assert first.response_ids == second.response_ids
        assert first.response == second.response
        assert first.status == second.status
        torch.testing.assert_close(
            torch.tensor(first.rollout_log_probs),
            torch.tensor(second.rollout_log_probs),
            rtol=0.0,
            atol=ATOL,
        )


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.6}, {"temperature": 1.3, "top_p": 0.8, "top_k": 20}],
    ids=["plain", "temperature", "temperature, top-p, top-k"],
)
def test_log_probs_are_those_of_an_independent_forward(checkpoints, family, filters):
    path = checkpoints[family, 0]
    sampling = Sampling(max_response_len=10, n_samples=2, **filters)
    for sample in flat(make_engine(path).generate(make_prompts(path, TEXTS), sampling, seed=5)):
        assert_log_probs(path, sample, sampling)


@pytest.fixture(scope="module")
def sampled(checkpoints: dict[tuple[str, int], Path]) -> Groups:
    """Two samples of each prompt."""
    path = checkpoints["qwen3", 0]
    sampling = Sampling(max_response_len=10, n_samples=2)
    return make_engine(path).generate(make_prompts(path, TEXTS), sampling, seed=5)


def test_every_prompt_has_a_group(sampled):
    assert [len(group) for group in sampled] == [2] * len(TEXTS)
    for number, group in enumerate(sampled):
        assert [sample.row.index for sample in group] == [number, number]


def test_samples_are_numbered_by_group(sampled):
    numbers = [(sample.group_index, sample.index) for sample in flat(sampled)]
    assert numbers == [(index // 2, index) for index in range(10)]


def test_tokens_are_prompt_then_response(sampled):
    for sample in flat(sampled):
        assert sample.tokens == [*sample.row.token_ids, *sample.response_ids]


def test_text_is_decoded_without_special_tokens(sampled, checkpoints):
    tokenizer = load_tokenizer(checkpoints["qwen3", 0])
    for sample in flat(sampled):
        text = tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        assert sample.response == text


def test_every_sampled_token_is_trained(sampled):
    for sample in flat(sampled):
        assert sample.loss_mask == [1] * len(sample.response_ids)
        assert sample.weight_versions == [0] * len(sample.response_ids)
        assert sample.reward is None


@dataclass(frozen=True)
class SampledTogether:
    """Four samples of each prompt in one batch."""

    path: Path
    prompts: list[Prompt]
    groups: Groups
    sampling: Sampling


@pytest.fixture(scope="module")
def together(checkpoints: dict[tuple[str, int], Path]) -> SampledTogether:
    path = checkpoints["qwen3", 0]
    prompts = make_prompts(path, TEXTS)
    sampling = Sampling(max_response_len=12, n_samples=4)
    groups = make_engine(path).generate(prompts, sampling, seed=3)
    return SampledTogether(path, prompts, groups, sampling)


def test_prompts_one_by_one_give_the_same_samples(together):
    engine = make_engine(together.path)
    groups = []
    for prompt in together.prompts:
        groups.extend(engine.generate([prompt], together.sampling, seed=3))
    assert_same_samples(together.groups, groups)


def test_the_order_of_prompts_changes_no_sample(together):
    engine = make_engine(together.path)
    groups = engine.generate(together.prompts[::-1], together.sampling, seed=3)
    assert_same_samples(together.groups[::-1], groups)


@pytest.mark.parametrize(
    "bounds", [{"max_batch": 1}, {"max_batch": 9}, {"max_batch_tokens": 150}], ids=str
)
def test_the_size_of_batches_changes_no_sample(together, monkeypatch, bounds):
    monkeypatch.setattr(local_engine, "ContinuousBatching", partial(ContinuousBatching, **bounds))
    engine = make_engine(together.path)
    groups = engine.generate(together.prompts, together.sampling, seed=3)
    assert_same_samples(together.groups, groups)


def test_fewer_samples_per_prompt_are_the_first(together):
    sampling = replace(together.sampling, n_samples=2)
    fewer = make_engine(together.path).generate(together.prompts, sampling, seed=3)
    assert_same_samples([group[:2] for group in together.groups], fewer)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_greedy_is_that_of_transformers(checkpoints, family):
    path = checkpoints[family, 0]
    prompts = make_prompts(path, TEXTS)
    sampling = Sampling(temperature=0.0, max_response_len=25)
    groups = make_engine(path).generate(prompts, sampling, seed=0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt, (sample,) in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=25
        )
        assert sample.tokens == expected[0].tolist()
        assert_log_probs(path, sample, Sampling(max_response_len=25))


def generate_five(engine: LocalEngine, path: Path) -> Groups:
    """Samples of the five prompts."""
    sampling = Sampling(max_response_len=8, n_samples=2)
    return engine.generate(make_prompts(path, TEXTS), sampling, seed=0)


def test_updated_weights_are_sampled_from(checkpoints):
    old = checkpoints["qwen3", 0]
    new = checkpoints["qwen3", 1]
    engine = make_engine(old)
    engine.update_weights(weights(new).items, version=7)
    assert_same_samples(generate_five(engine, old), generate_five(make_engine(new), new))


def test_samples_of_updated_weights_have_their_version(checkpoints):
    path = checkpoints["qwen3", 0]
    engine = make_engine(path)
    engine.update_weights(weights(path).items, version=7)
    for sample in flat(generate_five(engine, path)):
        assert sample.weight_versions == [7] * len(sample.response_ids)


@pytest.mark.parametrize("omitted", [[], ["lm_head.weight"]], ids=["complete", "without head"])
def test_a_tied_output_layer_may_be_missing_from_an_update(tmp_path, omitted):
    old = make_checkpoint(tmp_path / "old", "qwen3", tie_word_embeddings=True)
    new = make_checkpoint(tmp_path / "new", "qwen3", tie_word_embeddings=True, seed=1)
    sent = {name: weight for name, weight in weights(new).items() if name not in omitted}
    engine = make_engine(old)
    engine.update_weights(sent.items, version=1)
    assert_same_samples(generate_five(engine, old), generate_five(make_engine(new), new))


UNKNOWN = "model.layers.9.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("added", "removed", "message"),
    [
        ({UNKNOWN: torch.zeros(2)}, "nothing", f"has '{UNKNOWN}'"),
        (
            {"model.norm.weight": torch.zeros(5)},
            "nothing",
            r"'model\.norm\.weight' of shape \(5,\)",
        ),
        ({}, "q_norm", "lacks 2 parameters"),
    ],
    ids=["unknown", "another shape", "missing"],
)
def test_an_update_that_does_not_fit_is_refused(checkpoints, added, removed, message):
    path = checkpoints["qwen3", 0]
    engine = make_engine(path)
    sent = {name: weight for name, weight in weights(path).items() if removed not in name}
    with pytest.raises(ValueError, match=message):
        engine.update_weights((sent | added).items, version=3)
    assert engine.weight_version == 0


def test_a_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--hf-checkpoint is '.*/none',? which has no tok"):
        load_tokenizer(tmp_path / "none")


def test_a_missing_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--hf-checkpoint is '.*/none',? but holds no conf"):
        load_model(tmp_path / "none", torch.float32)


@pytest.mark.parametrize(
    ("configured", "expected"), [(7, (7,)), ([7, 9], (7, 9)), (None, (EOS,))], ids=str
)
def test_end_tokens_are_those_of_the_generation_config(tmp_path, configured, expected):
    path = make_checkpoint(tmp_path, "llama")
    model = load_model(path, torch.float32)
    model.generation_config.eos_token_id = configured
    # the tokenizer's end token if there is none
    assert eos_token_ids(model, load_tokenizer(path)) == expected


RANKS = 2
SAME_PROMPT = [Prompt(index=0, text="a", token_ids=(1, 5))] * 3


def fail_on_rank_1(items: Sequence[int]) -> list[int]:
    if dist.get_rank() == 1:
        raise ValueError(f"item {items[0]} is bad.")
    return list(items)


def run_rank(rank: int, path: str, out: str) -> None:
    """Samples on a rank, and writes the error of all ranks and the tokens."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=RANKS)
    error = ""
    try:
        map_over_ranks(fail_on_rank_1, [10, 11, 12])
    except ValueError as raised:
        error = str(raised)
    engine = LocalEngine(path, load_tokenizer(path))
    groups = engine.generate(SAME_PROMPT, Sampling(max_response_len=6), 4)
    tokens = [list(group[0].tokens) for group in groups]
    Path(out, f"{rank}.json").write_text(json.dumps({"error": error, "tokens": tokens}))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[tuple[str, int], Path]
) -> list[dict[str, Any]]:
    """The results of two ranks."""
    directory = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, args=(str(checkpoints["qwen3", 0]), str(directory)), nprocs=RANKS)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
def test_two_ranks_sample_as_one(ranks, checkpoints):
    engine = make_engine(checkpoints["qwen3", 0])
    groups = engine.generate(SAME_PROMPT, Sampling(max_response_len=6), 4)
    expected = [list(group[0].tokens) for group in groups]
    assert [rank["tokens"] for rank in ranks] == [expected, expected]


@pytest.mark.slow
def test_an_error_of_one_rank_ends_both(ranks):
    for rank in ranks:
        assert "item 11 is bad." in rank["error"]


RUN = Sampling(max_response_len=10, n_samples=3)


@pytest.fixture
def engine(checkpoint: Path) -> LocalEngine:
    return make_engine(checkpoint)


def prompts_of(checkpoint: Path) -> list[Prompt]:
    """Four prompts, of which the second and the last are the same."""
    prompts = make_prompts(checkpoint, ["31415>", "7>", "abc def"])
    return [*prompts, prompts[1]]


async def one_turn(sample: Sample, engine: Any) -> list[Sample]:
    """A generate function of one request."""
    answer = await engine.generate(sample.tokens)
    sample.append_response_tokens(tokens=answer.token_ids, log_probs=answer.log_probs)
    sample.response = answer.text
    sample.weight_versions = answer.weight_versions
    sample.status = STATUS[answer.finish_reason]
    return [sample]


@pytest.fixture
def by_function(checkpoint: Path, engine: LocalEngine) -> Groups:
    """Three samples of each prompt by a generate function."""
    future = engine.submit(prompts_of(checkpoint), RUN, 5, function=one_turn, concurrency=2)
    return future.result()


def test_progress_counts_samples(checkpoint, engine):
    future = engine.submit(prompts_of(checkpoint), RUN, 5, function=one_turn, concurrency=2)
    future.result()
    assert future.progress == (12, 12)


def test_samples_of_a_function_belong_to_their_prompts(checkpoint, by_function):
    rows = [[sample.row for sample in group] for group in by_function]
    assert rows == [[prompt] * 3 for prompt in prompts_of(checkpoint)]


def test_samples_of_a_function_are_numbered(by_function):
    numbers = [
        (sample.group_index, sample.index, sample.rollout_id) for sample in flat(by_function)
    ]
    assert numbers == [(index // 3, index, index) for index in range(12)]


def test_a_function_gets_the_text_of_its_tokens(checkpoint, by_function):
    tokenizer = load_tokenizer(checkpoint)
    for sample in flat(by_function):
        assert sample.response == tokenizer.decode(sample.response_ids, skip_special_tokens=True)


def test_a_prompt_that_occurs_twice_has_different_samples(by_function):
    responses = {tuple(sample.response_ids) for sample in (*by_function[1], *by_function[3])}
    assert len(responses) == 6


def test_a_failure_of_the_model_ends_the_rollout(checkpoint, engine, monkeypatch):
    """Even if the functions swallow it."""
    errors = []

    async def careless(sample, engine):
        try:
            return await one_turn(sample, engine)
        except Exception as error:
            errors.append(str(error))
            return [sample]

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._model, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=careless, concurrency=7)
    assert len(errors) >= 7
    assert set(errors) == {"out of memory"}


def test_a_failure_of_the_function_ends_the_rollout(checkpoint, engine):
    ended = []

    async def fails(sample, engine):
        if sample.index == 4:
            raise ValueError("no such tool.")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(sample.index)

    with pytest.raises(ValueError, match="no such tool"):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=fails, concurrency=6)
    assert sorted(ended) == [0, 1, 2, 3]


async def wait_for_ever(sample: Sample, engine: Any) -> list[Sample]:
    """A generate function that is busy elsewhere."""
    await asyncio.Event().wait()
    return [sample]


@pytest.mark.parametrize("function", [one_turn, wait_for_ever], ids=["sampling", "busy elsewhere"])
def test_an_interrupt_is_honoured_between_decode_steps(checkpoint, function, monkeypatch):
    steps = []

    def check_interrupts():
        steps.append(1)
        if len(steps) == 3:
            raise Interrupted("SIGINT")

    monkeypatch.setattr(
        "slime_tis.trainer.engines.local.continuous_batching.SAFE_POINT_INTERVAL", 0.001
    )
    engine = make_engine(checkpoint, check_interrupts=check_interrupts)
    with pytest.raises(Interrupted):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=function, concurrency=6)
    assert len(steps) == 3


def test_a_function_cannot_change_the_weights(checkpoint, engine):
    async def updates(sample, asked):
        engine.update_weights(lambda: iter(()), 1)

    with pytest.raises(RuntimeError, match="weights cannot change"):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=updates, concurrency=6)


def test_weights_can_change_after_a_failed_rollout(checkpoint, engine):
    async def fails(sample, asked):
        raise ValueError("no such tool.")

    with pytest.raises(ValueError, match="no such tool"):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=fails, concurrency=6)
    engine.update_weights(lambda: iter(engine._weights.items()), 1)
    assert engine.weight_version == 1


def test_the_local_engine_has_no_stragglers(checkpoint, engine):
    prompts = prompts_of(checkpoint)
    with pytest.raises(ValueError, match="completes all groups"):
        engine.submit(prompts, RUN, 5, function=one_turn, concurrency=6, num_groups=2)


ROW = Prompt(index=9, text="a", token_ids=(1, 5))


def straggler(rollout: int, status: Any, tokens: Sequence[int] = (1, 5, 6)) -> Sample:
    return Sample(
        prompt_row=ROW,
        rollout_id=rollout,
        tokens=list(tokens),
        response_length=len(tokens) - 2,
        status=status,
    )


@dataclass(frozen=True)
class ResumedGroups:
    """A group of four rollouts, of which the third has two segments, and a new group of two."""

    unfinished: list[Sample]
    groups: list[list[FunctionCall]]


@pytest.fixture
def resumed() -> ResumedGroups:
    unfinished = [
        straggler(3, Sample.Status.COMPLETED),
        straggler(4, Sample.Status.ABORTED),
        straggler(5, Sample.Status.COMPLETED),
        straggler(5, Sample.Status.ABORTED),
        straggler(6, Sample.Status.PENDING, (1, 5)),
    ]
    return ResumedGroups(unfinished, resumed_groups([unfinished], [ROW], 2, seed=7))


def test_complete_samples_are_kept(resumed):
    complete = [[call.complete for call in calls] for calls in resumed.groups]
    assert complete == [[True, False, False, False], [False, False]]


def test_one_aborted_sample_is_handed_back(resumed):
    assert resumed.groups[0][1].first_sample() is resumed.unfinished[1]


def test_rollouts_of_several_segments_begin_anew(resumed):
    assert [call.first_sample().tokens for call in resumed.groups[0][2:]] == [[1, 5], [1, 5]]


def test_a_group_with_the_same_prompt_draws_other_numbers(resumed):
    occurrences = [call.key.occurrence for calls in resumed.groups for call in calls]
    assert occurrences == [0, 0, 0, 0, 1, 1]


def test_resumed_samples_are_numbered_by_rollout(resumed):
    first = numbered(resumed.groups)[0]
    assert [sample.rollout_id for sample in first] == [0, 1, 2, 2, 3]


def test_new_samples_of_a_prompt_are_numbered():
    (calls,) = resumed_groups([], [ROW], 3, 1)
    assert [call.key.sample for call in calls] == [0, 1, 2]
