"""Samples for TRL through a real vLLM server, and renews its weights before each generation.

TRL's own client of vLLM (`use_vllm=True`) needs a GPU: it sends weights by NCCL. This sampler is a
`rollout_func`, which TRL calls with the prompts of a generation batch. It writes the policy as a
checkpoint, which the server loads, and so it also runs on a CPU.

The server needs `VLLM_SERVER_DEV_MODE=1` and the worker extension of `tools/vllm_cpu/server.yaml`.
The routes of the development mode ask for no key: such a server listens on 127.0.0.1 only.
"""

import json
import shutil
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

MODEL = "m"
"""The name under which the server of tools/vllm_cpu/server.yaml serves the model."""
REQUESTS = 64
"""Requests in flight; the server batches them."""
TIMEOUT = 600.0
"""Seconds for one answer; a generation batch shares the server."""
KEEPALIVE = 2.0
"""Seconds for which an idle connection is used again. vLLM closes it after 5, and a request that is
sent at that moment is lost."""
SEEDS = 1_000_003
"""Seeds of one generation batch: more than it has prompts."""
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Names of dtypes in dumps."""


class VllmError(RuntimeError):
    """The server failed, or refused a request."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A sampled answer."""

    token_ids: list[int]
    log_probs: list[float]
    """Log-probs under the distribution that was sampled from, nats."""
    weight_versions: list[int]
    """Optimizer steps behind the weights that sampled each token."""


class VllmSampler:
    """A `rollout_func` that samples from a vLLM server."""

    def __init__(self, url: str, directory: Path) -> None:
        """Connects to the server.

        Args:
            url: Address of the server, such as http://127.0.0.1:8000.
            directory: Directory for the checkpoints that the server loads, under the same path.

        Raises:
            VllmError: The server does not answer, or reports log-probs of another distribution.
        """
        limits = httpx.Limits(max_connections=REQUESTS, keepalive_expiry=KEEPALIVE)
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT, limits=limits, trust_env=False)
        self._url = url
        self._directory = directory.resolve()
        self._version: int | None = None
        """Optimizer steps behind the server's weights; None before the first update."""
        self._calls = 0
        self.precision = self._precision()
        """Precision of the server's weights, such as bf16."""

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Samples one completion per prompt with the trainer's present weights."""
        if trainer.accelerator.num_processes > 1:
            raise VllmError("this sampler serves one process: start the program without torchrun.")
        step = trainer.state.global_step
        if step != self._version:
            self.update(trainer.accelerator.unwrap_model(trainer.model), step)
        prompt_ids = trainer.processing_class(list(prompts))["input_ids"]
        params = sampling_params(trainer)
        first_seed = self._calls * SEEDS
        self._calls += 1

        def complete(number: int) -> Completion:
            return self.complete(prompt_ids[number], {**params, "seed": first_seed + number})

        with ThreadPoolExecutor(REQUESTS) as pool:
            completions = list(pool.map(complete, range(len(prompt_ids))))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [completion.token_ids for completion in completions],
            "logprobs": [completion.log_probs for completion in completions],
            "weight_versions": [completion.weight_versions for completion in completions],
        }

    def update(self, model: Any, version: int) -> None:
        """Gives the server the weights of a model.

        The server is paused meanwhile, because a token that is sampled between old and new weights
        ends vLLM's engine. A pause also empties the prefix cache, whose states are those of the old
        weights. After a failure the server stays paused, so that it never samples from half an
        update.

        Args:
            model: A transformers model.
            version: Optimizer steps made before these weights.

        Raises:
            VllmError: The server did not load the weights.
        """
        checkpoint = self._directory / "weights"
        shutil.rmtree(checkpoint, ignore_errors=True)
        model.save_pretrained(checkpoint)
        self._version = None
        self._post("/pause?mode=keep", {})
        # The extension compares the number of tensors, checks the files before it changes a weight,
        # and renews the packed copy of a tied output layer, which vLLM leaves old on a CPU.
        arguments = {"path": str(checkpoint), "num_tensors": num_tensors(checkpoint)}
        answer = self._post("/collective_rpc", {"method": "load_checkpoint", "kwargs": arguments})
        problems = [problem for problem in answer["results"] if problem]
        if problems:
            raise VllmError(f"{self._url} did not load the weights: {problems[0]}.")
        self._post("/update_weight_version", {"new_version": str(version)})
        self._post("/resume", {})
        self._version = version

    def complete(self, prompt_ids: Sequence[int], params: dict[str, Any]) -> Completion:
        """Samples the completion of a prompt."""
        body = {"model": MODEL, "token_ids": list(prompt_ids), "sampling_params": params}
        choice = self._post("/inference/v1/generate", body)["choices"][0]
        versions: list[int] = []
        for span in choice["weight_versions"]:
            versions += [int(span["version"])] * (span["end"] - span["start"])
        return Completion(
            token_ids=choice["token_ids"],
            log_probs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
            weight_versions=versions,
        )

    def _precision(self) -> str:
        """Returns the precision of the server's weights.

        Raises:
            VllmError: Log-probs leave out temperature and truncation, as by default.
        """
        info = self._answer("GET", "/server_info?config_format=json", None)
        config = info["vllm_config"]["model_config"]
        mode = config["logprobs_mode"]
        if mode != "processed_logprobs":
            raise VllmError(
                f"{self._url} reports {mode}: start the server with --logprobs-mode"
                " processed_logprobs."
            )
        dtype = config["dtype"].removeprefix("torch.")
        return PRECISIONS.get(dtype, dtype)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._answer("POST", path, body)

    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise VllmError(f"{self._url}{path} failed: {error or type(error).__name__}.") from None
        if response.status_code == 404:
            raise VllmError(
                f"{self._url}{path} does not exist: start the server with VLLM_SERVER_DEV_MODE=1"
                " and --config tools/vllm_cpu/server.yaml."
            )
        if response.status_code != 200:
            raise VllmError(
                f"{self._url}{path} answered HTTP {response.status_code}: {response.text[:500]}"
            )
        return response.json() if response.content else None


def sampling_params(trainer: Any) -> dict[str, Any]:
    """Returns vLLM's sampling parameters for TRL's settings.

    All are sent, because vLLM would take missing ones from the checkpoint.
    """
    return {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        # TRL and vLLM both take 0 for no limit.
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "max_tokens": trainer.max_completion_length,
        "stop_token_ids": [trainer.processing_class.eos_token_id],
        "logprobs": 0,
        "detokenize": False,
    }


def num_tensors(checkpoint: Path) -> int:
    """Returns the number of tensors in the safetensors of a directory."""
    count = 0
    for path in checkpoint.glob("*.safetensors"):
        # A file begins with the length of its header, 8 bytes, and the header, which is JSON.
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        count += len(header.keys() - {"__metadata__"})
    return count
