"""A real server that loads LoRA adapters by version: load, update, unload, restart, and faults."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_tis.main import main
from slime_tis.peft_directory import AdapterConfig, tensor_name, write_adapter
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.servers.server_engine import ServerEngine
from slime_tis.trainer.engines.sglang import sglang_api
from slime_tis.trainer.engines.vllm import vllm_api
from tests.real_servers.engines import decode_steps, engine_with_weights
from tests.real_servers.proxy import Proxy, running_proxy
from tests.real_servers.references import BOUND, Reference
from tests.real_servers.servers import ENGINE, STARTUP, RealServer, send
from tests.real_servers.training import ended_run
from tests.runs import Completed
from tests.samples import flat

ADAPTER = AdapterConfig(
    rank=8,
    alpha=32.0,
    targets=("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
)
Capture = pytest.CaptureFixture[str]
SHORT = Sampling(max_response_len=16, n_samples=2)
LONG = Sampling(max_response_len=300, n_samples=2)
LOAD = {"sglang": "/load_lora_adapter", "vllm": vllm_api.LOAD_ADAPTER}[ENGINE.name]
ADAPTER_FIELD = {"sglang": "lora_path", "vllm": "model"}[ENGINE.name]
"""The field of a request for samples that names the adapter."""


class AdaptedModel:
    """A random adapter, and the model with it merged as reference."""

    def __init__(self, checkpoint: Path, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}
        self.reference = Reference(checkpoint)
        for name, layer in self.reference.model.named_modules():
            if name.rpartition(".")[2] not in ADAPTER.targets:
                continue
            outputs, inputs = layer.weight.shape
            down = torch.randn(ADAPTER.rank, inputs, generator=generator) / inputs**0.5
            up = 0.05 * torch.randn(outputs, ADAPTER.rank, generator=generator)
            layer.weight.data += ADAPTER.scale * up @ down
            self.tensors[tensor_name(name, "A")] = down
            self.tensors[tensor_name(name, "B")] = up

    def source(self) -> Iterator[tuple[str, Tensor]]:
        """A and B, as a training engine gives them."""
        yield from self.tensors.items()


def adapter_flags(rank: int) -> list[str]:
    """Flags of a server that loads adapters of this rank for all linear layers."""
    adapter = AdapterConfig(rank=rank, alpha=32.0, targets=ADAPTER.targets)
    if ENGINE.name == "sglang":
        return sglang_api.adapter_flags(adapter)
    return vllm_api.adapter_flags(adapter)


def start_server(checkpoint: Path, log: Path) -> RealServer:
    return RealServer(
        checkpoint,
        log,
        "--dtype",
        "float32",
        *adapter_flags(ADAPTER.rank),
        environment={vllm_api.RUNTIME_ADAPTERS: "1"},
    )


@pytest.fixture(scope="module")
def server(checkpoint: Path, directory: Path) -> Iterator[RealServer]:
    """A server that takes adapters."""
    server = start_server(checkpoint, directory / "adapters.log")
    yield server.wait()
    server.stop()


@pytest.fixture(scope="module")
def adapted(checkpoint: Path) -> dict[int, AdaptedModel]:
    """Adapters by version."""
    return {version: AdaptedModel(checkpoint, seed=version) for version in (1, 2, 3)}


def engine_on(
    server: RealServer, adapted: dict[int, AdaptedModel], checkpoint: Path, directory: Path
) -> AbstractContextManager[ServerEngine]:
    """An engine whose updates send adapters; it has sent none yet."""
    return engine_with_weights(
        checkpoint,
        adapted[1].reference,
        servers=(server,),
        directory=directory,
        weights=adapted[1].source,
        push=False,
        adapter=ADAPTER,
        weight_sync="disk",
        recovery_timeout=STARTUP,
    )


def loaded_adapters(server: RealServer) -> list[str]:
    """Names of this project's adapters on the server."""
    models = send("GET", f"{server.url}/v1/models").json()["data"]
    return [model["id"] for model in models if model["id"].startswith("slime_tis-")]


@dataclass
class Updates:
    """Rollouts with one adapter after the other."""

    samples: dict[int, list[Sample]]
    """Samples of short rollouts after each update, by version."""
    prompt_log_probs: dict[int, list[float]]
    cached_tokens: dict[int, int]
    """Tokens from the prefix cache just after an update."""
    over_update: list[Sample]
    """Samples of requests that were in flight at the last update."""
    names_in_flight: list[str]
    """Adapters on the server during these requests, after the update."""
    names_at_end: list[str]
    directories_at_end: list[str]
    names_after_close: list[str]
    directories_after_close: list[str]


@pytest.fixture(scope="module")
def updates(
    server: RealServer,
    adapted: dict[int, AdaptedModel],
    checkpoint: Path,
    directory: Path,
    prompts: list[Prompt],
) -> Updates:
    output = directory / "adapter_updates"
    output.mkdir()
    samples = {}
    log_probs = {}
    cached = {}
    text = prompts[7].token_ids * 12
    with engine_on(server, adapted, checkpoint, output) as engine:
        for version in (1, 2):
            engine.update_weights(adapted[version].source, version)
            cached[version] = engine.cached_tokens(text)[server.url]
            log_probs[version] = engine.prompt_log_probs(prompts[5].token_ids)[server.url]
            samples[version] = flat(engine.generate(prompts, SHORT, seed=0))
        pending = engine.submit(prompts, LONG, seed=0)
        decode_steps(engine, prompts)
        # Else the server may complete all responses before the update.
        server.pause()
        engine.update_weights(adapted[3].source, 3)
        names_in_flight = loaded_adapters(server)
        server.resume()
        samples[3] = flat(engine.generate(prompts, SHORT, seed=0))
        over_update = flat(pending.result())
        wait_for(lambda: len(loaded_adapters(server)) == 1)
        names_at_end = loaded_adapters(server)
        wait_for(lambda: len(weight_directories(output)) == 1)
        directories_at_end = weight_directories(output)
    return Updates(
        samples=samples,
        prompt_log_probs=log_probs,
        cached_tokens=cached,
        over_update=over_update,
        names_in_flight=names_in_flight,
        names_at_end=names_at_end,
        directories_at_end=directories_at_end,
        names_after_close=loaded_adapters(server),
        directories_after_close=weight_directories(output),
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STARTUP
    while not condition():
        assert time.monotonic() < deadline, "the condition does not come true"
        time.sleep(0.1)


def weight_directories(output: Path) -> list[str]:
    return [path.name for path in output.glob(f"*/{ENGINE.name}_weights/weights_*")]


def test_samples_are_those_of_the_adapter(
    updates: Updates, adapted: dict[int, AdaptedModel]
) -> None:
    for version, samples in updates.samples.items():
        for sample in samples:
            assert adapted[version].reference.largest_difference(sample) < BOUND


def test_tokens_carry_the_version_of_their_adapter(updates: Updates) -> None:
    for version, samples in updates.samples.items():
        for sample in samples:
            assert set(sample.weight_versions) == {version}


def test_a_probe_is_scored_with_the_adapter(
    updates: Updates, adapted: dict[int, AdaptedModel], prompts: list[Prompt]
) -> None:
    for version, log_probs in updates.prompt_log_probs.items():
        expected = adapted[version].reference.log_probs(prompts[5].token_ids)
        assert log_probs == pytest.approx(expected, abs=BOUND)


def test_adapters_share_no_cached_prefix(updates: Updates) -> None:
    assert updates.cached_tokens == {1: 0, 2: 0}


def test_requests_in_flight_keep_their_adapter(
    updates: Updates, adapted: dict[int, AdaptedModel]
) -> None:
    for sample in updates.over_update:
        assert set(sample.weight_versions) == {2}
        assert adapted[2].reference.largest_difference(sample) < BOUND


def test_an_adapter_in_use_stays_loaded(updates: Updates) -> None:
    versions = [name.split("-")[1] for name in updates.names_in_flight]
    assert sorted(versions) == ["v2", "v3"]


def test_an_adapter_is_unloaded_after_its_last_request(updates: Updates) -> None:
    (name,) = updates.names_at_end
    assert name.startswith("slime_tis-v3-")


def test_files_of_an_unloaded_adapter_are_removed(updates: Updates) -> None:
    (name,) = updates.directories_at_end
    assert name.startswith("weights_00000003_")


def test_the_end_of_a_run_unloads_all_adapters(updates: Updates) -> None:
    assert updates.names_after_close == []


def test_the_end_of_a_run_removes_all_files(updates: Updates) -> None:
    assert updates.directories_after_close == []


def compared(
    server: RealServer, adapted: AdaptedModel, checkpoint: Path, directory: Path, capsys: Capture
) -> dict[str, Any]:
    """The result of `slime-tis parity` with an adapter that the server has loaded."""
    directory.mkdir()
    write_adapter(directory, adapted.tensors, ADAPTER, base=str(checkpoint))
    (name,) = loaded_adapters(server)
    words = ["parity", str(checkpoint), "--adapter", str(directory), "--served-adapter", name]
    words += ["--other", ENGINE.name, "--url", server.url, "--tokens", "20", "--json"]
    assert main(words) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_parity_agrees_with_a_loaded_adapter(
    server: RealServer,
    adapted: dict[int, AdaptedModel],
    checkpoint: Path,
    directory: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    with engine_on(server, adapted, checkpoint, directory) as engine:
        engine.update_weights(adapted[1].source, 1)
        result = compared(server, adapted[1], checkpoint, tmp_path / "adapter", capsys)
    assert result["log_probs"]["largest"] < BOUND


def test_parity_names_another_scale_of_a_loaded_adapter(
    server: RealServer,
    adapted: dict[int, AdaptedModel],
    checkpoint: Path,
    directory: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    def doubled() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in adapted[1].source():
            yield name, tensor * (2 if "lora_B" in name else 1)

    with engine_on(server, adapted, checkpoint, directory) as engine:
        engine.update_weights(doubled, 1)
        result = compared(server, adapted[1], checkpoint, tmp_path / "adapter", capsys)
    assert result["cause"].startswith("Alpha is wrong: the adapter has 2 times its scale.")


def test_adapters_of_a_killed_run_are_unloaded(
    server: RealServer,
    adapted: dict[int, AdaptedModel],
    checkpoint: Path,
    directory: Path,
) -> None:
    with engine_on(server, adapted, checkpoint, directory) as engine:
        engine.update_weights(adapted[1].source, 1)
        (name,) = loaded_adapters(server)
        left = directory / "left"
        shutil.copytree(next(directory.glob(f"*/{ENGINE.name}_weights/weights_*")), left)
    other = name[:-8] + "0" * 8
    body = {"lora_name": other, "lora_path": str(left)}
    send("POST", server.url + LOAD, body).raise_for_status()
    with engine_on(server, adapted, checkpoint, directory) as engine:
        engine.update_weights(adapted[2].source, 2)
        assert other not in loaded_adapters(server)


def test_a_restarted_server_gets_the_current_adapter(
    checkpoint: Path, directory: Path, adapted: dict[int, AdaptedModel], prompts: list[Prompt]
) -> None:
    server = start_server(checkpoint, directory / "restarted.log").wait()
    try:
        with engine_on(server, adapted, checkpoint, directory) as engine:
            engine.update_weights(adapted[1].source, 0)
            server.kill()
            server.restart()
            server.wait()
            for sample in flat(engine.generate(prompts, SHORT, seed=0)):
                assert adapted[1].reference.largest_difference(sample) < BOUND
    finally:
        server.stop()


def test_a_server_without_lora_is_refused(
    started_servers: list[RealServer],
    adapted: dict[int, AdaptedModel],
    checkpoint: Path,
    directory: Path,
) -> None:
    server = started_servers[0].wait()
    with (
        pytest.raises(ValueError, match="start it with --enable-lora --max-lora-rank 8"),
        engine_on(server, adapted, checkpoint, directory),
    ):
        pass


@pytest.fixture(scope="module")
def task_server(task: list[str], directory: Path) -> Iterator[RealServer]:
    """A server of the task's model that takes adapters."""
    checkpoint = Path(task[task.index("--hf-checkpoint") + 1])
    server = start_server(checkpoint, directory / "task_adapters.log")
    yield server.wait()
    server.stop()


def run_on(proxy: Proxy, task: list[str], output: Path) -> Completed:
    """Trains an adapter with a server behind a proxy."""
    flags = ["--lora-rank", "8", "--rollout-lora", "unmerged", "--lr", "1e-2"]
    flags += ["--rollout-engine", ENGINE.name, f"--{ENGINE.name}-url", proxy.url]
    flags += [f"--{ENGINE.name}-weight-sync", "disk"]
    return ended_run([*task, *flags], output)


def test_an_absent_adapter_stops_the_run(
    task: list[str], task_server: RealServer, tmp_path: Path
) -> None:
    def without_adapter(body: bytes) -> bytes:
        fields = json.loads(body)
        fields.pop(ADAPTER_FIELD, None)
        return json.dumps(fields).encode()

    with running_proxy(task_server.url) as proxy:
        proxy.edited_requests[ENGINE.generate] = without_adapter
        run = run_on(proxy, task, tmp_path)
    assert run.returncode != 0
    assert "does not apply the LoRA adapter" in run.stderr


def test_a_stale_adapter_stops_the_run(
    task: list[str], task_server: RealServer, tmp_path: Path
) -> None:
    stale = tmp_path / "stale"

    def first_update(body: bytes) -> bytes:
        """Loads the adapter of the first step in place of all later ones."""
        if not body:  # a GET, by which the engine asks whether the route exists
            return body
        fields = json.loads(body)
        if "-v1-" in fields["lora_name"]:
            shutil.copytree(fields["lora_path"], stale)
        elif stale.exists():
            fields["lora_path"] = str(stale)
        return json.dumps(fields).encode()

    with running_proxy(task_server.url) as proxy:
        proxy.edited_requests[LOAD] = first_update
        run = run_on(proxy, task, tmp_path / "run")
    assert run.returncode != 0
    assert "after the update to step 2" in run.stderr
