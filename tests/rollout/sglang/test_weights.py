"""Rollouts while weights change: every token carries the version of the weights that sampled it."""

import time
from dataclasses import replace

import pytest
import torch

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.rollout_engine import SentRows
from slime_tis.trainer.engines.servers.weights.checksums import is_stale, server_name
from slime_tis.trainer.engines.sglang.sglang_answers import ServerDescription
from slime_tis.trainer.engines.sglang.sglang_api import server_precision
from tests.rollout.sglang.fake_sglang import REFUSED, spoiled, wait_until, when
from tests.rollout.sglang.rollouts import LATE, PROMPTS, SAMPLING, assert_exact, held, versions_of
from tests.samples import flat


def test_an_answer_from_other_weights_is_retried(start):
    run = start(2)
    sampling = Sampling(max_response_len=20)
    for server in run.servers:
        server.faults.append(
            spoiled(lambda answer: answer["meta_info"]["weight_versions"][0].update(version="99"))
        )
    assert_exact(run.engine.generate(PROMPTS[:1], sampling, seed=0), PROMPTS[:1], sampling)
    assert run.engine.metrics()["rollout/sglang_retries"] == 2


def test_a_returning_server_reads_weights_without_the_trainer(start):
    run = start(1, sglang_weight_sync="disk")
    run.update(1)
    iterated = run.weights.iterated
    run.servers[0].stop_after = 2
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    wait_until(lambda: run.servers[0].at_once)
    run.servers[0].die()
    run.servers[0].stop_after = None
    wait_until(lambda: run.engine.metrics()["rollout/sglang_deaths"] == 1)
    run.servers[0].come_back()
    wait_until(lambda: run.engine.metrics()["rollout/sglang_returns"] == 1)
    groups = pending.result()
    assert_exact(groups, PROMPTS)
    assert versions_of(groups) == {1}
    assert run.weights.iterated == iterated


def used(version):
    def prepare(servers):
        servers[0].weight_version = str(version)
        servers[0].version = version

    return prepare


@pytest.mark.parametrize("version", [7, 0], ids=["version 7", "the version of the start"])
def test_weights_of_an_earlier_run_are_replaced_first(start, version):
    run = start(2, used(version))
    run.servers[1].stop_after = 0
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    when(lambda: run.sync.pushes, run.release)
    assert_exact(pending.result(), PROMPTS)
    assert run.sync.pushes == [([run.servers[0].url], 0)]
    assert run.weights.iterated == 1


def test_restored_weights_have_the_version_of_their_source(start):
    run = start(1, used(7), weights_version=lambda: 9)
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(groups, PROMPTS)
    assert versions_of(groups) == {9}
    assert run.engine.weight_version == 0


def test_tokens_carry_the_versions_that_sampled_them(start):
    run = start(2)
    sampling = Sampling(max_response_len=12, n_samples=2)
    with held(run, 4):
        pending = run.engine.submit(LATE[:4], sampling, seed=0)
        for version in (3, 4):
            wait_until(lambda: run.num_held == 8)
            run.update(version)
            for server in run.servers:
                server.stop_after = None if version == 4 else 8
    groups = pending.result()
    assert_exact(groups, LATE[:4], sampling)
    for sample in flat(groups):
        assert sample.weight_versions == [0] * 4 + [3] * 4 + [4] * 4
    assert len(run.requests) == 8
    assert run.engine.metrics()["rollout/sglang_retries"] == 0


@pytest.fixture
def refused_update(start):
    """Two servers; the second one refused the weights of version 1."""
    run = start(2)
    run.servers[1].replies["/update_weights_from_disk"] = [REFUSED]
    run.update(1)
    return run


def test_a_server_without_the_weights_gets_no_requests(refused_update):
    run = refused_update
    assert run.engine.weight_version == 1
    assert_exact(run.engine.generate(PROMPTS[:4], SAMPLING, seed=0), PROMPTS[:4])
    assert run.servers[1].requests == []


def test_a_server_serves_again_when_it_has_the_weights(refused_update):
    run = refused_update
    run.servers[1].paused = False
    run.update(2)
    wait_until(
        lambda: run.servers[1].version == 2 or run.engine.generate(PROMPTS, SAMPLING, seed=0)
    )
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=1)
    assert_exact(groups, PROMPTS)
    assert versions_of(groups) == {2}


def test_a_returned_server_gets_weights_even_if_every_rollout_is_short(start):
    pending = []

    def wait_for_the_rollout():
        wait_until(pending[-1].future.done)

    run = start(2, check_interrupts=wait_for_the_rollout)
    run.servers[1].replies["/update_weights_from_disk"] = [REFUSED]
    run.update(1)
    run.servers[1].paused = False
    deadline = time.monotonic() + 30.0
    while run.engine.metrics()["rollout/sglang_returns"] == 0:
        assert time.monotonic() < deadline
        pending.append(run.engine.submit(PROMPTS[:1], SAMPLING, seed=0))
        pending[-1].result()
    assert run.servers[1].version == 1


def test_only_local_engines_checkpoint_weights(start):
    assert start(1).engine.can_checkpoint_weights is False
    assert LocalEngine.can_checkpoint_weights is True


def test_checkpoints_do_not_contain_the_servers_weights(start, tmp_path):
    start(1).engine.save_weights(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_servers_get_the_policys_weights_from_a_checkpoint(start, tmp_path):
    run = start(1)
    run.engine.load_weights(tmp_path, 3)
    assert run.engine.weight_version == 3
    assert run.servers[0].weight_version == "3"


def checksums(*ranks):
    return 200, {"success": True, "ranks": [{"checksums": rank} for rank in ranks]}


QKV = "model.layers.0.self_attn.qkv_proj.weight"
NORM = "model.norm.weight"
BEFORE = {QKV: "1", NORM: "2", "other": "3"}
UPDATES = {
    "no tensor changed": (BEFORE, ["model.layers.0.self_attn.q_proj.weight", NORM]),
    "one tensor changed": (BEFORE | {QKV: "4"}, [NORM]),
    "all changed": (dict.fromkeys(BEFORE, "5"), []),
}


@pytest.mark.parametrize(("after", "wrong"), UPDATES.values(), ids=UPDATES)
def test_tensors_that_an_update_did_not_change_are_named(start, after, wrong):
    run = start(2)
    server = run.servers[0]
    server.replies["/weights_checker"] = [checksums(BEFORE), checksums(after)]
    changed = SentRows(rows=torch.zeros(1), changed=True)
    sent = {
        "model.layers.0.self_attn.q_proj.weight": changed,
        NORM: changed,
        "unknown.weight": changed,
        "other": replace(changed, changed=False),
    }
    assert run.engine.wrong_weights(sent) == {}, "there is nothing to compare with"
    assert run.engine.wrong_weights(sent) == {server.url: wrong}


CHECKSUMS = {
    "nothing changed": (["1", "2"], ["1", "2"], False, True),
    "one rank changed, all must": (["1", "5"], ["1", "2"], True, True),
    # A rank may have nothing that changes.
    "one rank changed, one must": (["1", "5"], ["1", "2"], False, False),
    "all changed": (["5", "6"], ["1", "2"], True, False),
    "other ranks": (["1"], ["1", "2"], True, False),
    "no such tensor": ([], ["1", "2"], True, False),
    "more ranks than blocks": (["0"] + ["5"] * 16, ["0"] * 17, True, False),
}


@pytest.mark.parametrize(
    ("now", "before", "on_every_rank", "stale"), CHECKSUMS.values(), ids=CHECKSUMS
)
def test_a_tensor_with_the_same_checksums_is_stale(now, before, on_every_rank, stale):
    assert is_stale(now, before, on_every_rank=on_every_rank) is stale


def test_a_stale_shard_of_one_rank_is_named(start):
    run = start(1)
    server = run.servers[0]
    name = "model.layers.0.mlp.down_proj.weight"
    head = "lm_head.weight"
    rows = SentRows(rows=torch.zeros(1), changed=True, changed_everywhere=True)
    sent = {name: rows, head: rows}
    second_rank = {name: "2", head: "2"}
    server.replies["/weights_checker"] = [
        checksums({name: first, head: first}, second_rank) for first in "133"
    ]
    assert run.engine.wrong_weights(sent) == {}
    # A rank of the output layer may hold only padding.
    assert run.engine.wrong_weights(sent) == {server.url: [name]}
    assert run.engine.wrong_weights(sent) == {server.url: [name, head]}


JOINED_NAMES = {
    "self_attn.k_proj.bias": "self_attn.qkv_proj.bias",
    "self_attn.o_proj.weight": "self_attn.o_proj.weight",
    "mlp.up_proj.weight": "mlp.gate_up_proj.weight",
    "mlp.experts.17.gate_proj.weight": "mlp.experts.w13_weight",
    "mlp.experts.17.down_proj.weight": "mlp.experts.w2_weight",
}


@pytest.mark.parametrize(("name", "joined"), JOINED_NAMES.items(), ids=JOINED_NAMES)
def test_names_of_joined_tensors(name, joined):
    assert server_name(f"model.layers.3.{name}") == f"model.layers.3.{joined}"


DTYPES = [
    ("auto", {"dtype": "bfloat16"}, "bf16"),
    ("auto", {"torch_dtype": "float32"}, "fp16"),
    ("auto", {}, "fp16"),
    ("bfloat16", {}, "bf16"),
    ("half", {}, "fp16"),
    ("float32", {}, "fp32"),
    ("fp4", {}, None),
    (None, {}, None),
]


@pytest.mark.parametrize(("dtype", "model", "precision"), DTYPES)
def test_precisions_of_dtypes(dtype, model, precision):
    assert server_precision(ServerDescription(dtype=dtype), model) == precision


@pytest.fixture
def precision(start):
    """The engine's precision with servers of these dtypes."""

    def precision_of(*dtypes, quantization=None, **options):
        def prepare(servers):
            for server, dtype in zip(servers, dtypes, strict=True):
                server.info |= {"dtype": dtype, "quantization": quantization}

        return start(len(dtypes), prepare, **options).engine.weight_precision("w")

    return precision_of


def test_the_precision_is_that_of_all_servers(precision):
    assert precision("bfloat16", "bfloat16", rounding="stochastic") == "bf16"


def test_servers_with_different_precisions_have_none(precision):
    assert precision("bfloat16", "float16") is None


def test_quantized_servers_have_no_precision(precision):
    assert precision("bfloat16", quantization="fp8") is None


@pytest.mark.parametrize(
    ("dtype", "message"), [(None, "the same --dtype"), ("float32", "compute in float32")]
)
def test_stochastic_rounding_needs_a_coarser_precision(precision, dtype, message):
    with pytest.raises(ValueError, match=message):
        precision(dtype, rounding="stochastic")


def test_a_server_that_a_killed_run_left_paused_serves(start):
    run = start(1, lambda servers: setattr(servers[0], "paused", True))
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
