"""The HTTP API of SGLang servers and its gateway."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

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
    Bucket,
    Call,
    Connection,
    GenerateRequest,
    ServedModel,
    ServerInfo,
    UpdateGroup,
    answers,
    max_answer_bytes,
    one_token,
)
from slime_tis.trainer.engines.servers.errors import (
    InvalidAnswer,
    ReportedFailure,
    RequestRefused,
    ServerError,
)
from slime_tis.trainer.engines.servers.gpus import assigned_gpus
from slime_tis.trainer.engines.servers.update_group import TorchGroup, new_group_name
from slime_tis.trainer.engines.sglang.expert_text import ExpertText
from slime_tis.trainer.engines.sglang.sglang_answers import (
    ControlAnswer,
    ServerDescription,
    parse_cached_tokens,
    parse_checksums,
    parse_generation,
    parse_scores,
    parse_top,
)
from slime_tis.trainer.engines.weight_rounding import Precision

OLDEST = (0, 5, 23)
"""The first version that reports a weight version per token, sampling masks and checksums."""
CHECKSUM_BYTES = 64 << 20
"""Maximum answer of /weights_checker, in bytes: about 100 per tensor and rank."""
INPUT_MARGIN = 6
"""max_req_input_len is this much shorter than the context: the server reserves tokens for the
response."""
ROUTING_KEY = "X-SMG-Routing-Key"
"""Header by which SGLang's gateway chooses the server, with the policies consistent_hashing and
manual."""
PRECISIONS: dict[object, Precision] = {
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
}


@dataclass(frozen=True, kw_only=True)
class SGLangApi:
    """Requests to SGLang servers; see `ServerApi`."""

    model: ServedModel
    adapter: str | None = None

    user_endpoints: ClassVar[tuple[str, ...]] = (
        "/generate",
        "/health",
        "/model_info",
        "/server_info",
        "/v1/models",
        "/workers",
    )
    answers_generate: ClassVar = True
    experts_advice: ClassVar = "start it with --enable-return-routed-experts"
    masks_advice: ClassVar = "start it with a larger --sampling-mask-max-tokens"
    module: ClassVar = "sglang.launch_server"

    def with_adapter(self, name: str | None) -> "SGLangApi":
        """See ServerApi."""
        return replace(self, adapter=name)

    def adapters(self) -> Call[list[str]]:
        """GET /v1/models."""
        return Call(endpoint="/v1/models", parse=parse_adapters)

    def load_adapter(self, name: str, directory: Path) -> Call[None]:
        """POST /load_lora_adapter."""
        return control("/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    def unload_adapter(self, name: str) -> Call[None]:
        """POST /unload_lora_adapter; the server loads nothing else while the adapter is in use."""
        return control("/unload_lora_adapter", {"lora_name": name})

    def generate(self, request: GenerateRequest) -> Call[tuple[Generation, str | None]]:
        """POST /generate for one sample."""
        headers = {}
        if request.session:
            headers[ROUTING_KEY] = request.session
        layout = self.model.experts
        text = None
        if layout is not None and request.first_experts is not None:
            text = ExpertText(layout)
        return Call(
            endpoint="/generate",
            body=self._naming_adapter(generate_body(request)),
            parse=partial(
                parse_generation,
                request=request,
                vocab_size=self.model.vocab_size,
                experts=None if text is None else text.experts,
            ),
            max_bytes=request.max_bytes(layout),
            headers=headers,
            body_filter=text,
        )

    def score(self, token_ids: Sequence[int]) -> Call[list[float]]:
        """POST /generate that samples nothing."""
        return Call(
            endpoint="/generate",
            body=self._naming_adapter(score_body(token_ids)),
            parse=partial(parse_scores, token_ids=token_ids, vocab_size=self.model.vocab_size),
            max_bytes=max_answer_bytes(len(token_ids)),
        )

    def top(
        self, token_ids: Sequence[int], sampling: Sampling, count: int
    ) -> Call[dict[int, float]]:
        """POST /generate that samples one token and returns the likeliest ones."""
        body = self._naming_adapter(generate_body(one_token(token_ids, sampling.temperature)))
        return Call(
            endpoint="/generate",
            body=body | {"top_logprobs_num": count},
            parse=partial(parse_top, vocab_size=self.model.vocab_size),
            max_bytes=max_answer_bytes(count),
        )

    def cached_tokens(self, token_ids: Sequence[int]) -> Call[int | None]:
        """POST /generate that samples one token."""
        body = self._naming_adapter(generate_body(one_token(token_ids)))
        return Call(
            endpoint="/generate",
            body=body,
            parse=parse_cached_tokens,
            max_bytes=max_answer_bytes(1),
        )

    def weight_version(self) -> Call[str | None]:
        """GET /model_info."""
        return Call(endpoint="/model_info", parse=parse_weight_name)

    def checksums(self) -> Call[Mapping[str, list[str]]]:
        """POST /weights_checker."""
        return Call(
            endpoint="/weights_checker",
            body={"action": "checksum", "selector": "target"},
            parse=parse_checksums,
            max_bytes=CHECKSUM_BYTES,
        )

    def abort(self, request_id: str | None) -> Call[None]:
        """POST /abort_request."""
        if request_id is None:
            return control("/abort_request", {"abort_all": True})
        return control("/abort_request", {"rid": request_id})

    def workers(self) -> Call[list[str]]:
        """GET /workers of the gateway."""
        return Call(endpoint="/workers", parse=parse_workers)

    async def check_health(self, server: Connection) -> None:
        """GET /health, which samples a token; a paused server fails."""
        await server.call(Call(endpoint="/health", parse=bytes), timeout=HEALTH_TIMEOUT)

    async def info(self, server: Connection) -> ServerInfo:
        """GET /server_info in neutral words."""
        description = await server.call(describe())
        max_input_len = None
        max_total_len = None
        if description.max_req_input_len is not None:
            max_input_len = description.max_req_input_len - 1
            max_total_len = max_input_len + INPUT_MARGIN
        problem = None
        if is_older(description.version, OLDEST):
            problem = f"runs SGLang {description.version}; update it to 0.5.23 or newer."
        elif self.model.adapter is not None:
            problem = adapter_problem(description, self.model.adapter)
        return ServerInfo(
            max_input_len=max_input_len,
            max_total_len=max_total_len,
            precision=server_precision(description, self.model.config),
            takes_seeds=description.enable_deterministic_inference is True,
            returns_experts=description.enable_return_routed_experts is True,
            max_mask_tokens=description.sampling_mask_max_tokens or 0,
            problem=problem,
        )

    async def pause(self, server: Connection) -> None:
        """Returns running requests to the queue, and empties the cache."""
        await server.call(
            control("/pause_generation", {"mode": "retract"}), timeout=CONTROL_TIMEOUT
        )
        deadline = time.monotonic() + CONTROL_TIMEOUT
        wait = 0.05
        while True:
            try:
                await server.call(control("/flush_cache"), timeout=CONTROL_TIMEOUT)
                return
            except RequestRefused:
                # A server refuses while a batch, or a copy of the cache to host memory, is under
                # way.
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(wait)
            wait = min(2 * wait, 1.0)

    async def resume(self, server: Connection) -> None:
        """POST /continue_generation."""
        await server.call(control("/continue_generation"), timeout=CONTROL_TIMEOUT)

    async def release(self, server: Connection, group_name: str | None = None) -> None:
        """Ends the session, aborts all requests, and resumes."""
        reachable = await answers(server, control("/end_weight_update"))
        if reachable and group_name is not None:
            await answers(server, leave_call(group_name))
        if reachable and await answers(server, self.abort(None)):
            await answers(server, control("/continue_generation"))

    async def load(self, server: Connection, directory: Path, version: int) -> None:
        """POST /update_weights_from_disk."""
        body = {
            "model_path": str(directory),
            "weight_version": str(version),
            "load_format": "auto",  # the server may have been started with the format dummy
            "flush_cache": False,  # the pause emptied it
        }
        await server.call(control("/update_weights_from_disk", body))

    async def begin_update(self, server: Connection) -> None:
        """POST /begin_weight_update."""
        begin = control("/begin_weight_update")
        try:
            await server.call(begin, timeout=CONTROL_TIMEOUT)
        except RequestRefused:
            # A run that was killed during an update left its session open.
            await answers(server, control("/end_weight_update"))
            await server.call(begin, timeout=CONTROL_TIMEOUT)

    async def num_ranks(self, server: Connection) -> int:
        """The server's tensor-parallel ranks."""
        info = await server.call(describe())
        if (info.dp_size, info.pp_size) != (1, 1):
            raise ServerError(
                f"{server.url} runs with --dp-size {info.dp_size} and --pp-size {info.pp_size}, and"
                " SGLang takes distributed weights with 1 of each; use --sglang-weight-sync disk."
            )
        return info.tp_size

    def make_group(
        self, address: str, *, num_ranks: int, device: torch.device, timeout: float
    ) -> UpdateGroup:
        """A torch group whose keys have the server's names."""
        name = new_group_name()
        # SGLang's init_custom_process_group adds the name before torch adds name and device.
        prefixes = (name, f"{name}/", f"{device.type}/")
        return TorchGroup(
            address,
            name=name,
            num_ranks=num_ranks,
            device=device,
            timeout=timeout,
            prefixes=prefixes,
        )

    def join(self, group: UpdateGroup, address: str, num_ranks: int) -> Call[None]:
        """POST /init_weights_update_group."""
        body = {
            "master_address": address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": 1 + num_ranks,
            "group_name": group.name,
            "backend": group.backend,
        }
        return control("/init_weights_update_group", body)

    def receive(self, group: UpdateGroup, bucket: Bucket, version: int) -> Call[None]:
        """POST /update_weights_from_distributed; the last bucket names the weights."""
        body: dict[str, object] = {
            "names": bucket.names,
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
            "group_name": group.name,
            "flush_cache": False,  # the pause emptied it
        }
        if bucket.last:
            body["weight_version"] = str(version)
        return control("/update_weights_from_distributed", body)

    async def end_update(self, server: Connection, version: int) -> None:
        """POST /end_weight_update; the last bucket has named the weights."""
        await server.call(control("/end_weight_update"), timeout=CONTROL_TIMEOUT)

    def leave(self, group: UpdateGroup) -> Call[None]:
        """POST /destroy_weights_update_group."""
        return leave_call(group.name)

    def flags(self, config: ServerConfig, index: int, port: int) -> list[str]:
        """Model, address, the user's flags, and the names of variables with keys."""
        flags = ["--model-path", str(self.model.directory)]
        flags += ["--host", HOST]
        flags += ["--port", str(port)]
        if self.model.experts is not None:
            flags.append("--enable-return-routed-experts")
        if self.model.adapter is not None:
            flags += adapter_flags(self.model.adapter)
        flags += _passed_flags(config, index)
        flags += ["--admin-api-key-env", config.admin_api_key_env or ""]
        flags += ["--api-key-env", config.api_key_env]
        return flags

    def environment(self, config: ServerConfig, index: int) -> dict[str, str]:
        """Without GPUs, what SGLang needs to run on a CPU."""
        if torch.cuda.is_available():
            return {}
        # Without the first, SGLang requires CUDA despite its flags. Without the second, Dynamo
        # would compile some routers with triton.
        defaults = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        return {name: os.environ.get(name, value) for name, value in defaults.items()}

    def _naming_adapter(self, body: dict[str, object]) -> dict[str, object]:
        """The JSON of a request with the adapter."""
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        return body


def adapter_flags(adapter: AdapterConfig) -> list[str]:
    """Returns the flags of a server that loads an adapter."""
    flags = ["--enable-lora"]
    flags += ["--max-lora-rank", str(adapter.rank)]
    flags += ["--lora-target-modules", *adapter.targets]
    if not torch.cuda.is_available():
        flags += ["--lora-backend", "torch_native"]  # the others have only GPU kernels
    return flags


def adapter_problem(info: ServerDescription, adapter: AdapterConfig) -> str | None:
    """Why a server cannot load the run's LoRA adapters; None if it can."""
    layers = info.lora_target_modules or []
    # SGLang keeps the word all, and replaces it only inside the model.
    takes_layers = "all" in layers or set(adapter.targets) <= set(layers)
    if info.enable_lora is True and (info.max_lora_rank or 0) >= adapter.rank and takes_layers:
        return None
    return (
        f"does not take LoRA adapters of rank {adapter.rank} for {', '.join(adapter.targets)};"
        f" start it with {' '.join(adapter_flags(adapter))}, or send merged weights:"
        " --rollout-lora merged."
    )


def control(endpoint: str, body: Mapping[str, object] | None = None) -> Call[None]:
    """A POST whose answer has no content; it may report a failure with HTTP 200."""

    def check(answer: bytes) -> None:
        with suppress(InvalidAnswer):  # some endpoints return text
            if parse(ControlAnswer, answer).success is False:
                raise ReportedFailure(answer.decode(errors="replace"))

    return Call(endpoint=endpoint, body=body or {}, parse=check)


def leave_call(group_name: str) -> Call[None]:
    """POST /destroy_weights_update_group."""
    return control("/destroy_weights_update_group", {"group_name": group_name})


def describe() -> Call[ServerDescription]:
    """GET /server_info."""
    return Call(endpoint="/server_info", parse=partial(parse, ServerDescription))


def generate_body(request: GenerateRequest) -> dict[str, object]:
    """The JSON of POST /generate."""
    params: dict[str, object] = {
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "top_k": request.sampling.top_k,
        "max_new_tokens": request.max_new_tokens,
        **NEUTRAL_SAMPLING_PARAMS,
    }
    if request.sampling.stop_token_ids:
        params["stop_token_ids"] = list(request.sampling.stop_token_ids)
    if request.stop:
        params |= {"stop": list(request.stop), "no_stop_trim": True}
    if request.seed is not None:
        params["sampling_seed"] = request.seed
    body: dict[str, object] = {
        "rid": request.request_id,
        "input_ids": list(request.input_ids),
        "sampling_params": params,
        "return_logprob": True,
    }
    if request.first_experts is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.first_experts}
    if request.sampling.return_sampling_mask:
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return body


def score_body(token_ids: Sequence[int]) -> dict[str, object]:
    """The JSON of POST /generate that returns the log-probs of given tokens and samples nothing."""
    return {
        "input_ids": list(token_ids),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, **NEUTRAL_SAMPLING_PARAMS},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def server_precision(info: ServerDescription, config: Mapping[str, Any]) -> Precision | None:
    """The precision of SGLang's `--dtype`; None if it is unknown or weights are quantized.

    With `auto`, SGLang takes the checkpoint's dtype, and float16 for a float32 checkpoint.
    """
    if info.quantization is not None:
        return None
    dtype = info.dtype
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        if dtype == "float32":
            dtype = "float16"
    return PRECISIONS.get(dtype)


def _passed_flags(config: ServerConfig, index: int) -> list[str]:
    """The passed flags; each server on GPUs begins after the previous server's last GPU."""
    flags = list(config.server_args or ())
    gpus = assigned_gpus(flags, index)
    if index == 0 or gpus is None:
        return flags
    return [*flags, "--base-gpu-id", str(gpus.start)]  # the server takes the last of two flags
