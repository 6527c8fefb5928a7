"""The HTTP API of a rollout engine: the seam between `engines/servers` and one engine.

`servers` knows when a request is sent, repeated and aborted, and when weights go to a server. A
`ServerApi` knows how one engine spells each request, and how it answers.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from slime_tis.hf_directory import MoeSizes, load_config, model_sizes, moe_sizes, read_model_config
from slime_tis.peft_directory import AdapterConfig
from slime_tis.trainer.configs.servers import ServerConfig
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.servers.errors import RequestRefused, ServerError
from slime_tis.trainer.engines.weight_rounding import Precision

Result = TypeVar("Result")
ResultT_co = TypeVar("ResultT_co", covariant=True)

NEUTRAL_SAMPLING_PARAMS = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Sent with each request, under the names of all engines: defaults of the server or checkpoint must
not change the distribution."""
HOST = "127.0.0.1"
"""Address at which launched servers listen."""
CONTROL_BYTES = 4 << 20
"""Maximum answer of requests that do not sample, in bytes; SGLang's /server_info, the largest, has
about 100 kB."""
BYTES_PER_TOKEN = 256
"""Maximum average bytes of an answer per token; real answers have 50 to 80."""
BYTES_PER_TOKEN_ID = 10
"""Maximum average bytes of a token id in a sampling mask."""
ANSWER_BYTES = 256 << 10
"""Maximum bytes of an answer in addition to its tokens."""
EXPERT_BYTES = 4
"""Bytes of a routed expert, an int32. Base64 encodes 3 bytes as 4 characters."""
HEALTH_TIMEOUT = 25.0
"""Longest wait for a health check, in seconds: SGLang's samples a token and ends after 20."""
CONTROL_TIMEOUT = 60.0
"""Longest wait for a server to pause, flush or resume, in seconds; it finishes the current batch
first."""
RELEASE_TIMEOUT = 5.0
"""Longest wait for a server that has failed already, in seconds."""


class BodyFilter(Protocol):
    """Takes a large text out of an answer while it arrives."""

    def cut(self, chunk: bytes) -> bytes:
        """Returns the next part of the answer without the text."""

    def end(self) -> bytes:
        """Returns the bytes that are still held back, at the end of the answer."""


@dataclass(frozen=True, kw_only=True)
class Call(Generic[ResultT_co]):
    """One HTTP request, and how its answer is read."""

    endpoint: str
    body: Mapping[str, object] | None = None
    """JSON of a POST; None for a GET."""
    parse: Callable[[bytes], ResultT_co]
    """Reads the answer; raises InvalidAnswer or ReportedFailure."""
    max_bytes: int = CONTROL_BYTES
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers in addition to the key's."""
    body_filter: BodyFilter | None = None


class Connection(Protocol):
    """What an API sees of a server."""

    url: str
    timeout: float
    """Longest wait for an answer, in seconds, unless a call has another one."""

    async def call(self, call: Call[Result], *, timeout: float | None = None) -> Result:
        """Sends a request and returns its parsed answer; raises RequestError."""


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The layout of routed experts in an answer."""

    num_hidden_layers: int
    """Number of all layers; dense layers have columns in an answer too."""
    moe: MoeSizes

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of the experts of some tokens in an answer."""
        num_experts = num_tokens * self.num_hidden_layers * self.moe.top_k
        return 4 * math.ceil(EXPERT_BYTES * num_experts / 3)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model of all servers of a run."""

    directory: Path
    """The --hf-checkpoint."""
    config: Mapping[str, Any] = field(repr=False)
    """Its config.json."""
    vocab_size: int | None
    """Number of token ids; None skips the check of answers."""
    context_len: int | None
    experts: ExpertLayout | None = None
    """Layout of routed experts in answers; None if they are not recorded."""
    adapter: AdapterConfig | None = None
    """Settings of the LoRA adapter that servers load; None if they get all weights."""


def served_model(
    hf_checkpoint: str | Path, *, records_experts: bool, adapter: AdapterConfig | None = None
) -> ServedModel:
    """Reads the sizes of a checkpoint."""
    config = read_model_config(hf_checkpoint)
    sizes = model_sizes(config)
    return ServedModel(
        directory=Path(hf_checkpoint),
        config=config,
        vocab_size=sizes.vocab_size,
        context_len=sizes.context_len,
        experts=expert_layout(hf_checkpoint) if records_experts else None,
        adapter=adapter,
    )


def expert_layout(hf_checkpoint: str | Path) -> ExpertLayout:
    """The layout of routed experts in answers of a model with experts."""
    hf = load_config(hf_checkpoint)
    moe = moe_sizes(hf)
    assert moe is not None  # file_checks refuses options of experts for other models
    return ExpertLayout(num_hidden_layers=hf.num_hidden_layers, moe=moe)


NOT_SENT = -1
"""Version of weights that the run did not send."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """The request for the rest of one response."""

    input_ids: Sequence[int]
    """Tokens of the prompt and of the partial response."""
    sampling: Sampling
    max_new_tokens: int
    request_id: str
    """Id for aborts. SGLang aborts all ids with this prefix, so all ids must have equal width."""
    session: str = ""
    """Conversation. A router with routing keys sends its requests to the server whose cache has the
    earlier turns."""
    seed: int | None = None
    first_experts: int | None = None
    """First token whose routed experts are returned; None for none."""
    stop: Sequence[str] = ()
    initial_version: int = 0
    """Version of the weights that the server loaded when it started; `NOT_SENT` if the run has
    replaced them."""

    def max_bytes(self, layout: ExpertLayout | None = None) -> int:
        """Maximum bytes of the answer."""
        mask_tokens = 0
        if self.sampling.return_sampling_mask:
            # A mask also contains tokens as likely as the last one of top-k.
            mask_tokens = 2 * self.sampling.top_k
        max_bytes = max_answer_bytes(self.max_new_tokens, mask_tokens)
        if layout is not None and self.first_experts is not None:
            max_bytes += layout.num_bytes(len(self.input_ids) + self.max_new_tokens)
        return max_bytes


def one_token(token_ids: Sequence[int], temperature: float = 1.0) -> GenerateRequest:
    """A request for one token of the whole vocabulary, under a new id."""
    return GenerateRequest(
        input_ids=token_ids,
        sampling=Sampling(temperature=temperature, max_response_len=1),
        max_new_tokens=1,
        request_id=f"probe-{secrets.token_hex(16)}",
    )


def max_answer_bytes(num_tokens: int, mask_tokens: int = 0) -> int:
    """Maximum bytes of an answer of `num_tokens` tokens, each with a mask of `mask_tokens` ids."""
    bytes_per_token = BYTES_PER_TOKEN + BYTES_PER_TOKEN_ID * mask_tokens
    return ANSWER_BYTES + bytes_per_token * num_tokens


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """The description of a server."""

    max_input_len: int | None = None
    """Longest input, in tokens; None if the server reports no limit."""
    max_total_len: int | None = None
    """Longest input and response together, in tokens."""
    precision: Precision | None = None
    """Precision of the weights; None if it is unknown or they are quantized."""
    takes_seeds: bool = False
    """Whether the server uses requests' seeds."""
    returns_experts: bool = False
    max_mask_tokens: int = 0
    """Largest sampling mask that answers contain; 0 for none."""
    problem: str | None = None
    """Why no run may use the server: the end of a message that begins with its URL."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Some weights that travel together."""

    names: list[str]
    tensors: list[Tensor]
    last: bool


class UpdateGroup(Protocol):
    """Broadcasts tensors from rank 0, this process, to the ranks of one server."""

    name: str
    port: int
    """Port of the group's store on this machine."""
    backend: str
    """Name of torch's backend: nccl or gloo."""
    version: str | None
    """Version that the server got last from this group."""

    def join(self) -> None:
        """Makes the group; blocks until all ranks have joined.

        Raises RuntimeError if `close` is called on another thread meanwhile.
        """

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Sends tensors in order; blocks until the server has them.

        Raises RuntimeError if the server is gone or too slow.
        """

    def close(self) -> None:
        """Leaves the group, which ends a `join` under way on either side."""


class ServerApi(Protocol):
    """One engine's requests and answers; stateless.

    Methods that return a `Call` describe one request. The others send requests of their own and
    raise RequestError if one fails.
    """

    user_endpoints: ClassVar[tuple[str, ...]]
    """Endpoints that take the API key; all others take the admin key if there is one."""
    answers_generate: ClassVar[bool]
    """Whether POST /generate has SGLang's format, in which functions written for slime call it."""
    experts_advice: ClassVar[str]
    """How to start servers that return routed experts: the end of a sentence."""
    masks_advice: ClassVar[str]
    """How to start servers that return larger sampling masks: the end of a sentence."""
    module: ClassVar[str]
    """Launched servers run as `python -m MODULE`."""

    @property
    def model(self) -> ServedModel:
        """The model of all servers."""

    @property
    def adapter(self) -> str | None:
        """Name of the LoRA adapter with which requests sample and score; None for none."""

    def with_adapter(self, name: str | None) -> "ServerApi":
        """The same requests with another adapter."""

    def adapters(self) -> Call[list[str]]:
        """Names of the adapters that requests may name."""

    def load_adapter(self, name: str, directory: Path) -> Call[None]:
        """Loads an adapter in PEFT's format under a new name."""

    def unload_adapter(self, name: str) -> Call[None]:
        """Removes an adapter that no request uses any more."""

    def generate(self, request: GenerateRequest) -> Call[tuple[Generation, str | None]]:
        """Samples the rest of a response; its answer also says why its experts are unusable."""

    def score(self, token_ids: Sequence[int]) -> Call[list[float]]:
        """Log-probs at temperature 1 of all tokens but the first."""

    def top(
        self, token_ids: Sequence[int], sampling: Sampling, count: int
    ) -> Call[dict[int, float]]:
        """The likeliest next tokens and their log-probs at the temperature of `sampling`.

        Top-p and top-k are not applied, and impossible tokens are left out.
        """

    def cached_tokens(self, token_ids: Sequence[int]) -> Call[int | None]:
        """Samples one token after a text, whose keys and values it may take from the prefix cache.

        Returns the number of tokens that it took from there; None if the server does not tell.
        """

    def weight_version(self) -> Call[str | None]:
        """The name of the server's weights; "default" for the initial weights."""

    def checksums(self) -> Call[Mapping[str, list[str]]]:
        """Checksums of tensors by name, one per rank that has the tensor."""

    def abort(self, request_id: str | None) -> Call[None]:
        """Aborts a request, which then returns its partial response; None aborts all."""

    def workers(self) -> Call[list[str]]:
        """URLs of the servers behind a router; `answers.parse_workers` reads them."""

    async def check_health(self, server: Connection) -> None:
        """Samples a token.

        Raises ServerPaused if the server answers but is paused. An engine that cannot tell raises
        another RequestError: then `release` is called, which resumes it.
        """

    async def info(self, server: Connection) -> ServerInfo:
        """The server's description."""

    async def pause(self, server: Connection) -> None:
        """Stops generation, and drops keys and values of the old weights.

        Running requests wait; they continue after the update.
        """

    async def resume(self, server: Connection) -> None:
        """Resumes generation."""

    async def release(self, server: Connection, group_name: str | None = None) -> None:
        """Ends a failed update and aborts all requests, so that no answer mixes weights.

        Resumes generation only if a server survives that with half an update. Ignores failures.
        """

    async def load(self, server: Connection, directory: Path, version: int) -> None:
        """Makes a paused server read weights from a directory, and names them."""

    async def begin_update(self, server: Connection) -> None:
        """Opens the update session of a paused server, and ends one that a killed run left."""

    async def num_ranks(self, server: Connection) -> int:
        """Number of ranks that take broadcasts; raises ServerError if they cannot."""

    def make_group(
        self, address: str, *, num_ranks: int, device: torch.device, timeout: float
    ) -> UpdateGroup:
        """Opens a group's store at an address that the server reaches; `join` makes the group."""

    def join(self, group: UpdateGroup, address: str, num_ranks: int) -> Call[None]:
        """Makes the server's ranks join; this process joins meanwhile."""

    def receive(self, group: UpdateGroup, bucket: Bucket, version: int) -> Call[None]:
        """Makes the server receive a bucket; this process broadcasts it meanwhile."""

    async def end_update(self, server: Connection, version: int) -> None:
        """Closes the session after the last bucket, and names the weights."""

    def leave(self, group: UpdateGroup) -> Call[None]:
        """Makes the server's ranks leave the group."""

    def flags(self, config: ServerConfig, index: int, port: int) -> list[str]:
        """The words behind the module of the `index`-th launched server.

        `--NAME-env VARIABLE` hides a secret from lists of processes; see `supervise.py`.
        """

    def environment(self, config: ServerConfig, index: int) -> dict[str, str]:
        """Environment variables of a launched server; they replace this process's."""


async def answers(server: Connection, call: Call[None]) -> bool:
    """Sends a request, ignoring a refusal; returns whether the server answers at all."""
    try:
        await server.call(call, timeout=RELEASE_TIMEOUT)
    except ServerError:
        return False
    except RequestRefused:
        pass
    return True
