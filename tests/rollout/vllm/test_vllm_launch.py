"""The command lines and the environments of launched vLLM servers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slime_tis.peft_directory import AdapterConfig
from slime_tis.trainer.configs.servers import ServerConfig, server_config
from slime_tis.trainer.engines.servers.api import ServedModel
from slime_tis.trainer.engines.vllm.vllm_api import VllmApi

MODEL = ServedModel(directory=Path("m"), config={}, vocab_size=None, context_len=None)
API = VllmApi(MODEL)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with GPUs 4 to 7 of eight."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


def adapter_api(rank: int) -> VllmApi:
    """The API of servers that load adapters of this rank."""
    adapter = AdapterConfig(rank=rank, alpha=32.0, targets=("q_proj",))
    return VllmApi(replace(MODEL, adapter=adapter))


def launching(*flags: str, **options: object) -> ServerConfig:
    return server_config("vllm", launch=2, server_args=flags or None, **options)


ASSIGNED = {
    "one GPU each": ((), ["4", "5"]),
    "behind two training ranks": (("--base-gpu-id", "2"), ["6", "7"]),
    "two GPUs each": (("--tensor-parallel-size=2",), ["4,5", "6,7"]),
    "two stages each": (("--pipeline-parallel-size", "2"), ["4,5", "6,7"]),
}


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("flags", "devices"), ASSIGNED.values(), ids=ASSIGNED)
def test_each_server_sees_its_gpus(flags: tuple[str, ...], devices: list[str]) -> None:
    config = launching(*flags)
    seen = [API.environment(config, index)["CUDA_VISIBLE_DEVICES"] for index in range(2)]
    assert seen == devices


@pytest.mark.usefixtures("gpus")
def test_more_gpus_than_visible_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 8 GPUs, but CUDA_VISIBLE_DEVICES is 4,5,6,7"):
        API.environment(launching("--tensor-parallel-size", "4"), 1)


def test_the_first_gpu_is_no_flag_of_the_server() -> None:
    flags = API.flags(launching("--base-gpu-id", "2", "--dtype", "float32"), 0, 1234)
    assert "--base-gpu-id" not in flags
    assert flags[-2:] == ["--dtype", "float32"]


RANKS = {1: "1", 2: "8", 8: "8", 33: "64", 257: "320", 512: "512"}


@pytest.mark.parametrize(("rank", "slots"), RANKS.items())
def test_slots_of_adapters_have_a_rank_that_vllm_knows(rank: int, slots: str) -> None:
    flags = adapter_api(rank).flags(launching(), 0, 1234)
    assert flags[flags.index("--max-lora-rank") + 1] == slots


def test_a_rank_above_all_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="up to rank 512, but they have rank 513"):
        adapter_api(513).flags(launching(), 0, 1234)


def test_a_launched_server_loads_adapters_while_it_runs() -> None:
    environment = adapter_api(8).environment(launching(), 0)
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_without_adapters_no_flag_mentions_them() -> None:
    assert "--enable-lora" not in API.flags(launching(), 0, 1234)


def test_the_key_is_only_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    config = launching(api_key_env="MY_KEY")
    assert API.environment(config, 0)["VLLM_API_KEY"] == "s3cret"
    assert not [word for word in API.flags(config, 0, 1234) if "s3cret" in word]


def test_a_server_on_a_cpu_binds_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert API.environment(launching(), 0)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_a_server_on_a_cpu_has_no_process_for_its_only_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    assert API.environment(launching(), 0)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_variables_of_the_user_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-7")
    assert API.environment(launching(), 0)["VLLM_CPU_OMP_THREADS_BIND"] == "0-7"
