"""Requests to SGLang and vLLM servers: sample an answer, or score the tokens of one."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import httpx

from studies.engines.measures import Top
from studies.engines.records import TOP_TOKENS, Report, Sampling
from studies.engines.servers import MODEL

Item = TypeVar("Item")
Result = TypeVar("Result")

TIMEOUT = 600.0
"""Seconds for one answer; on a busy machine 64 answers share a core."""
KEEPALIVE = 2.0
"""Seconds for which an idle connection is used again; servers close it after 5."""
MASKED = -9999.0
"""vLLM's log-prob of a token that truncation removes."""
NEUTRAL: dict[str, float] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Sent with each request, because defaults of the checkpoint must not change the distribution."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Log-probs of the same tokens, and the likeliest tokens at the same positions."""

    log_probs: list[float]
    top: list[Top]
    entropy: list[float] = field(default_factory=list)
    """Of the distribution at each position, nats; servers do not report it."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A sampled answer."""

    tokens: list[int]
    reports: dict[Report, Scored]
    """Log-probs by the distribution that the server says they are of."""


class Client(Protocol):
    """An engine's requests."""

    def sample(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Answer:
        """Samples an answer."""

    def score(self, prompt: Sequence[int], response: Sequence[int]) -> Scored:
        """Computes the log-probs of a given answer at temperature 1, in one pass."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server and the limits of its requests."""

    url: str
    max_tokens: int
    """Largest length of an answer."""
    end: int
    """The token that ends an answer."""
    vocab_size: int
    raw: bool = False
    """Whether the server reports log-probs before temperature and truncation."""
    http: httpx.Client = field(
        default_factory=lambda: httpx.Client(
            trust_env=False, timeout=TIMEOUT, limits=httpx.Limits(keepalive_expiry=KEEPALIVE)
        )
    )

    @property
    def top_tokens(self) -> int:
        """Number of recorded likeliest tokens."""
        return min(TOP_TOKENS, self.vocab_size)

    def post(self, endpoint: str, body: dict[str, Any]) -> Any:
        """Returns the parsed answer to a request."""
        response = self.http.post(f"{self.url}{endpoint}", json=body)
        if response.status_code != 200:
            raise RuntimeError(
                f"{self.url}{endpoint} answered HTTP {response.status_code}: {response.text[:500]}"
            )
        return response.json()


class SGLangClient:
    """POST /generate of SGLang 0.5.23."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def sample(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Answer:
        """Samples an answer; SGLang ignores seeds unless it is deterministic."""
        server = self.server
        params = {
            **NEUTRAL,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "max_new_tokens": server.max_tokens,
            "stop_token_ids": [server.end],
        }
        body = {
            "input_ids": list(prompt),
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": server.top_tokens,
        }
        truncates = sampling.top_p < 1.0 and not server.raw
        if truncates:
            # SGLang returns masks only with a finite top-k; this one removes nothing.
            params["top_k"] = min(server.vocab_size, 4096)
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        answer = server.post("/generate", body)
        meta = answer["meta_info"]
        tokens: list[int] = answer["output_ids"]
        reported = Scored(
            log_probs=[entry[0] for entry in meta["output_token_logprobs"]],
            top=[_sglang_top(entries) for entries in meta["output_top_logprobs"]],
        )
        report: Report = "temperature"
        # At temperature 0 SGLang divides by 1.
        if server.raw or sampling.temperature in (0.0, 1.0):
            report = "raw"
        reports = {report: reported}
        if truncates:
            log_probs = meta["output_token_sampling_logprobs"]
            reports["processed"] = Scored(log_probs=log_probs, top=[])
        return Answer(tokens=tokens, reports=reports)

    def score(self, prompt: Sequence[int], response: Sequence[int]) -> Scored:
        """Scores an answer; the last prompt token's row has no log-prob of the answer."""
        body = {
            "input_ids": [*prompt, *response],
            "sampling_params": {**NEUTRAL, "temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": self.server.top_tokens,
        }
        meta = self.server.post("/generate", body)["meta_info"]
        entries = meta["input_token_logprobs"][len(prompt) :]
        if [entry[1] for entry in entries] != self._named(response):
            raise RuntimeError(f"{self.server.url} scored other tokens than it was sent.")
        tops = meta["input_top_logprobs"][len(prompt) :]
        return Scored(
            log_probs=[entry[0] for entry in entries], top=[_sglang_top(top) for top in tops]
        )

    def _named(self, tokens: Sequence[int]) -> list[int]:
        """Returns tokens as SGLang 0.5.23 names them in its answer.

        It takes the last token of the vocabulary for an image, whose tokens it names 0. The
        log-prob is that of the last token.
        """
        last = self.server.vocab_size - 1
        return [0 if token == last else token for token in tokens]


class VllmClient:
    """POST /inference/v1/generate of vLLM 0.32."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def sample(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Answer:
        """Samples an answer."""
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": self.server.max_tokens,
            "stop_token_ids": [self.server.end],
            "logprobs": self.server.top_tokens,
            "seed": seed,
        }
        choice = self._post(prompt, params)["choices"][0]
        entries = choice["logprobs"]["content"]
        scored = Scored(
            log_probs=[entry["logprob"] for entry in entries],
            top=[_vllm_top(entry["top_logprobs"]) for entry in entries],
        )
        report: Report = "processed"
        if self.server.raw or sampling in (Sampling(), Sampling(temperature=0.0)):
            report = "raw"
        return Answer(tokens=choice["token_ids"], reports={report: scored})

    def score(self, prompt: Sequence[int], response: Sequence[int]) -> Scored:
        """Scores an answer, which costs one sampled token."""
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": self.server.top_tokens}
        answer = self._post([*prompt, *response], params)
        rows = answer["prompt_logprobs"][len(prompt) :]
        log_probs = []
        tops: list[Top] = []
        for row, token in zip(rows, response, strict=True):
            log_probs.append(row[str(token)]["logprob"])
            tops.append({int(key): entry["logprob"] for key, entry in row.items()})
        return Scored(log_probs=log_probs, top=tops)

    def _post(self, tokens: Sequence[int], params: dict[str, Any]) -> Any:
        body = {
            "model": MODEL,
            "token_ids": list(tokens),
            "sampling_params": {**NEUTRAL, "top_k": 0, "detokenize": False, **params},
        }
        return self.server.post("/inference/v1/generate", body)


CLIENTS: dict[str, Callable[[Server], Client]] = {
    "SGLang": SGLangClient,
    "vLLM": VllmClient,
}
"""The requests by engine."""


def in_batches(call: Callable[[Item], Result], items: Sequence[Item], batch: int) -> list[Result]:
    """Returns the result of each item; up to `batch` calls run at the same time."""
    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(call, items))


def _sglang_top(entries: Sequence[Sequence[Any]]) -> Top:
    return {token: log_prob for log_prob, token, _ in entries}


def _vllm_top(entries: Sequence[dict[str, Any]]) -> Top:
    top = {}
    for entry in entries:
        if entry["logprob"] > MASKED:
            top[entry["token_id"]] = entry["logprob"]
    return top
