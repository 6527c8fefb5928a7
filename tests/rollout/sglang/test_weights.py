"""Rollouts while weights change: every token carries the version of the weights that sampled it."""

from dataclasses import replace

import pytest
import torch

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.rollout_engine import SentRows
from slime_tis.trainer.engines.sglang.server_group import server_precision
from slime_tis.trainer.engines.sglang.weights.checksums import is_stale, server_name
from tests.rollout.sglang.fake_sglang import REFUSED, spoiled, wait_until, when
from tests.rollout.sglang.rollouts import LATE, PROMPTS, SAMPLING, assert_exact, held, versions_of
from tests.samples import flat


def test_an_answer_from_other_weights_is_tried_again(start):
    run, sampling = start(2), Sampling(max_response_len=20)
    for server in run.servers:
        server.faults.append(
            spoiled(lambda answer: answer["meta_info"]["weight_versions"][0].update(version="99"))
        )
    assert_exact(run.engine.generate(PROMPTS[:1], sampling, seed=0), PROMPTS[:1], sampling)
    assert run.engine.metrics()["rollout/sglang_retries"] == 2


def test_weights_on_disk_are_given_to_a_returning_server_without_the_trainer(start):
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
        servers[0].weight_version, servers[0].version = str(version), version

    return prepare


@pytest.mark.parametrize("version", [7, 0], ids=["version 7", "the version of the start"])
def test_servers_with_weights_of_an_earlier_run_get_the_policys_first(start, version):
    run = start(2, used(version))
    run.servers[1].stop_after = 0
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    when(lambda: run.sync.pushes, run.release)
    assert_exact(pending.result(), PROMPTS)
    assert run.sync.pushes == [([run.servers[0].url], 0)]
    assert run.weights.iterated == 1


def test_weights_of_a_returning_server_carry_their_own_version(start):
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
    assert len(run.requests) == 8 and run.engine.metrics()["rollout/sglang_retries"] == 0


def test_a_server_that_fails_to_take_weights_serves_again_once_it_has_them(start):
    run = start(2)
    run.servers[1].replies["/update_weights_from_disk"] = [REFUSED]
    run.update(1)
    assert run.engine.weight_version == 1
    assert_exact(run.engine.generate(PROMPTS[:4], SAMPLING, seed=0), PROMPTS[:4])
    assert run.servers[1].requests == []
    run.servers[1].paused = False
    run.update(2)
    wait_until(
        lambda: run.servers[1].version == 2 or run.engine.generate(PROMPTS, SAMPLING, seed=0)
    )
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=1)
    assert_exact(groups, PROMPTS)
    assert versions_of(groups) == {2}


def test_weights_are_not_part_of_checkpoints(start, tmp_path):
    run = start(1)
    assert run.engine.can_checkpoint_weights is False and LocalEngine.can_checkpoint_weights is True
    run.engine.save_weights(tmp_path)
    assert list(tmp_path.iterdir()) == []
    run.engine.load_weights(tmp_path, 3)
    assert (run.engine.weight_version, run.servers[0].weight_version) == (3, "3")


def checksums(*ranks):
    return 200, {"success": True, "ranks": [{"checksums": rank} for rank in ranks]}


def test_tensors_that_did_not_change_with_the_update_are_named(start):
    run = start(2)
    first = run.servers[0]
    before = {
        "model.layers.0.self_attn.qkv_proj.weight": "1",
        "model.norm.weight": "2",
        "other": "3",
    }
    after = before | {"model.layers.0.self_attn.qkv_proj.weight": "4"}
    first.replies["/weights_checker"] = [
        checksums(each) for each in (before, before, after, dict.fromkeys(before, "5"))
    ]
    rows = SentRows(rows=torch.zeros(1), changed=True)
    names = ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "unknown.weight")
    sent = dict.fromkeys(names, rows) | {"other": replace(rows, changed=False)}
    assert run.engine.wrong_weights(sent) == {}  # there is nothing to compare with
    assert run.engine.wrong_weights(sent) == {first.url: list(names[:2])}
    assert run.engine.wrong_weights(sent) == {first.url: ["model.norm.weight"]}
    assert run.engine.wrong_weights(sent) == {first.url: []}


def test_checksums_of_ranks():
    assert is_stale(["1", "2"], ["1", "2"], on_every_rank=False)
    assert is_stale(["1", "5"], ["1", "2"], on_every_rank=True)
    assert not is_stale(
        ["1", "5"], ["1", "2"], on_every_rank=False
    )  # a rank may have nothing that changes
    for others in (["5", "6"], ["1"], []):
        assert not is_stale(others, ["1", "2"], on_every_rank=True)
    assert not is_stale(["0"] + ["5"] * 16, ["0"] * 17, on_every_rank=True)


def test_a_stale_shard_of_one_rank_is_named(start):
    run = start(1)
    (server,) = run.servers
    name, head = "model.layers.0.mlp.down_proj.weight", "lm_head.weight"
    sent = dict.fromkeys(
        (name, head), SentRows(rows=torch.zeros(1), changed=True, changed_everywhere=True)
    )
    ranks = [
        checksums(dict.fromkeys((name, head), first), {name: "2", head: "2"}) for first in "133"
    ]
    server.replies["/weights_checker"] = ranks
    assert run.engine.wrong_weights(sent) == {}
    assert run.engine.wrong_weights(sent) == {
        server.url: [name]
    }  # a rank's vocabulary may be padding
    assert run.engine.wrong_weights(sent) == {server.url: [name, head]}


def test_names_of_joined_tensors_and_precisions_of_dtypes():
    joined = {
        "self_attn.k_proj.bias": "self_attn.qkv_proj.bias",
        "self_attn.o_proj.weight": "self_attn.o_proj.weight",
        "mlp.up_proj.weight": "mlp.gate_up_proj.weight",
        "mlp.experts.17.gate_proj.weight": "mlp.experts.w13_weight",
        "mlp.experts.17.down_proj.weight": "mlp.experts.w2_weight",
    }
    layer = "model.layers.3."
    assert {name: server_name(layer + name) for name in joined} == {
        name: layer + to for name, to in joined.items()
    }
    models = [{"dtype": "bfloat16"}, {"torch_dtype": "float32"}, {}]
    assert [server_precision("auto", model) for model in models] == ["bf16", "fp16", "fp16"]
    dtypes = ("bfloat16", "half", "float32", "fp4", None)
    assert [server_precision(dtype, models[0]) for dtype in dtypes] == [
        "bf16",
        "fp16",
        "fp32",
        None,
        None,
    ]


def test_the_precision_is_that_of_all_servers_that_do_not_quantize(start):
    def precision(*dtypes, quantization=None, **options):
        def say(servers):
            for server, dtype in zip(servers, dtypes, strict=True):
                server.info |= {"dtype": dtype, "quantization": quantization}

        return start(len(dtypes), say, **options).engine.weight_precision("w")

    assert precision("bfloat16", "bfloat16", rounding="stochastic") == "bf16"
    assert precision("bfloat16", "float16") is precision("bfloat16", quantization="fp8") is None
    with pytest.raises(ValueError, match="the same --dtype"):
        precision(None, rounding="stochastic")
    with pytest.raises(ValueError, match="compute in float32"):
        precision("float32", rounding="stochastic")


def test_a_server_that_a_killed_run_left_paused_serves(start):
    run = start(1, lambda servers: setattr(servers[0], "paused", True))
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
