"""Routed experts of servers: asked for, checked, put together over several requests, or omitted."""

import base64
import json
import logging
import re
from functools import partial
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.hf_directory import MoeSizes
from slime_tis.trainer.data.sample import Sample, Sampling
from slime_tis.trainer.engines.function_requests import Generation, RequestOptions
from slime_tis.trainer.engines.local.routing import has_usable_experts
from slime_tis.trainer.engines.sglang import expert_text
from slime_tis.trainer.engines.sglang import responses as sampling_module
from slime_tis.trainer.engines.sglang.expert_text import ExpertText
from slime_tis.trainer.engines.sglang.responses import PendingSample
from slime_tis.trainer.engines.sglang.schema import (
    ExpertLayout,
    GenerateRequest,
    max_answer_bytes,
    parse_generation,
)
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.rollout.sglang.fake_sglang import (
    EXPERTS,
    LAYERS,
    chosen_experts,
    continuation,
    spoiled,
    wait_until,
)
from tests.rollout.sglang.rollouts import EARLY, LATE, PROMPTS, assert_exact, held
from tests.samples import flat, reloaded

SIZES = MoeSizes(
    layers=tuple(range(LAYERS)),
    num_experts=EXPERTS,
    top_k=2,
    intermediate_size=24,
    shared_intermediate_size=None,
)
SAMPLING = Sampling(max_response_len=20, n_samples=3, return_routed_experts=True)
LONG = Sampling(max_response_len=30, n_samples=2, return_routed_experts=True)
SHORT = next(prompt for prompt in EARLY if len(continuation(list(prompt.token_ids), 9)) >= 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", num_hidden_layers=LAYERS)


@pytest.fixture
def start(start):
    return partial(start, sampling=SAMPLING)


def assert_experts(sample):
    """Every row has the choice of the weights that sampled the token after it; the prompt's, of the
    first token."""
    first = len(sample.row.token_ids)
    of_next = [
        sample.weight_versions[max(place + 1 - first, 0)] for place in range(len(sample.tokens) - 1)
    ]
    expected = [
        chosen_experts(token, version)
        for token, version in zip(sample.tokens, of_next, strict=False)
    ]
    assert (
        sample.rollout_routed_experts is not None
        and sample.rollout_routed_experts.dtype == torch.uint8
    )
    assert sample.rollout_routed_experts.tolist() == expected
    assert has_usable_experts(sample, SIZES)


def test_samples_come_with_the_experts_of_all_tokens_that_were_fed(start):
    run = start(2)
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(groups, PROMPTS)
    for sample in flat(groups):
        assert_experts(sample)
    assert all(
        body["return_routed_experts"] and body["routed_experts_start_len"] == 0
        for body in run.requests
    )


def test_an_evaluation_asks_for_none_and_servers_without_the_flag_are_refused(start):
    run = start(1)
    groups = run.engine.generate(PROMPTS[:2], Sampling(max_response_len=20), seed=0)
    assert all(sample.rollout_routed_experts is None for sample in flat(groups))
    assert not any("return_routed_experts" in body for body in run.requests)
    flags = "--use-rollout-routing-replay or --measure-routing-mismatch"
    with pytest.raises(ValueError, match=f"^{flags} is on"):
        start(2, lambda servers: servers[1].info.update(enable_return_routed_experts=False))


def test_updates_in_mid_request_leave_the_experts_of_earlier_tokens(start):
    run = start(2)
    with held(run, 5):
        pending = run.engine.submit(LATE[:3], LONG, seed=0)
        wait_until(lambda: run.num_held == 6)
        run.update(1)
        for server in run.servers:
            server.stop_after = 9
        wait_until(lambda: run.num_held == 6)
        run.update(2)
    groups = pending.result()
    assert_exact(groups, LATE[:3], LONG)
    for sample in flat(groups):
        assert sample.weight_versions == [0] * 5 + [1] * 9 + [2] * 16
        assert_experts(sample)
    starts = sorted(body["routed_experts_start_len"] for body in run.requests)
    assert starts == [0] * 6 + [7] * 6 + [16] * 6
    assert all(
        body["routed_experts_start_len"]
        == (0 if len(body["input_ids"]) == 3 else len(body["input_ids"]) - 1)
        for body in run.requests
    )


def stragglers(run):
    """Two groups that have 2 to 8 tokens when a third one is complete."""
    with held(run, 2):
        pending = run.engine.submit([LATE[0], SHORT, LATE[1]], LONG, seed=0, num_groups=1)
        wait_until(lambda: run.num_held == 6)
        run.servers[0].stop_after = 8
        assert_exact(pending.result(), [SHORT], LONG)
    return run.engine.unfinished()


def test_stragglers_go_on_from_the_experts_that_they_have_after_a_checkpoint_too(start):
    run = start(1)
    left = stragglers(run)
    for sample in flat(left):
        assert sample.status is Sample.Status.ABORTED
        assert_experts(sample)
    lengths = [len(sample.response_ids) for sample in flat(left)]
    stored = reloaded(left)
    run.update(1)
    run.engine.resume_unfinished(stored)
    groups = run.engine.submit([], LONG, seed=1, num_groups=2).result()
    assert_exact(groups, [LATE[0], LATE[1]], LONG)
    for sample, length in zip(flat(groups), lengths, strict=True):
        assert sample.weight_versions == [0] * length + [1] * (30 - length)
        assert_experts(sample)


def test_stragglers_without_all_experts_get_none(start, caplog):
    run = start(1)
    (one, other), second = stragglers(run)
    one.rollout_routed_experts = None
    other.rollout_routed_experts = other.rollout_routed_experts[:-1]
    run.engine.resume_unfinished([[one, other], second])
    groups = run.engine.submit([], LONG, seed=1, num_groups=2).result()
    assert_exact(groups, [LATE[0], LATE[1]], LONG)
    assert [sample.rollout_routed_experts is None for sample in flat(groups)] == [
        True,
        True,
        False,
        False,
    ]
    assert sum("return_routed_experts" not in body for body in run.requests) == 2
    assert not caplog.records


def test_a_request_that_an_update_did_not_end_has_none(start, monkeypatch, caplog):
    monkeypatch.setattr(sampling_module, "ABORT_TIMEOUT", 0.05)
    run = start(1)
    run.servers[0].deaf = True
    with held(run, 5):
        pending = run.engine.submit(LATE[:1], LONG, seed=0)
        wait_until(lambda: run.num_held == 2)
        run.update(1)
    for sample in flat(pending.result()):
        assert sample.weight_versions == [0] * 5 + [1] * 25
        assert sample.rollout_routed_experts is None
    assert "updated in the middle" in caplog.text


def with_text(change):
    def edit(answer):
        answer["meta_info"]["routed_experts"] = change(answer["meta_info"]["routed_experts"])

    return spoiled(edit)


def with_rows(change):
    """A fault that changes the rows of an answer, in place if `change` returns None."""

    def text(encoded):
        rows = np.frombuffer(base64.b64decode(encoded), "<i4").reshape(-1, LAYERS, 2).copy()
        changed = change(rows)
        return base64.b64encode((rows if changed is None else changed).tobytes()).decode()

    return with_text(text)


HOSTILE = {
    "absent": (
        spoiled(lambda answer: answer["meta_info"].pop("routed_experts")),
        "it has no routed_experts",
    ),
    "a row too few": (with_rows(lambda rows: rows[1:]), r"has \d+ characters, not \d+"),
    "not base64": (with_text(lambda text: "!" + text[1:]), "is not base64 of whole rows"),
    "an expert too many": (
        with_rows(lambda rows: rows[0, 1].fill(EXPERTS)),
        "to 8, but there are 8",
    ),
    "the same expert twice": (
        with_rows(lambda rows: rows[1].fill(3)),
        "the same expert twice for a token",
    ),
    "a layer of zeros": (with_rows(lambda rows: rows[:, 1].fill(0)), "is all zeros in layer 1"),
}


@pytest.mark.parametrize(("fault", "problem"), HOSTILE.values(), ids=list(HOSTILE))
def test_a_sample_whose_experts_cannot_be_has_none_and_the_first_is_reported(
    fault, problem, start, caplog
):
    run = start(1)
    run.servers[0].faults.extend([fault, fault])
    with caplog.at_level(logging.WARNING):
        groups = run.engine.generate(LATE[:2], SAMPLING, seed=0)
    assert_exact(groups, LATE[:2])
    without = [sample for sample in flat(groups) if sample.rollout_routed_experts is None]
    assert len(without) == 2
    for sample in flat(groups):
        if sample.rollout_routed_experts is not None:
            assert_experts(sample)
    (record,) = caplog.records
    assert "no experts that can be replayed" in record.getMessage()
    assert re.search(problem, record.getMessage())
    assert run.engine.metrics()["rollout/sglang_malformed_responses"] == 0


def layout(**fields):
    sizes = {
        "layers": (0, 1),
        "num_experts": 8,
        "top_k": 2,
        "intermediate_size": 4,
        "shared_intermediate_size": None,
    }
    num_hidden_layers = fields.pop("num_hidden_layers", 2)
    return ExpertLayout(num_hidden_layers=num_hidden_layers, moe=MoeSizes(**{**sizes, **fields}))


def test_bytes_of_experts_and_one_of_its_own_by_hand():
    # 48 layers of 8 experts of 4 bytes are 1,536 bytes, in base64 2,048.
    qwen3_30b = layout(num_hidden_layers=48, layers=tuple(range(48)), num_experts=128, top_k=8)
    assert qwen3_30b.num_bytes(1) == 2048
    assert qwen3_30b.num_bytes(1000) == 2_048_000
    assert layout(num_hidden_layers=1, layers=(0,), top_k=1).num_bytes(1) == 8
    assert max_answer_bytes(1000) == 262_144 + 256_000
    one = layout(layers=(0,), num_hidden_layers=1, top_k=1)
    assert read({"routed_experts": base64.b64encode(bytes(8)).decode()}, one)[1].experts(
        2
    ).tolist() == [[[0]], [[0]]]


def read(answer, layout, cuts=(), separators=(",", ":")):
    """What is left of an answer that arrives in parts, and the reader of its experts."""
    body, text = json.dumps(answer, separators=separators).encode(), ExpertText(layout)
    places = [0, *sorted(cut % len(body) for cut in cuts), len(body)]
    kept = b"".join(text.cut(body[start:end]) for start, end in pairwise(places)) + text.end()
    return json.loads(kept), text


@given(
    st.integers(1, 5),
    st.sampled_from([((0, 1, 2), 3), ((1, 2), 3), ((1,), 2), ((0, 2), 4)]),
    st.sampled_from([(4, 2), (8, 3), (256, 8), (257, 2), (512, 1)]),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 2**16), max_size=5),
)
def test_what_was_encoded_is_decoded_without_dense_layers(rows, layers, sizes, seed, cuts):
    (sparse, num_layers), (num_experts, top_k) = layers, sizes
    chance = np.random.default_rng(seed)
    experts = np.argsort(chance.random((rows, num_layers, num_experts)), -1)[..., :top_k].astype(
        "<i4"
    )
    dense = [layer for layer in range(num_layers) if layer not in sparse]
    experts[:, dense] = 0
    shape = layout(
        num_hidden_layers=num_layers, layers=sparse, num_experts=num_experts, top_k=top_k
    )
    answer = {
        "text": 'say \\"routed_experts":"',
        'a name with "routed_experts': "AAAA",
        "routed_experts": base64.b64encode(experts.tobytes()).decode(),
        "more": 1,
    }
    with mock.patch.object(expert_text, "BLOCK_CHARACTERS", 64):  # several blocks
        rest, text = read(answer, shape, cuts)
    assert rest == answer | {"routed_experts": ""}
    found = text.experts(rows)
    assert found.dtype == (torch.uint8 if num_experts <= 256 else torch.int16)
    assert np.array_equal(found.numpy(), experts[:, list(sparse)])


def test_a_text_that_names_experts_is_no_experts():
    encoded = base64.b64encode(np.array([[[0, 1], [2, 3]]] * 2, dtype="<i4").tobytes()).decode()
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-1.0, 4, '"routed_experts":"AAAA"'], [-1.0, 5, None]],
        "weight_versions": [{"version": "0", "start": 0, "end": 2}],
        "routed_experts": encoded,
    }
    answer = {
        "text": '"routed_experts": "BBBB"',
        'a "routed_experts': "CC",
        "output_ids": [4, 5],
        "meta_info": meta,
    }
    request = GenerateRequest(
        input_ids=[1],
        sampling=Sampling(max_response_len=2),
        max_new_tokens=2,
        request_id="",
        first_experts=0,
    )
    for separators in ((",", ":"), (", ", ": "), (" , ", " : ")):
        size = len(json.dumps(answer, separators=separators))
        for cuts in ([], range(size), *([cut] for cut in range(size))):
            rest, text = read(answer, layout(), cuts, separators)
            assert (
                rest["meta_info"]["routed_experts"] == ""
                and text.experts(2).tolist() == [[[0, 1], [2, 3]]] * 2
            )
        generation, problem = parse_generation(
            json.dumps(rest).encode(), request, experts=text.experts
        )
        assert problem is None and generation.routed_experts is not None
        assert generation.routed_experts.tolist() == [[[0, 1], [2, 3]]] * 2


def completion(experts, finish_reason):
    return Generation(
        token_ids=[5],
        log_probs=[-1.0],
        weight_versions=[0],
        text="",
        finish_reason=finish_reason,
        routed_experts=torch.tensor(experts, dtype=torch.uint8)[..., None],
    )


def test_one_expert_per_token_is_judged_over_the_whole_response():
    for last, unrecorded in (([0, 0], 0), ([0, 3], 0), ([6, 0], 1), ([6, 3], None)):
        pending = PendingSample(prompt_ids=list(SHORT.token_ids), max_new_tokens=8)
        pending.append(completion([[0, 0]] * len(SHORT.token_ids), "abort"))
        assert pending.unrecorded_layer is None  # the rows to come may be others
        pending.append(completion([last], "stop"))
        assert pending.unrecorded_layer == unrecorded
        experts = pending.generation(make_tokenizer(), RequestOptions(sampling=LONG)).routed_experts
        assert (
            experts is None
            if unrecorded is not None
            else experts is not None and experts[-1, :, 0].tolist() == last
        )
