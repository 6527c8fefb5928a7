"""The HTTP API of vLLM servers, version 0.32 and newer; see `ServerApi`.

A server needs three things that are not vLLM's defaults: the routes of the development mode
(VLLM_SERVER_DEV_MODE=1), processed log-probs, and our worker extension. `info` refuses a server
without them. Routes of the development mode ignore API keys, so servers belong on the loopback or
in a closed network.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import safe_open

from slime_tis.errors import one_line
from slime_tis.peft_directory import AdapterConfig
from slime_tis.trainer.configs.servers import ServerConfig
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.servers.answers import (
    is_older,
    parse,
    parse_adapters,
    parse_weight_name,
    parse_workers,
)
from slime_tis.trainer.engines.servers.api import (
    CONTROL_TIMEOUT,
    HEALTH_TIMEOUT,
    HOST,
    NEUTRAL_SAMPLING_PARAMS,
    RELEASE_TIMEOUT,
    Bucket,
    Call,
    Connection,
    GenerateRequest,
    ServedModel,
    ServerInfo,
    UpdateGroup,
    max_answer_bytes,
    one_token,
)
from slime_tis.trainer.engines.servers.errors import (
    RequestError,
    RequestRefused,
    ServerError,
    ServerPaused,
)
from slime_tis.trainer.engines.servers.gpus import assigned_gpus
from slime_tis.trainer.engines.servers.update_group import TorchGroup, new_group_name
from slime_tis.trainer.engines.vllm import vllm_answers
from slime_tis.trainer.engines.vllm.nccl_group import NcclGroup
from slime_tis.trainer.engines.weight_rounding import Precision

Result = TypeVar("Result")

GENERATE = "/inference/v1/generate"
REQUEST_PREFIX = "generate-tokens-"
"""vLLM's prefix of the ids of requests to GENERATE. An abort without it answers 200 and ends
nothing."""
WORKER_DIRECTORY = Path(__file__).resolve().with_name("worker")
"""Directory of the module that runs inside vLLM's workers; it is on their PYTHONPATH."""
EXTENSION = "slime_tis_vllm.WorkerExtension"
GLOO_TRANSPORT = "slime_tis_gloo"
"""Name under which the worker extension registers its transport; vLLM's own ones need GPUs."""
OLDEST_VLLM = (0, 32)
"""The first version that reports a weight version per token."""
LOAD_ADAPTER = "/v1/load_lora_adapter"
RUNTIME_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Environment variable without which vLLM has no LOAD_ADAPTER."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""
ADAPTER_SLOTS = 4
"""Adapters that one batch may use: the current one, and those that earlier requests keep. Requests
with another adapter wait."""
PRECISIONS: dict[str, Precision] = {
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
}
CHECKSUM_BYTES = 64 << 20
"""Maximum answer with checksums, in bytes: about 100 per tensor and rank."""


@dataclass(frozen=True)
class VllmApi:
    """vLLM's requests and answers; see `ServerApi`."""

    model: ServedModel
    adapter: str | None = None
    user_endpoints: ClassVar[tuple[str, ...]] = ()
    answers_generate: ClassVar[bool] = False
    experts_advice: ClassVar[str] = "start it on GPUs with --enable-return-routed-experts"
    masks_advice: ClassVar[str] = "start it on GPUs with --return-sampling-mask"
    module: ClassVar[str] = "vllm.entrypoints.cli.main"

    def with_adapter(self, name: str | None) -> "VllmApi":
        """See ServerApi."""
        return replace(self, adapter=name)

    def adapters(self) -> Call[list[str]]:
        """See ServerApi."""
        return Call(endpoint="/v1/models", parse=parse_adapters)

    def load_adapter(self, name: str, directory: Path) -> Call[None]:
        """See ServerApi."""
        return _post(LOAD_ADAPTER, {"lora_name": name, "lora_path": str(directory)})

    def unload_adapter(self, name: str) -> Call[None]:
        """See ServerApi; vLLM reads the files again if it runs more adapters than it has slots."""
        return _post("/v1/unload_lora_adapter", {"lora_name": name})

    def generate(self, request: GenerateRequest) -> Call[tuple[Generation, str | None]]:
        """See ServerApi."""
        body = self._body(request)
        if request.first_experts is not None:
            body["sampling_params"]["routed_experts_prompt_start"] = request.first_experts
        return Call(
            endpoint=GENERATE,
            body=body,
            parse=partial(vllm_answers.parse_generation, request=request, model=self.model),
            max_bytes=request.max_bytes(self.model.experts),
        )

    def score(self, token_ids: Sequence[int]) -> Call[list[float]]:
        """See ServerApi; vLLM samples at least one token, and reads no cached keys for scores."""
        body = self._body(one_token(token_ids))
        body["sampling_params"]["prompt_logprobs"] = 0
        return Call(
            endpoint=GENERATE,
            body=body,
            parse=partial(vllm_answers.parse_scores, token_ids=token_ids),
            max_bytes=max_answer_bytes(len(token_ids)),
        )

    def top(
        self, token_ids: Sequence[int], sampling: Sampling, count: int
    ) -> Call[dict[int, float]]:
        """See ServerApi."""
        body = self._body(one_token(token_ids, sampling.temperature))
        # vLLM puts the sampled token first, and leaves out the last one for it.
        body["sampling_params"]["logprobs"] = count + 1
        return Call(
            endpoint=GENERATE,
            body=body,
            parse=partial(vllm_answers.parse_top, count=count, vocab_size=self.model.vocab_size),
            max_bytes=max_answer_bytes(count),
        )

    def cached_tokens(self, token_ids: Sequence[int]) -> Call[int | None]:
        """See ServerApi; servers tell it with --enable-prompt-tokens-details."""
        return Call(
            endpoint=GENERATE,
            body=self._body(one_token(token_ids)),
            parse=vllm_answers.parse_cached_tokens,
            max_bytes=max_answer_bytes(1),
        )

    def weight_version(self) -> Call[str | None]:
        """See ServerApi."""
        return Call(endpoint="/weight_info", parse=parse_weight_name)

    def checksums(self) -> Call[Mapping[str, list[str]]]:
        """See ServerApi; vLLM's own /weight_checker hashes nothing on a CPU."""
        return Call(
            endpoint="/collective_rpc",
            body={"method": "weight_checksums"},
            parse=vllm_answers.parse_checksums,
            max_bytes=CHECKSUM_BYTES,
        )

    def abort(self, request_id: str | None) -> Call[None]:
        """See ServerApi."""
        # An empty list aborts all requests.
        request_ids = [] if request_id is None else [REQUEST_PREFIX + request_id]
        return _post("/abort_requests", {"request_ids": request_ids})

    def workers(self) -> Call[list[str]]:
        """See ServerApi: GET /workers of vllm-router 0.1.17, which passes other requests on."""
        return Call(endpoint="/workers", parse=parse_workers)

    async def check_health(self, server: Connection) -> None:
        """See ServerApi; vLLM's /health also answers 200 while it is paused."""
        is_paused: Call[bool] = Call(
            endpoint="/is_paused",
            parse=lambda body: parse(vllm_answers.PauseState, body).is_paused,
        )
        if await _asked(server, is_paused, "set VLLM_SERVER_DEV_MODE=1 in its environment"):
            raise ServerPaused(f"{server.url} is paused.")
        # Without the adapter, which a server that restarted does not have yet.
        probe = self.with_adapter(None).generate(one_token([0]))
        await _asked(server, probe, "start it with --enable-scale-out")

    async def info(self, server: Connection) -> ServerInfo:
        """See ServerApi."""
        version = await server.call(
            Call(
                endpoint="/version",
                parse=lambda body: parse(vllm_answers.VersionAnswer, body).version,
            )
        )
        description = await server.call(
            Call(
                endpoint="/server_info?config_format=json",
                parse=lambda body: parse(vllm_answers.ServerDescription, body),
            )
        )
        config = description.vllm_config.model_config
        max_input_len = None
        if config.max_model_len is not None:
            max_input_len = config.max_model_len - 1  # at least one token is sampled
        precision = None
        if config.quantization is None:
            precision = PRECISIONS.get(config.dtype or "")
        mask_tokens = 0
        if config.return_sampling_mask is True:
            mask_tokens = self.model.vocab_size or 0
        return ServerInfo(
            max_input_len=max_input_len,
            max_total_len=config.max_model_len,
            precision=precision,
            takes_seeds=description.vllm_config.takes_seeds,
            returns_experts=config.enable_return_routed_experts is True,
            max_mask_tokens=mask_tokens,
            problem=await self._problem(server, version, description.vllm_config),
        )

    async def _problem(
        self, server: Connection, version: str, config: vllm_answers.VllmConfig
    ) -> str | None:
        logprobs_mode = config.model_config.logprobs_mode
        if is_older(version, OLDEST_VLLM):
            return f"runs vLLM {version}; update it to 0.32 or newer."
        if logprobs_mode != "processed_logprobs":
            return (
                f"reports {logprobs_mode}, which are not those of the sampled distribution; start"
                " it with --logprobs-mode processed_logprobs."
            )
        comparison = Call(
            endpoint="/collective_rpc",
            body={"method": "slime_tis_extension", "kwargs": {"config": self.model.config}},
            parse=vllm_answers.first_problem,
        )
        try:
            difference = await server.call(comparison)
        except RequestError:
            return (
                "lacks this version's worker extension for updates and checksums of weights; start"
                f" it with --worker-extension-cls {EXTENSION} and PYTHONPATH={WORKER_DIRECTORY}."
            )
        if difference:
            return f"serves another model: its {one_line(difference)}."
        if self.model.adapter is not None:
            return await self._adapter_problem(server, self.model.adapter, config)
        return None

    async def _adapter_problem(
        self, server: Connection, adapter: AdapterConfig, config: vllm_answers.VllmConfig
    ) -> str | None:
        """Why the server cannot load the run's LoRA adapters."""
        largest_rank = 0
        if config.lora_config is not None:
            largest_rank = config.lora_config.max_lora_rank
        if largest_rank < adapter.rank:
            return (
                f"takes LoRA adapters up to rank {largest_rank}, but they have rank {adapter.rank};"
                f" start it with {' '.join(adapter_flags(adapter))}, or send merged weights:"
                " --rollout-lora merged."
            )
        try:
            await server.call(Call(endpoint=LOAD_ADAPTER, parse=bytes))
        except RequestRefused as error:
            # A GET is refused with 405 if the route, which takes a POST, exists.
            if error.status == 404:
                return (
                    f"loads no LoRA adapters while it runs; set {RUNTIME_ADAPTERS}=1 in its"
                    " environment, or send merged weights: --rollout-lora merged."
                )
        return None

    async def pause(self, server: Connection) -> None:
        """See ServerApi; the pause already empties the prefix cache, which the reset confirms."""
        await server.call(_post("/pause?mode=keep"), timeout=CONTROL_TIMEOUT)
        reset: Call[None] = Call(
            endpoint="/reset_prefix_cache?reset_running_requests=true",
            body={},
            parse=vllm_answers.parse_cache_reset,
        )
        await server.call(reset, timeout=CONTROL_TIMEOUT)

    async def resume(self, server: Connection) -> None:
        """See ServerApi."""
        await server.call(_post("/resume"), timeout=CONTROL_TIMEOUT)

    async def release(self, server: Connection, group_name: str | None = None) -> None:
        """See ServerApi.

        The server stays paused: after half an update vLLM's model has no memory, and one decoding
        step would end the process. The next complete update repairs it.
        """
        with suppress(RequestError):
            await server.call(self.abort(None), timeout=RELEASE_TIMEOUT)

    async def load(self, server: Connection, directory: Path, version: int) -> None:
        """See ServerApi."""
        arguments = {"path": str(directory), "num_tensors": num_tensors(directory)}
        await server.call(_rpc("load_checkpoint", arguments))
        await server.call(_post("/update_weight_version", {"new_version": str(version)}))

    async def begin_update(self, server: Connection) -> None:
        """See ServerApi."""
        try:
            await server.call(_post("/start_weight_update"), timeout=CONTROL_TIMEOUT)
        except ServerError:
            # A run that was killed during an update left its session open.
            await server.call(_post("/finish_weight_update"), timeout=CONTROL_TIMEOUT)
            await server.call(_post("/start_weight_update"), timeout=CONTROL_TIMEOUT)

    async def num_ranks(self, server: Connection) -> int:
        """See ServerApi."""
        return await server.call(
            Call(endpoint="/get_world_size", parse=vllm_answers.parse_world_size)
        )

    def make_group(
        self, address: str, *, num_ranks: int, device: torch.device, timeout: float
    ) -> UpdateGroup:
        """See ServerApi: on a GPU vLLM's own NCCL group, else a gloo group with our transport."""
        name = new_group_name()
        if device.type == "cuda":
            return NcclGroup(address, name=name, num_ranks=num_ranks, device=device)
        return TorchGroup(address, name=name, num_ranks=num_ranks, device=device, timeout=timeout)

    def join(self, group: UpdateGroup, address: str, num_ranks: int) -> Call[None]:
        """See ServerApi."""
        init_info = {
            "master_address": address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": 1 + num_ranks,
        }
        return _post("/init_weight_transfer_engine", {"init_info": init_info})

    def receive(self, group: UpdateGroup, bucket: Bucket, version: int) -> Call[None]:
        """See ServerApi."""
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors]
        update_info = {
            "names": bucket.names,
            "dtype_names": dtypes,
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
        }
        return _post("/update_weights", {"update_info": update_info})

    async def end_update(self, server: Connection, version: int) -> None:
        """See ServerApi."""
        body = {"weight_version": str(version)}
        await server.call(_post("/finish_weight_update", body))

    def leave(self, group: UpdateGroup) -> Call[None]:
        """See ServerApi."""
        return _post("/shutdown_weight_transfer_engine")

    def flags(self, config: ServerConfig, index: int, port: int) -> list[str]:
        """See ServerApi."""
        flags = ["serve", str(self.model.directory)]
        flags += ["--host", HOST]
        flags += ["--port", str(port)]
        flags += ["--enable-scale-out", "--enable-prompt-tokens-details"]
        flags += ["--logprobs-mode", "processed_logprobs"]
        flags += ["--worker-extension-cls", EXTENSION]
        transport = "nccl"
        if not torch.cuda.is_available():
            transport = GLOO_TRANSPORT
            # Without it, requests may not have seeds; see `vllm_answers`.
            flags.append("--no-enable-chunked-prefill")
        flags += ["--weight-transfer-config", json.dumps({"backend": transport})]
        if self.model.experts is not None:
            flags.append("--enable-return-routed-experts")
        if self.model.adapter is not None:
            flags += adapter_flags(self.model.adapter)
        return [*flags, *without_base_gpu(config.server_args or ())]

    def environment(self, config: ServerConfig, index: int) -> dict[str, str]:
        """See ServerApi."""
        paths = [str(WORKER_DIRECTORY)]
        if os.environ.get("PYTHONPATH"):
            paths.append(os.environ["PYTHONPATH"])
        environment = {
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if self.model.adapter is not None:
            environment[RUNTIME_ADAPTERS] = "1"
        api_key = os.environ.get(config.api_key_env)
        if api_key:
            environment["VLLM_API_KEY"] = api_key
        gpus = assigned_gpus(config.server_args or (), index)
        if torch.cuda.is_available() and gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices(gpus)
        else:
            defaults = {
                # Else each server binds a thread to every core.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # Else a server's only worker is a separate process, which takes a third of the
                # memory and of the time to start.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            }
            for name, value in defaults.items():
                environment[name] = os.environ.get(name, value)
        return environment

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        """The JSON of a request, which names the adapter as its model."""
        body = generate_body(request)
        if self.adapter is not None:
            body["model"] = self.adapter
        return body


def adapter_flags(adapter: AdapterConfig) -> list[str]:
    """Returns the flags of a server that loads an adapter.

    Raises:
        ValueError: vLLM has no slots of this rank.
    """
    ranks = [rank for rank in ADAPTER_RANKS if rank >= adapter.rank]
    if not ranks:
        raise ValueError(
            f"vLLM takes LoRA adapters up to rank {ADAPTER_RANKS[-1]}, but they have rank"
            f" {adapter.rank}; send merged weights: --rollout-lora merged."
        )
    flags = ["--enable-lora"]
    flags += ["--max-lora-rank", str(ranks[0])]
    flags += ["--max-loras", str(ADAPTER_SLOTS)]
    return flags


def without_base_gpu(flags: Sequence[str]) -> list[str]:
    """Returns the flags without `--base-gpu-id`, which vLLM does not have."""
    base_gpu = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    base_gpu.add_argument("--base-gpu-id")
    _, others = base_gpu.parse_known_args(flags)
    return others


def visible_devices(gpus: range) -> str:
    """Returns the GPUs, of those that this process may see, as CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return ",".join(str(gpu) for gpu in gpus)
    devices = named.split(",")
    if gpus.stop > len(devices):
        raise ValueError(
            f"--vllm-launch needs {gpus.stop} GPUs, but CUDA_VISIBLE_DEVICES is {named}; launch"
            " fewer servers, or begin with a smaller --vllm-base-gpu-id."
        )
    return ",".join(devices[gpus.start : gpus.stop])


def generate_body(request: GenerateRequest) -> dict[str, Any]:
    """The JSON of a request for one response."""
    sampling = request.sampling
    params: dict[str, object] = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": request.max_new_tokens,
        "logprobs": 0,
        # Texts are decoded here; vLLM needs its own only to find stop texts.
        "detokenize": bool(request.stop),
        **NEUTRAL_SAMPLING_PARAMS,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if request.stop:
        params |= {"stop": list(request.stop), "include_stop_str_in_output": True}
    if request.seed is not None:
        params["seed"] = request.seed
    return {
        "request_id": request.request_id,
        "token_ids": list(request.input_ids),
        "sampling_params": params,
    }


def num_tensors(directory: Path) -> int:
    """Number of tensors of a checkpoint, by the headers of its files."""
    count = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            count += len(tensors.keys())
    return count


def _post(endpoint: str, body: Mapping[str, object] | None = None) -> Call[None]:
    """A POST whose answer says nothing more than its status."""
    return Call(endpoint=endpoint, body=body or {}, parse=lambda _: None)


def _rpc(method: str, arguments: Mapping[str, object] | None = None) -> Call[None]:
    """Calls a method of the worker extension on all ranks; raises RequestRefused on a problem."""
    return Call(
        endpoint="/collective_rpc",
        body={"method": method, "kwargs": arguments or {}},
        parse=vllm_answers.parse_problems,
    )


async def _asked(server: Connection, call: Call[Result], advice: str) -> Result:
    """The answer to a request of a health check; adds an advice if the endpoint is missing."""
    try:
        return await server.call(call, timeout=HEALTH_TIMEOUT)
    except RequestRefused as error:
        if error.status != 404:
            raise
        raise RequestRefused(f"{str(error).rstrip('.')}; {advice}.", 404) from None
