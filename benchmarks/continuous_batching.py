"""Episodes of several turns on the local engine: continuous batching against static batches of the same tokens.

    python -m benchmarks.continuous_batching --rounds 3

Episodes of uneven length and several turns, each turn an answer of a planned length and an observation, on a
random Llama. Contenders, interleaved in every round, in seconds of CPU time of one thread:

    continuous    `submit_function`: every episode asks for its next turn as soon as it has its observation
    one batch     `decode` of the same tokens at once: prompts with all observations, and as many tokens sampled
    by turns      `decode` of the first turn of all episodes, then of the second …, each over the whole context

Prints the medians and the median ratios within rounds, and appends a row per contender to continuous_batching.csv.
"""

import argparse
import csv
import datetime
import math
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.provenance import commit, machine
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.generation import TokenEngine
from slime_tis.trainer.engines.local.decode import decode
from slime_tis.trainer.engines.local.engine import LocalEngine
from tests.checkpoints import make_tokenizer

TABLE = Path(__file__).with_suffix(".csv")
VOCAB_SIZE = 4096
CONTINUOUS, ONE_BATCH, BY_TURNS = "continuous", "one batch", "by turns"
COLUMNS = (
    *("date", "machine", "threads", "commit", "contender", "episodes", "sampled_tokens", "layers", "hidden"),
    *(
        "rounds",
        "median_s",
        "fastest_s",
        "slowest_s",
        "times_one_batch",
        "times_by_turns",
        "python",
        "torch",
        "transformers",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What is planned for one episode."""

    prompt: tuple[int, ...]
    answers: tuple[int, ...]
    """Tokens that each turn samples."""
    observations: tuple[tuple[int, ...], ...]
    """Tokens after each turn except the last."""


def planned(episodes: int, seed: int) -> list[Episode]:
    """Episodes of 1 to 8 turns; the logarithms of lengths are uniform, because real lengths are long-tailed.

    A prompt has 16 to 64 tokens, an answer 4 to 64, an observation 2 to 32.
    """
    draw = random.Random(seed)

    def length(least: int, most: int) -> int:
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCAB_SIZE) for _ in range(length(least, most)))

    found = []
    for _ in range(episodes):
        turns = draw.randint(1, 8)
        found.append(
            Episode(
                prompt=tokens(16, 64),
                answers=tuple(length(4, 64) for _ in range(turns)),
                observations=tuple(tokens(2, 32) for _ in range(turns - 1)),
            )
        )
    return found


def make_engine(path: Path, layers: int, hidden: int) -> LocalEngine:
    """An engine on random weights, without an end of sequence: answers are as long as planned."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=VOCAB_SIZE)
    model.save_pretrained(path)
    return LocalEngine(path, make_tokenizer())


def continuous(engine: LocalEngine, plan: Sequence[Episode]) -> int:
    prompts = [Prompt(index=i, text="", token_ids=episode.prompt) for i, episode in enumerate(plan)]

    async def play(sample: Sample, asked: TokenEngine) -> list[Sample]:
        episode = plan[sample.prompt_index]
        for turn, length in enumerate(episode.answers):
            answer = await asked.generate(sample.tokens, {"max_new_tokens": length})
            sample.append_response_tokens(tokens=answer.token_ids, log_probs=answer.log_probs)
            if turn < len(episode.observations):
                sample.append_response_tokens(tokens=episode.observations[turn], trainable=False)
        return [sample]

    groups = engine.submit_function(prompts, play, Sampling(max_response_len=64), 0, concurrency=len(plan)).result()
    return sum(sum(sample.loss_mask) for (sample,) in groups)


def one_batch(engine: LocalEngine, plan: Sequence[Episode]) -> int:
    prompts = [[*episode.prompt, *(token for part in episode.observations for token in part)] for episode in plan]
    limits = [sum(episode.answers) for episode in plan]
    return sum(map(len, decoded(engine, prompts, limits)))


def by_turns(engine: LocalEngine, plan: Sequence[Episode]) -> int:
    texts, sampled = [list(episode.prompt) for episode in plan], 0
    for turn in range(max(len(episode.answers) for episode in plan)):
        going = [place for place, episode in enumerate(plan) if turn < len(episode.answers)]
        answers = decoded(engine, [texts[place] for place in going], [plan[place].answers[turn] for place in going])
        for place, answer in zip(going, answers, strict=True):
            sampled += len(answer)
            observation = plan[place].observations[turn : turn + 1]
            texts[place] += [*answer, *(token for part in observation for token in part)]
    return sampled


def decoded(engine: LocalEngine, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[int]]:
    """The answers of one static batch."""
    uniforms = torch.rand(len(prompts), max(limits), dtype=torch.float64)
    batch = decode(engine._model, prompts, limits, uniforms, Sampling(max_response_len=max(limits)), [VOCAB_SIZE])
    return [tokens[:length] for tokens, length in zip(batch.tokens_BT.tolist(), batch.lengths_B.tolist(), strict=True)]


CONTENDERS: dict[str, Callable[[LocalEngine, Sequence[Episode]], int]] = {
    CONTINUOUS: continuous,
    ONE_BATCH: one_batch,
    BY_TURNS: by_turns,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dry-run", action="store_true", help="append no rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plan = planned(given.episodes, seed=0)
    expected = sum(sum(episode.answers) for episode in plan)
    with tempfile.TemporaryDirectory() as directory:
        engine = make_engine(Path(directory), given.layers, given.hidden)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for turn in range(given.rounds + 1):
        for name, run in CONTENDERS.items():
            start = time.process_time()
            sampled = run(engine, plan)
            if sampled != expected:
                raise RuntimeError(f"{name} sampled {sampled} tokens where {expected} are planned.")
            if turn:  # the first round warms up
                seconds[name].append(time.process_time() - start)
    report(seconds, given, expected)


def report(seconds: dict[str, list[float]], given: argparse.Namespace, sampled: int) -> None:
    """Prints medians and ratios, and appends the rows."""
    rows = []
    for name, own in seconds.items():
        of_one, of_turns = (
            statistics.median(a / b for a, b in zip(own, seconds[other], strict=True))
            for other in (ONE_BATCH, BY_TURNS)
        )
        print(f"{name:12} {statistics.median(own):7.2f} s   {of_one:5.2f} × one batch   {of_turns:5.2f} × by turns")
        rows.append(
            (
                *(datetime.date.today(), machine(), 1, commit(), name, given.episodes, sampled, given.layers),
                *(given.hidden, given.rounds, f"{statistics.median(own):.3f}", f"{min(own):.3f}", f"{max(own):.3f}"),
                *(f"{of_one:.3f}", f"{of_turns:.3f}", platform.python_version(), torch.__version__),
                transformers.__version__,
            )
        )
    if given.dry_run:
        return
    is_new = not TABLE.exists()
    with TABLE.open("a", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([COLUMNS, *rows] if is_new else rows)


if __name__ == "__main__":
    main()
