"""The in-process engine: rollouts against independent forward passes and transformers, by functions, on two ranks."""

import asyncio
from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from slime_tis.trainer.data.sample import STATUS, Prompt, Sample, Sampling
from slime_tis.trainer.engines.function_rollouts import numbered, resumed_groups
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
EXACT = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        (family, seed): make_checkpoint(root / f"{family}{seed}", family, seed=seed)
        for family, seed in [("qwen2", 0), ("qwen3", 0), ("llama", 0), ("qwen3", 1)]
    }


def make_engine(path, **options):
    return LocalEngine(path, load_tokenizer(path), **options)


def weights(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict().items()


def forward_log_probs(path, sample, sampling):
    """Log-probs of the response by one forward pass over the unpadded sequence, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids, start = torch.tensor([sample.tokens]), len(sample.row.token_ids)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
    filters = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
    log_probs = log_softmax(filtered_logits(logits, **filters))
    return log_probs.gather(-1, torch.tensor(sample.response_ids)[:, None]).squeeze(-1)


def assert_log_probs(path, sample, sampling):
    torch.testing.assert_close(
        torch.tensor(sample.rollout_log_probs), forward_log_probs(path, sample, sampling), **EXACT
    )


def assert_same_samples(one, other):
    for a, b in zip(flat(one), flat(other), strict=True):
        assert a.response_ids == b.response_ids
        assert (a.response, a.status) == (b.response, b.status)
        torch.testing.assert_close(
            torch.tensor(a.rollout_log_probs), torch.tensor(b.rollout_log_probs), **EXACT
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
    prompts, tokenizer = make_prompts(path, TEXTS), load_tokenizer(path)
    groups = make_engine(path).generate(prompts, sampling, seed=5)
    assert [len(group) for group in groups] == [2] * len(TEXTS)
    assert [(sample.group_index, sample.index) for sample in flat(groups)] == [
        (n // 2, n) for n in range(10)
    ]
    for sample in flat(groups):
        assert_log_probs(path, sample, sampling)
        assert sample.row is prompts[sample.group_index]
        assert sample.response == tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        assert sample.tokens == [*sample.row.token_ids, *sample.response_ids]
        length = len(sample.response_ids)
        assert (sample.loss_mask, sample.weight_versions) == ([1] * length, [0] * length)
        assert sample.reward is None


def test_a_sample_does_not_depend_on_its_batch(checkpoints, monkeypatch):
    path = checkpoints["qwen3", 0]
    prompts, sampling = make_prompts(path, TEXTS), Sampling(max_response_len=12, n_samples=4)
    together = make_engine(path).generate(prompts, sampling, seed=3)
    engine = make_engine(path)
    assert_same_samples(
        together, [engine.generate([prompt], sampling, seed=3)[0] for prompt in prompts]
    )
    assert_same_samples(together[::-1], engine.generate(prompts[::-1], sampling, seed=3))
    for bounds in ({"max_batch": 1}, {"max_batch": 9}, {"max_batch_tokens": 150}):
        monkeypatch.setattr(
            local_engine, "ContinuousBatching", partial(ContinuousBatching, **bounds)
        )
        assert_same_samples(together, make_engine(path).generate(prompts, sampling, seed=3))
    fewer = engine.generate(prompts, Sampling(max_response_len=12, n_samples=2), seed=3)
    assert_same_samples([group[:2] for group in together], fewer)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_greedy_is_that_of_transformers(checkpoints, family):
    path = checkpoints[family, 0]
    prompts = make_prompts(path, TEXTS)
    groups = make_engine(path).generate(
        prompts, Sampling(temperature=0.0, max_response_len=25), seed=0
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt, (sample,) in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=25
        )
        assert sample.tokens == expected[0].tolist()
        assert_log_probs(path, sample, Sampling(max_response_len=25))


def test_updated_weights_are_sampled_from_under_their_version(checkpoints):
    old, new = checkpoints["qwen3", 0], checkpoints["qwen3", 1]
    engine, sampling = make_engine(old), Sampling(max_response_len=8, n_samples=2)
    engine.update_weights(lambda: iter(weights(new)), version=7)
    groups = engine.generate(make_prompts(old, TEXTS), sampling, seed=0)
    for sample in flat(groups):
        assert sample.weight_versions == [7] * len(sample.response_ids)
        assert_log_probs(new, sample, sampling)
    assert_same_samples(
        groups, make_engine(new).generate(make_prompts(new, TEXTS), sampling, seed=0)
    )


def test_a_tied_output_layer_may_be_missing_from_an_update(tmp_path):
    old = make_checkpoint(tmp_path / "old", "qwen3", tie_word_embeddings=True)
    new = make_checkpoint(tmp_path / "new", "qwen3", tie_word_embeddings=True, seed=1)
    engine, sampling = make_engine(old), Sampling(max_response_len=8)
    expected = make_engine(new).generate(make_prompts(new, TEXTS), sampling, seed=0)
    engine.update_weights(
        lambda: [(name, w) for name, w in weights(new) if name != "lm_head.weight"], version=1
    )
    assert_same_samples(expected, engine.generate(make_prompts(old, TEXTS), sampling, seed=0))
    engine.update_weights(lambda: weights(new), version=2)
    assert_same_samples(expected, engine.generate(make_prompts(old, TEXTS), sampling, seed=0))


def test_an_update_that_does_not_fit_is_refused(checkpoints):
    path = checkpoints["qwen3", 0]
    engine, held = make_engine(path), dict(weights(path))
    wrong = {
        "has 'model.layers.9.mlp.up_proj.weight'": {
            **held,
            "model.layers.9.mlp.up_proj.weight": torch.zeros(2),
        },
        r"'model\.norm\.weight' of shape \(5,\)": {**held, "model.norm.weight": torch.zeros(5)},
        "lacks 2 parameters": {
            name: tensor for name, tensor in held.items() if "q_norm" not in name
        },
    }
    for message, tensors in wrong.items():
        with pytest.raises(ValueError, match=message):
            engine.update_weights(tensors.items, version=3)
        assert engine.weight_version == 0


def test_checkpoints_have_a_config_and_their_eos(tmp_path):
    for load in (load_tokenizer, lambda path: load_model(path, torch.float32)):
        with pytest.raises(
            ValueError, match=r"--hf-checkpoint is '.*/none',? (which has no tok|but holds no conf)"
        ):
            load(tmp_path / "none")
    path = make_checkpoint(tmp_path, "llama")
    model, tokenizer = load_model(path, torch.float32), load_tokenizer(path)
    for configured, expected in ((7, (7,)), ([7, 9], (7, 9)), (None, (EOS,))):
        model.generation_config.eos_token_id = configured
        assert eos_token_ids(model, tokenizer) == expected


SIZE = 2


def fail_on_rank_1(items):
    if dist.get_rank() == 1:
        raise ValueError(f"item {items[0]} is bad.")
    return items


def work(rank, path, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=SIZE)
    engine, prompt = (
        LocalEngine(path, load_tokenizer(path)),
        Prompt(index=0, text="a", token_ids=(1, 5)),
    )
    with pytest.raises(ValueError, match=r"item 11 is bad\."):
        map_over_ranks(fail_on_rank_1, [10, 11, 12])
    samples = engine.generate([prompt] * 3, Sampling(max_response_len=6), 4)
    torch.save([group[0].tokens for group in samples], f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_sample_as_one_and_fail_together(tmp_path, checkpoint, tokenizer):
    spawn(work, args=(str(checkpoint), str(tmp_path)), nprocs=SIZE)
    prompts = [Prompt(index=0, text="a", token_ids=(1, 5))] * 3
    alone = LocalEngine(checkpoint, tokenizer).generate(prompts, Sampling(max_response_len=6), 4)
    for rank in range(SIZE):
        assert torch.load(tmp_path / f"{rank}.pt", weights_only=False) == [
            group[0].tokens for group in alone
        ]


RUN = Sampling(max_response_len=10, n_samples=3)


@pytest.fixture
def engine(checkpoint):
    return LocalEngine(checkpoint, load_tokenizer(checkpoint))


def prompts_of(checkpoint):
    prompts = make_prompts(checkpoint, ["31415>", "7>", "abc def"])
    return [*prompts, prompts[1]]


async def one_turn(sample, engine):
    answer = await engine.generate(sample.tokens)
    sample.append_response_tokens(tokens=answer.token_ids, log_probs=answer.log_probs)
    sample.response, sample.weight_versions = answer.text, answer.weight_versions
    sample.status = STATUS[answer.finish_reason]
    return [sample]


def test_samples_are_numbered_and_belong_to_their_prompts(checkpoint, engine):
    prompts = prompts_of(checkpoint)
    future = engine.submit(prompts, RUN, 5, function=one_turn, concurrency=2)
    groups = future.result()
    assert future.progress == (12, 12)
    assert [[sample.row for sample in group] for group in groups] == [
        [prompt] * 3 for prompt in prompts
    ]
    samples = [sample for group in groups for sample in group]
    assert [(s.group_index, s.index, s.rollout_id) for s in samples] == [
        (n // 3, n, n) for n in range(12)
    ]
    tokenizer = load_tokenizer(checkpoint)
    for sample in samples:
        assert sample.response == tokenizer.decode(sample.response_ids, skip_special_tokens=True)
    assert (
        len({tuple(sample.response_ids) for sample in (*groups[1], *groups[3])}) == 6
    )  # a prompt that occurs twice


def test_a_failure_of_the_model_ends_the_rollout_though_functions_swallow_it(
    checkpoint, engine, monkeypatch
):
    seen = []

    async def careless(sample, engine):
        try:
            return await one_turn(sample, engine)
        except Exception as error:
            seen.append(str(error))
            return [sample]

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._model, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=careless, concurrency=7)
    assert len(seen) >= 7 and set(seen) == {"out of memory"}


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


@pytest.mark.parametrize("asks", [True, False], ids=["sampling", "busy elsewhere"])
def test_an_interrupt_is_honoured_between_decode_steps(checkpoint, asks, monkeypatch):
    steps = []

    def check_interrupts():
        steps.append(1)
        if len(steps) == 3:
            raise Interrupted("SIGINT")

    async def elsewhere(sample, engine):
        await asyncio.Event().wait()

    monkeypatch.setattr(
        "slime_tis.trainer.engines.local.continuous_batching.SAFE_POINT_INTERVAL", 0.001
    )
    engine = LocalEngine(checkpoint, load_tokenizer(checkpoint), check_interrupts=check_interrupts)
    with pytest.raises(Interrupted):
        engine.submit(
            prompts_of(checkpoint), RUN, 5, function=one_turn if asks else elsewhere, concurrency=6
        )
    assert len(steps) == 3


def test_weights_stay_the_same_while_functions_ask(checkpoint, engine):
    async def updates(sample, asked):
        engine.update_weights(lambda: iter(()), 1)

    with pytest.raises(RuntimeError, match="weights cannot change"):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=updates, concurrency=6)
    engine.update_weights(lambda: iter(engine._weights.items()), 1)
    assert engine.weight_version == 1


def test_the_local_engine_has_no_stragglers(checkpoint, engine):
    with pytest.raises(ValueError, match="completes all groups"):
        engine.submit(
            prompts_of(checkpoint), RUN, 5, function=one_turn, concurrency=6, num_groups=2
        )


def test_what_is_unfinished_is_gone_on_with():
    """One aborted sample is handed back; an aborted one of several begins anew; complete ones stay."""
    row = Prompt(index=9, text="a", token_ids=(1, 5))

    def sample(rollout, status, tokens=(1, 5, 6)):
        return Sample(
            prompt_row=row,
            rollout_id=rollout,
            tokens=list(tokens),
            response_length=len(tokens) - 2,
            status=status,
        )

    done, aborted = Sample.Status.COMPLETED, Sample.Status.ABORTED
    group = [
        sample(3, done),
        sample(4, aborted),
        sample(5, done),
        sample(5, aborted),
        sample(6, Sample.Status.PENDING, (1, 5)),
    ]
    groups = resumed_groups([group], [row], 2, seed=7)
    assert [[call.complete for call in calls] for calls in groups] == [
        [True, False, False, False],
        [False, False],
    ]
    assert groups[0][1].first_sample() is group[1]
    assert [call.first_sample().tokens for call in groups[0][2:]] == [[1, 5], [1, 5]]
    assert [call.key.occurrence for calls in groups for call in calls] == [0, 0, 0, 0, 1, 1]
    assert [s.rollout_id for s in numbered(groups)[0]] == [0, 1, 2, 2, 3]
    assert [call.key.sample for call in resumed_groups([], [row], 3, 1)[0]] == [0, 1, 2]
