"""Token sets and log-probs of one model, as JSON files, from which a study can go on."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from slime_tis.atomic_files import write_atomically
from studies.engines.measures import Top

Precision = Literal["fp32", "bf16"]
Report = Literal["raw", "temperature", "processed"]
"""The distribution of a log-prob: of the logits, after temperature, or also after top-p."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
SERVERS = ("vLLM", "SGLang")
SHARED = "shared"
"""The token set that every engine scores, sampled by transformers in fp32."""
TOP_TOKENS = 20
"""Recorded likeliest tokens, more than the 8 compared ones; vLLM gives at most 20 by default."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0


PLAIN = Sampling()
TRUNCATED = Sampling(temperature=0.7, top_p=0.9)
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """Answers to the prompts of a model; every engine can score them."""

    name: str
    """Also the name of its file."""
    sampled_by: str
    """Engine and precision, in words."""
    sampling: Sampling
    prompts: list[list[int]]
    responses: list[list[int]]

    def sequences(self) -> list[list[int]]:
        """Returns prompts with their answers."""
        pairs = zip(self.prompts, self.responses, strict=True)
        return [[*prompt, *response] for prompt, response in pairs]


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """An engine and how it computed the log-probs."""

    engine: str
    """transformers, Megatron, SGLang or vLLM."""
    precision: Precision
    method: str
    """`decoded` token by token with a cache, in `one pass`, or in `chunks of 16` tokens."""
    batch: int
    """Largest number of sequences in one batch."""
    report: Report = "raw"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The log-probs of a token set by one scorer."""

    token_set: str
    scorer: Scorer
    version: str
    """Versions of the engine and its libraries."""
    log_probs: list[list[float]]
    """Per answer and token, nats; −inf for tokens that top-p removes."""
    top: list[list[Top]]
    """Likeliest tokens at the same positions."""
    entropy: list[list[float]] = field(default_factory=list)
    """Of the distribution at the same positions, nats; empty if it is not known."""


class Records:
    """The files of one model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def finished(self, stage: str) -> bool:
        """Returns whether all files of a stage were written."""
        return self._stage(stage).exists()

    def finish(self, stage: str) -> None:
        """Marks a stage as complete."""
        path = self._stage(stage)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def write_set(self, tokens: TokenSet) -> None:
        """Writes a token set."""
        self._write(self.directory / "sets" / f"{tokens.name}.json", asdict(tokens))

    def token_set(self, name: str) -> TokenSet:
        """Returns the token set of this name."""
        path = self.directory / "sets" / f"{name}.json"
        values = json.loads(path.read_text(encoding="utf-8"))
        values["sampling"] = Sampling(**values["sampling"])
        return TokenSet(**values)

    def token_sets(self) -> list[TokenSet]:
        """Returns all token sets."""
        paths = sorted((self.directory / "sets").glob("*.json"))
        return [self.token_set(path.stem) for path in paths]

    def write_scores(self, scores: Scores) -> None:
        """Writes the log-probs of a token set."""
        scorer = scores.scorer
        words = [scores.token_set, *map(str, asdict(scorer).values())]
        name = "__".join(words).replace(" ", "_")
        self._write(self.directory / "scores" / f"{name}.json", asdict(scores))

    def scores(self, token_set: str) -> list[Scores]:
        """Returns all log-probs of a token set."""
        found = []
        for path in sorted((self.directory / "scores").glob(f"{token_set}__*.json")):
            values = json.loads(path.read_text(encoding="utf-8"))
            values["scorer"] = Scorer(**values["scorer"])
            values["top"] = [[_top(row) for row in rows] for rows in values["top"]]
            found.append(Scores(**values))
        return found

    def _stage(self, name: str) -> Path:
        return self.directory / "stages" / name

    def _write(self, path: Path, values: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(values))


def _top(row: dict[str, float]) -> Top:
    """JSON has only texts as keys."""
    return {int(token): log_prob for token, log_prob in row.items()}
