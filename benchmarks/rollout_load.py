"""A rollout of many long responses from many servers: what the client on rank 0 costs per token.

    python -m benchmarks.rollout_load [--servers 64] [--requests 1024] [--tokens 4096 32768] \\
        [--experts]

Servers are loops in another process; each sends one of a few prepared answers, with log-probs,
weight versions and with --experts, the routed experts of 48 layers × 8. Prints, per token of the
responses: processor time of this process from the submission to the samples, of parsing alone, of
pickling and unpickling for other ranks, and of batching; memory of the samples, and the same data
in packed arrays (ids, log-probs, versions and workers in 4 bytes, loss mask in 1).
"""

import argparse
import asyncio
import base64
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.servers.api import GenerateRequest, expert_layout
from slime_tis.trainer.engines.servers.health import Timeouts
from slime_tis.trainer.engines.servers.server_engine import return_memory
from slime_tis.trainer.engines.sglang.expert_text import ExpertText
from slime_tis.trainer.engines.sglang.sglang_answers import parse_generation
from slime_tis.trainer.megatron.batch import make_batch
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.rollout.sglang.fake_sglang import FakeSGLang, servers_of
from tests.rollout.sglang.rollouts import Weights, make_engine
from tests.samples import flat

LAYERS, EXPERTS, TOP_K = 48, 128, 8
PROMPT = 16
"""Tokens of every prompt."""
ANSWERS = 8
"""Number of prepared answers, of lengths at equal distances."""
PACKED = 4 + 4 + 4 + 4 + 1
"""Bytes of a token in packed arrays, without experts."""


def answers(shortest: int, longest: int, *, experts: bool) -> list[bytes]:
    """Bodies of answers to POST /generate."""
    chance, bodies = np.random.default_rng(0), []
    for length in np.linspace(shortest, longest, ANSWERS).astype(int).tolist():
        ids = chance.integers(3, VOCAB_SIZE, length).tolist()
        log_probs = (-chance.exponential(1.0, length)).astype(np.float32).tolist()
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length", "length": length},
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(log_probs, ids, strict=True)
            ],
            "completion_tokens": length,
            "weight_versions": [{"version": "0", "start": 0, "end": length}],
        }
        if experts:
            first = chance.integers(
                0, EXPERTS - TOP_K, (PROMPT + length - 1, LAYERS, 1), dtype=np.int32
            )
            meta["routed_experts"] = base64.b64encode(
                (first + np.arange(TOP_K, dtype="<i4")).tobytes()
            ).decode()
        bodies.append(json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode())
    return bodies


def serve(count: int, bodies: Sequence[bytes], connection: Connection) -> None:
    """Some servers in this process, until the other end says stop."""

    class Prepared(FakeSGLang):
        def __init__(self, loop: Any) -> None:
            super().__init__(loop)
            self.answers, self.sending = itertools.cycle(bodies), asyncio.Lock()
            self.info["max_req_input_len"] = 1 << 20

        async def _answer(
            self, method: str, path: str, body: dict[str, Any], headers: dict[str, str]
        ) -> Any:
            return (
                (200, next(self.answers))
                if path == "/generate"
                else await super()._answer(method, path, body, headers)
            )

        async def _send(self, writer: Any, path: str, status: int, content: Any) -> bool:
            if not isinstance(content, bytes):
                return await super()._send(writer, path, status, content)
            async with self.sending:  # responses of one server end one after another
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode()
                )
                for start in range(0, len(content), 1 << 20):
                    writer.write(memoryview(content)[start : start + (1 << 20)])
                    await writer.drain()
            return True

    with servers_of(Prepared, count) as servers:
        connection.send([server.url for server in servers])
        connection.recv()


@contextmanager
def prepared_servers(count: int, bodies: Sequence[bytes]) -> Iterator[tuple[str, ...]]:
    """URLs of servers in another process."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=serve, args=(count, bodies, there), daemon=True
    )
    process.start()
    try:
        yield tuple(here.recv())
        here.send("stop")
    finally:
        process.terminate()
        process.join()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of all threads of this process, and the result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument(
        "--tokens", type=int, nargs=2, default=(4096, 32768), metavar=("MIN", "MAX")
    )
    parser.add_argument("--experts", action="store_true")
    options = parser.parse_args()
    bodies = answers(*options.tokens, experts=options.experts)
    with tempfile.TemporaryDirectory() as name, prepared_servers(options.servers, bodies) as urls:
        sizes = (
            {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
            if options.experts
            else {}
        )
        longest = options.tokens[1] + PROMPT + 1
        checkpoint = make_checkpoint(name, "qwen3_moe", max_position_embeddings=longest, **sizes)
        report(checkpoint, urls, options, bodies)


def report(
    checkpoint: Path, urls: Sequence[str], options: argparse.Namespace, bodies: Sequence[bytes]
) -> None:
    """Samples and prints."""
    sampling = Sampling(max_response_len=options.tokens[1], return_routed_experts=options.experts)
    engine = make_engine(
        checkpoint,
        Weights(),
        sglang_url=tuple(urls),
        sglang_concurrency=-(-options.requests // options.servers),
        sampling=sampling,
        timeouts=Timeouts(),
    )
    prompts = [
        Prompt(index=i, text="", token_ids=(1, *[3 + i % 60] * (PROMPT - 1)))
        for i in range(options.requests)
    ]
    process = psutil.Process()
    gc.collect()
    return_memory()
    before, start = process.memory_info().rss, time.perf_counter()
    seconds, groups = timed(lambda: engine.generate(prompts, sampling))
    wall = time.perf_counter() - start
    samples: list[Sample] = flat(groups)
    gc.collect()
    memory = process.memory_info().rss - before
    tokens = sum(sample.response_length for sample in samples)
    experts = sum(
        each.nbytes for sample in samples if (each := sample.rollout_routed_experts) is not None
    )
    assert len(samples) == options.requests and (experts > 0) == options.experts
    packed = PACKED * tokens + experts
    print(
        f"{options.servers} servers, {len(samples):,} requests, {tokens:,} tokens, {os.cpu_count()}"
        " cores"
    )
    line("client", seconds, tokens)
    line("wall", wall, tokens)
    layout = expert_layout(checkpoint)
    request = GenerateRequest(
        input_ids=prompts[0].token_ids,
        sampling=sampling,
        max_new_tokens=options.tokens[1],
        request_id="",
        first_experts=0 if options.experts else None,
    )

    def parse(body: bytes) -> int:
        experts = None
        if options.experts:
            text = ExpertText(layout)
            body = text.cut(body) + text.end()
            experts = text.experts
        generation, _ = parse_generation(body, request, experts=experts)
        return len(generation.token_ids)

    parsing, lengths = timed(lambda: [*map(parse, bodies)])
    line("parsing", parsing, sum(lengths))
    part = samples[: max(1, len(samples) // 8)]
    count = sum(sample.response_length for sample in part)
    sending, data = timed(lambda: pickle.dumps(part))
    line("pickling", sending, count)
    line("unpickling", timed(lambda: pickle.loads(data))[0], count)
    tokens_of_samples = [sample.tokens for sample in part]
    masks = [sample.loss_mask for sample in part]
    log_probs = [sample.rollout_log_probs for sample in part]
    versions = [sample.weight_versions for sample in part]
    batching, _ = timed(lambda: make_batch(tokens_of_samples, masks, log_probs, versions))
    line("batching", batching, count)
    print(
        f"memory: {memory / tokens:.0f} bytes per token, {memory / packed:.2f} × packed"
        f" ({packed / tokens:.0f})"
    )
    engine.close()


def line(name: str, seconds: float, tokens: int) -> None:
    """Prints a rate."""
    print(f"{name:12} {seconds:8.2f} s {tokens / seconds / 1e6:8.2f} M tokens/s")


if __name__ == "__main__":
    main()
