"""LoRA adapters that servers load by version, against servers that record every request."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slime_tis.peft_directory import AdapterConfig, tensor_name
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.servers.weights.adapters import OWN_NAME
from slime_tis.trainer.engines.sglang.sglang_api import adapter_flags
from tests.rollout.sglang.fake_sglang import REFUSED, recorded, wait_until
from tests.rollout.sglang.rollouts import API, PROMPTS, SAMPLING, Run, versions_of
from tests.samples import flat

ADAPTER = AdapterConfig(rank=2, alpha=8.0, targets=("q_proj",))
LAYER = "model.layers.0.self_attn.q_proj"
INFO = {"enable_lora": True, "max_lora_rank": 2, "lora_target_modules": ["q_proj", "k_proj"]}


class Adapters:
    """A and B of one layer, full of the number of the call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        self.calls += 1
        yield tensor_name(LAYER, "A"), torch.full((2, 4), float(self.calls))
        yield tensor_name(LAYER, "B"), torch.full((4, 2), float(self.calls))


def take_adapters(servers):
    for server in servers:
        server.info |= INFO


@pytest.fixture
def run(start, tmp_path):
    """An engine on two servers that take adapters."""
    return start(
        2,
        take_adapters,
        adapter=ADAPTER,
        output_dir=tmp_path,
        sglang_weight_sync="disk",
    )


def update(run: Run, version: int) -> None:
    run.engine.update_weights(Adapters(), version)


def loaded_versions(server) -> list[str]:
    return [name.split("-")[1] for name in server.adapters]


def test_a_name_carries_the_version(run):
    update(run, 7)
    (name,) = run.servers[0].adapters
    assert OWN_NAME.fullmatch(name)
    assert name.startswith("slime_tis-v7-")


def test_servers_read_the_adapter_that_was_sent(run):
    update(run, 1)
    (directory,) = run.servers[0].adapters.values()
    tensors = load_file(Path(directory) / "adapter_model.safetensors")
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        tensor_name(LAYER, "A"): [[1.0] * 4] * 2,
        tensor_name(LAYER, "B"): [[1.0] * 2] * 4,
    }


def test_an_update_pauses_no_server(run):
    update(run, 1)
    assert "pause_generation" not in run.servers[0].called


def test_every_request_names_the_adapter(run):
    update(run, 3)
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    run.engine.prompt_log_probs([3, 4, 5])
    names = {body["lora_path"] for body in run.requests}
    assert names == set(run.servers[0].adapters)
    assert versions_of(groups) == {3}


def test_likeliest_tokens_are_those_of_the_adapter(run):
    update(run, 1)
    run.engine.top_log_probs([[3, 4], [5, 6]], SAMPLING, 2)
    (name,) = run.servers[0].adapters
    assert [body["lora_path"] for body in run.requests] == [name, name]


def test_functions_get_no_address_that_ignores_the_adapter(run):
    assert run.engine.http_address is None


def rollout_over_update(run: Run):
    """A rollout that begins with version 1 and is held until the servers have version 2."""
    update(run, 1)
    for server in run.servers:
        server.stop_after = 2
    pending = run.engine.submit(PROMPTS[:4], SAMPLING, seed=0)
    wait_until(lambda: run.num_held == 4 * SAMPLING.n_samples)
    update(run, 2)
    return pending


def test_a_request_keeps_its_adapter_over_an_update(run):
    pending = rollout_over_update(run)
    run.release()
    assert versions_of(pending.result()) == {1}


def test_an_adapter_in_use_stays_loaded(run):
    pending = rollout_over_update(run)
    assert sorted(loaded_versions(run.servers[0])) == ["v1", "v2"]
    run.release()
    pending.result()


def test_an_adapter_is_unloaded_after_its_last_request(run):
    pending = rollout_over_update(run)
    run.release()
    pending.result()
    wait_until(lambda: loaded_versions(run.servers[0]) == ["v2"])


def test_files_of_an_unloaded_adapter_are_removed(run, tmp_path):
    update(run, 1)
    (first,) = tmp_path.glob("sglang_weights/weights_*")
    update(run, 2)
    wait_until(lambda: not first.exists())


def test_a_restarted_server_gets_the_adapter_before_requests(run):
    update(run, 1)
    for server in run.servers:
        server.stop_after = 2
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    wait_until(lambda: run.servers[0].at_once)
    run.servers[0].die()
    wait_until(lambda: run.engine.metrics()["rollout/sglang_deaths"] == 1)
    run.servers[0].come_back()
    wait_until(lambda: run.engine.metrics()["rollout/sglang_returns"] == 1)
    assert loaded_versions(run.servers[0]) == ["v1"]
    run.release()
    assert versions_of(pending.result()) == {1}


def test_a_lost_adapter_is_loaded_again(run):
    update(run, 1)
    # A restart between two health checks.
    for server in run.servers:
        server.adapters.clear()
    assert versions_of(run.engine.generate(PROMPTS, SAMPLING, seed=0)) == {1}
    assert run.engine.metrics()["rollout/sglang_deaths"] >= 1


def test_a_server_that_refuses_an_adapter_gets_no_requests(run):
    run.servers[0].replies["/load_lora_adapter"] = [REFUSED] * 1000
    update(run, 1)
    run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert not run.servers[0].requests


def test_an_adapter_that_is_not_listed_is_an_error(run):
    for server in run.servers:
        server.replies["/load_lora_adapter"] = [(200, {"success": True})] * 1000
    update(run, 1)
    assert run.engine.metrics()["rollout/sglang_live_servers"] == 0


def test_adapters_of_a_killed_run_are_unloaded(run):
    run.servers[0].adapters["slime_tis-v9-00000000"] = "/gone"
    update(run, 1)
    assert loaded_versions(run.servers[0]) == ["v1"]


def test_adapters_of_others_stay(run):
    run.servers[0].adapters["my-adapter"] = "/theirs"
    update(run, 1)
    assert "my-adapter" in run.servers[0].adapters


def test_the_end_of_a_run_unloads_the_adapter(run):
    update(run, 1)
    run.engine.close()
    assert run.servers[0].adapters == {}


def test_the_end_of_a_run_removes_the_files(run, tmp_path):
    update(run, 1)
    run.engine.close()
    assert not list(tmp_path.glob("sglang_weights/weights_*"))


def test_a_real_list_of_adapters_is_read():
    body = json.dumps(recorded("models")).encode()
    assert API.adapters().parse(body) == ["a2", "a1"]


@pytest.mark.parametrize(
    ("has_gpu", "backend"), [(True, []), (False, ["--lora-backend", "torch_native"])]
)
def test_a_launched_server_gets_the_flags_of_adapters(monkeypatch, has_gpu, backend):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    flags = ["--enable-lora", "--max-lora-rank", "2", "--lora-target-modules", "q_proj"]
    assert adapter_flags(ADAPTER) == flags + backend


UNFIT = {
    "without LoRA": {"enable_lora": None},
    "a smaller rank": {"max_lora_rank": 1},
    "other layers": {"lora_target_modules": ["k_proj"]},
}


@pytest.mark.parametrize("fields", UNFIT.values(), ids=UNFIT)
def test_a_server_that_cannot_load_the_adapter_is_refused(start, tmp_path, fields):
    def prepare(servers):
        servers[0].info |= INFO | fields

    with pytest.raises(ValueError, match="start it with --enable-lora --max-lora-rank 2"):
        start(1, prepare, adapter=ADAPTER, output_dir=tmp_path, sglang_weight_sync="disk")


def test_a_server_that_adapts_all_layers_is_accepted(start, tmp_path):
    def prepare(servers):
        servers[0].info |= INFO | {"lora_target_modules": ["all"]}

    run = start(1, prepare, adapter=ADAPTER, output_dir=tmp_path, sglang_weight_sync="disk")
    assert run.engine.metrics()["rollout/sglang_live_servers"] == 1


def test_weights_of_an_earlier_run_are_refused(start, tmp_path):
    def prepare(servers):
        servers[0].info |= INFO
        servers[0].weight_version = "12"

    with pytest.raises(ValueError, match="has the weights of another run"):
        start(1, prepare, adapter=ADAPTER, output_dir=tmp_path, sglang_weight_sync="disk")


def test_a_run_whose_directory_was_removed_closes(run, tmp_path):
    update(run, 1)
    shutil.rmtree(tmp_path / "sglang_weights")
    run.engine.close()
    assert run.servers[0].adapters == {}


def test_a_full_disk_ends_the_run(run, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr("slime_tis.trainer.engines.servers.weights.adapters.write_adapter", fail)
    with pytest.raises(RolloutUnavailable, match="No space left on device"):
        update(run, 1)


def test_an_adapter_whose_load_got_no_answer_is_unloaded_at_the_end(run):
    server = run.servers[0]
    server.lost_answers.add("/load_lora_adapter")
    update(run, 1)
    assert loaded_versions(server) == ["v1"]
    run.engine.close()
    assert server.adapters == {}


def test_an_update_does_not_wait_for_an_unloading_that_hangs(run, monkeypatch):
    monkeypatch.setattr("slime_tis.trainer.engines.servers.weights.adapters.RELEASE_TIMEOUT", 0.05)
    for server in run.servers:
        server.hanging.add("/unload_lora_adapter")
    update(run, 1)
    update(run, 2)
    assert versions_of(run.engine.generate(PROMPTS, SAMPLING, seed=0)) == {2}


def test_a_later_update_unloads_what_a_hang_left(run, monkeypatch):
    monkeypatch.setattr("slime_tis.trainer.engines.servers.weights.adapters.RELEASE_TIMEOUT", 0.05)
    (server, _) = run.servers
    server.hanging.add("/unload_lora_adapter")
    update(run, 1)
    update(run, 2)
    wait_until(lambda: server.count("/unload_lora_adapter") == 1)
    server.hanging.clear()
    wait_until(lambda: len(weight_directories(run)) == 1)
    update(run, 3)
    wait_until(lambda: loaded_versions(server) == ["v3"])


def weight_directories(run: Run) -> list[Path]:
    return list(Path(run.engine._host.output_dir).glob("sglang_weights/weights_*"))


def test_an_adapter_is_retired_if_its_server_dies(run):
    pending = rollout_over_update(run)
    run.servers[0].die()
    run.release()
    pending.result()
    wait_until(lambda: len(weight_directories(run)) == 1)


def test_a_run_closes_with_requests_in_flight(run):
    rollout_over_update(run)
    run.engine.close()
    assert run.servers[0].adapters == {}


def test_the_users_directory_keeps_only_the_newest_adapter(start, tmp_path):
    run = start(
        2,
        take_adapters,
        adapter=ADAPTER,
        output_dir=tmp_path,
        sglang_weight_sync="disk",
        sglang_weight_dir=str(tmp_path / "mine"),
    )
    rollout_over_update(run)
    run.engine.close()
    (directory,) = tmp_path.glob("mine/weights_*")
    assert directory.name.startswith("weights_00000002_")


def test_weights_of_another_run_are_not_sampled_from(run):
    update(run, 1)
    run.servers[0].weight_version = "12"
    run.servers[0].version = 12
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    workers = {worker for sample in flat(groups) for worker in sample.rollout_workers}
    assert workers == {1}


def test_a_server_with_weights_of_another_run_gets_no_adapter(run):
    run.servers[0].weight_version = "12"
    update(run, 1)
    assert run.servers[0].adapters == {}
