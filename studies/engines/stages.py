"""What is measured of one model: each stage starts one server, or loads one model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from studies.collapse.run import versions
from studies.engines.clients import CLIENTS, Answer, Scored, Server, in_batches
from studies.engines.models import TransformersModel, megatron, megatron_scores, reports
from studies.engines.records import (
    GREEDY,
    PLAIN,
    PRECISIONS,
    SHARED,
    TRUNCATED,
    Precision,
    Records,
    Report,
    Sampling,
    Scorer,
    Scores,
    TokenSet,
)
from studies.engines.servers import EngineName, ServerConfig, running, version

CHUNK = 16
"""Tokens of a chunk of prefill: less than a prompt of SmolLM2 has."""
METHODS = {"decoded": "decoded", "one pass": "one pass", "chunks": f"chunks of {CHUNK}"}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the study."""

    name: str
    checkpoint: Path
    prompts: Path
    """JSONL with the key `prompt`."""
    response: int
    """Largest length of an answer, tokens."""
    max_length: int
    """Largest length of a sequence, tokens."""
    count: int
    """Number of prompts, which is also the largest batch."""
    target: str
    """The command that makes checkpoint and prompts."""
    is_chat: bool = False


@dataclass(frozen=True, kw_only=True)
class Study:
    """A model, its prompts and its files."""

    model: Model
    records: Records
    prompts: list[list[int]]
    end: int
    """The token that ends an answer."""
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the study; an interrupted one is repeated from its start."""

    name: str
    run: Callable[[], None]
    """Writes token sets and scores."""


@dataclass(frozen=True, kw_only=True)
class ServerWork:
    """What a server is asked for."""

    samples: Sequence[tuple[str, Sampling, int]] = ()
    """Token sets to sample: name after engine and precision, sampling, batch."""
    scores: Sequence[tuple[str, int]] = ()
    """Token sets to score: name, batch."""


def stages(study: Study) -> Iterator[Stage]:
    """Yields the stages in their order: token sets are sampled before others score them."""
    yield Stage(name="sample_shared", run=partial(sample_shared, study))
    for precision in PRECISIONS:
        yield from server_stages(study, precision)
    for precision in PRECISIONS:
        yield Stage(
            name=f"transformers_{precision}",
            run=partial(score_by_transformers, study, precision),
        )
    yield Stage(name="Megatron", run=partial(score_by_megatron, study))


def server_stages(study: Study, precision: Precision) -> Iterator[Stage]:
    """Yields the stages of both servers: plain, with raw log-probs, and with chunked prefill."""

    def stage(
        engine: EngineName,
        variant: Literal["", "_raw", "_chunks"],
        work: ServerWork,
    ) -> Stage:
        config = ServerConfig(
            engine=engine,
            checkpoint=study.model.checkpoint,
            precision=precision,
            max_length=study.model.max_length,
            chunk=CHUNK if variant == "_chunks" else None,
            raw=variant == "_raw",
        )
        name = f"{engine}_{precision}{variant}"
        return Stage(name=name, run=partial(use_server, study, config, name, work))

    batch = study.model.count
    samples = (
        ("plain", PLAIN, batch),
        ("single", PLAIN, 1),
        ("truncated", TRUNCATED, batch),
        ("greedy", GREEDY, batch),
    )
    vllm_tokens = f"vLLM_{precision}_plain"
    sglang_tokens = f"SGLang_{precision}_plain"
    shared = ((SHARED, batch), (SHARED, 1))
    raw = (("truncated_raw", TRUNCATED, batch),)
    yield stage("vLLM", "", ServerWork(samples=samples, scores=(*shared, (vllm_tokens, batch))))
    both = ((vllm_tokens, batch), (sglang_tokens, batch))
    yield stage("SGLang", "", ServerWork(samples=samples, scores=(*shared, *both)))
    # SGLang's tokens do not exist before; scores are raw log-probs on every server.
    yield stage("vLLM", "_raw", ServerWork(samples=raw, scores=((sglang_tokens, batch),)))
    yield stage("SGLang", "_raw", ServerWork(samples=raw))
    chunks = ServerWork(scores=((SHARED, batch),))
    yield stage("vLLM", "_chunks", chunks)
    yield stage("SGLang", "_chunks", chunks)


def sample_shared(study: Study) -> None:
    """Samples the shared token set by transformers in fp32."""
    model = TransformersModel(study.model.checkpoint, "fp32")
    responses = []
    for number, prompt in enumerate(study.prompts):
        response = model.sample(
            prompt, PLAIN, length=study.model.response, end=study.end, seed=number
        )
        responses.append(response)
    tokens = TokenSet(
        name=SHARED,
        sampled_by="transformers fp32",
        sampling=PLAIN,
        prompts=study.prompts,
        responses=responses,
    )
    study.records.write_set(tokens)


def use_server(study: Study, config: ServerConfig, name: str, work: ServerWork) -> None:
    """Starts a server, does its work, and stops it."""
    log = study.records.directory / "logs" / f"{name}.log"
    with running(config, log) as url:
        server = Server(
            url=url,
            max_tokens=study.model.response,
            end=study.end,
            vocab_size=study.vocab_size,
            raw=config.raw,
        )
        for suffix, sampling, batch in work.samples:
            tokens_name = f"{config.engine}_{config.precision}_{suffix}"
            sample_by_server(study, config, server, tokens_name, sampling, batch)
        for tokens_name, batch in work.scores:
            score_by_server(study, config, server, study.records.token_set(tokens_name), batch)


def sample_by_server(
    study: Study, config: ServerConfig, server: Server, name: str, sampling: Sampling, batch: int
) -> None:
    """Samples one answer to each prompt, and writes tokens and reported log-probs."""
    client = CLIENTS[config.engine](server)

    def sample(number: int) -> Answer:
        return client.sample(study.prompts[number], sampling, number)

    answers = in_batches(sample, range(len(study.prompts)), batch)
    study.records.write_set(
        TokenSet(
            name=name,
            sampled_by=f"{config.engine} {config.precision}",
            sampling=sampling,
            prompts=study.prompts,
            responses=[answer.tokens for answer in answers],
        )
    )
    for report in answers[0].reports:
        scorer = Scorer(
            engine=config.engine,
            precision=config.precision,
            method=METHODS["decoded"],
            batch=batch,
            report=report,
        )
        scored = [answer.reports[report] for answer in answers]
        write(study, name, scorer, scored, version(config))


def score_by_server(
    study: Study, config: ServerConfig, server: Server, tokens: TokenSet, batch: int
) -> None:
    """Scores the answers of a token set in one pass each."""
    client = CLIENTS[config.engine](server)

    def score(number: int) -> Scored:
        return client.score(tokens.prompts[number], tokens.responses[number])

    scored = in_batches(score, range(len(tokens.prompts)), batch)
    scorer = Scorer(
        engine=config.engine,
        precision=config.precision,
        method=METHODS["chunks" if config.chunk else "one pass"],
        batch=batch,
    )
    write(study, tokens.name, scorer, scored, version(config))


def score_by_transformers(study: Study, precision: Precision) -> None:
    """Scores all token sets in one pass each, and the shared one also token by token."""
    model = TransformersModel(study.model.checkpoint, precision)
    one_pass = Scorer(
        engine="transformers", precision=precision, method=METHODS["one pass"], batch=1
    )
    for tokens in study.records.token_sets():
        write_reports(study, tokens, one_pass, by_transformers(tokens, model.in_one_pass))
    shared = study.records.token_set(SHARED)
    decoded = replace(one_pass, method=METHODS["decoded"])
    write_reports(study, shared, decoded, by_transformers(shared, model.decoded))


def by_transformers(
    tokens: TokenSet, logits_of: Callable[[Sequence[int], Sequence[int]], Tensor]
) -> Mapping[Report, list[Scored]]:
    """Returns the scores of a token set; `logits_of` takes a prompt and an answer."""
    found: dict[Report, list[Scored]] = {}
    for prompt, response in zip(tokens.prompts, tokens.responses, strict=True):
        logits_LV = logits_of(prompt, response)
        for report, scored in reports(logits_LV, response, tokens.sampling).items():
            found.setdefault(report, []).append(scored)
    return found


def score_by_megatron(study: Study) -> None:
    """Scores all token sets by the trainer's layers, and the shared one also one by one."""
    with megatron(study.model.checkpoint) as models:
        for precision in PRECISIONS:
            engine = models.load(precision)
            for tokens in study.records.token_sets():
                batches = [study.model.count]
                if tokens.name == SHARED:
                    batches.append(1)
                for batch in batches:
                    scorer = Scorer(
                        engine="Megatron",
                        precision=precision,
                        method=METHODS["one pass"],
                        batch=batch,
                    )
                    found = megatron_scores(engine, tokens, batch)
                    write_reports(study, tokens, scorer, found)


def write_reports(
    study: Study, tokens: TokenSet, scorer: Scorer, found: Mapping[Report, Sequence[Scored]]
) -> None:
    """Writes the scores of each distribution."""
    for report, scored in found.items():
        write(study, tokens.name, replace(scorer, report=report), scored, versions())


def write(study: Study, name: str, scorer: Scorer, scored: Sequence[Scored], version: str) -> None:
    """Writes the scores of a token set."""
    scores = Scores(
        token_set=name,
        scorer=scorer,
        version=version,
        log_probs=[each.log_probs for each in scored],
        top=[each.top for each in scored],
        entropy=[each.entropy for each in scored if each.entropy],
    )
    study.records.write_scores(scores)
