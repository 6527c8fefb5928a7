"""Plants faults in runs of train.py on the study's models, and diagnoses their dumps.

    python -m studies.diagnosis.real_runs --results studies/diagnosis/results_runs.csv

A run starts from a model of `world`, trains it by GRPO with the local rollout engine and writes its
tokens with --save-debug-train-data. What flags of train.py cannot do, a rollout engine with a fault
does. Dumps that are there are not made again.
"""

import argparse
import contextlib
import gc
import io
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.tables import write_rows
from slime_tis.analysis.dumps.readers import read
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.main import train
from slime_tis.progress import print_line, tracked
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.local import local_engine as local
from slime_tis.trainer.engines.rollout_engine import WeightSource
from studies.diagnosis.run import (
    DENSE,
    DUMPS,
    MOE,
    REPORTED,
    STRENGTHS,
    Case,
    Row,
    examine,
    summary,
)
from studies.diagnosis.world import (
    FIRST,
    MERGEABLE,
    SEPARATOR,
    SYSTEM,
    TOOL,
    World,
    answers,
    make_world,
)

RESULTS = Path(__file__).parent / "results_runs.csv"
ROLLOUTS, PROMPTS, SAMPLES = 9, 6, 4
REWARD = """
def reward(args, sample):
    right = sample.label.split()
    return sum(one == other for one, other in zip(sample.response.split(), right)) / len(right)
"""
Report = Callable[[World, Sample, np.random.Generator], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong in a run."""

    cause: str
    also: str = ""
    """The other cause, where two are planted."""
    detail: str = ""
    """The form that has to be named, where there is one."""
    strengths: Sequence[int] = (0, 1, 2)
    family: str = ""
    """Of the model; the seed's dense one where empty."""
    flags: Callable[[int], Sequence[str]] = lambda strength: ()
    sampling: Callable[[int, Sampling], Sampling] = lambda strength, sampling: sampling
    """The engine's sampling, which ignores train.py's settings."""
    report: Callable[[int], Report | None] = lambda strength: None
    """Changes a sample before training."""
    stuck: Callable[[int, str], bool] = lambda strength, name: False
    """Whether a tensor keeps its first value."""
    rope_theta: Callable[[int], float] = lambda strength: 1.0
    """Factor of the engine's rope_theta."""
    servers: int = 0
    """Servers with equal shares of the prompts, if one of them keeps its first weights; 0 without
    such a fault."""


def shifted(strength: int) -> Report:
    """Log-probs of the token before, in a part of the samples."""

    def report(world: World, sample: Sample, chance: np.random.Generator) -> None:
        if chance.random() < (0.15, 0.5, 1.0)[strength]:
            sample.rollout_log_probs = [*sample.rollout_log_probs[1:], sample.rollout_log_probs[0]]

    return report


def system_prompt(strength: int) -> Report:
    """A system prompt that the rollout engine did not have."""

    def report(world: World, sample: Sample, chance: np.random.Generator) -> None:
        sample.tokens = [SYSTEM] * (1, 2, 4)[strength] + list(sample.tokens)

    return report


def replaced(shares: tuple[float, float, float], value: float) -> Callable[[int], Report]:
    """A number in the place of the log-probs of a share of the tokens."""

    def of_strength(strength: int) -> Report:
        def report(world: World, sample: Sample, chance: np.random.Generator) -> None:
            hit = chance.random(sample.response_length) < shares[strength]
            hit[min(3, len(hit) - 1)] |= sample.index == 0 and sample.weight_versions[0] == 0
            pairs = zip(sample.rollout_log_probs, hit, strict=True)
            sample.rollout_log_probs = [value if one else log_prob for log_prob, one in pairs]

        return report

    return of_strength


def tool_output(strength: int) -> Report:
    """A tool's tokens end the response and are trained, with placeholders as log-probs."""

    def report(world: World, sample: Sample, chance: np.random.Generator) -> None:
        if chance.random() >= (0.1, 0.3, 0.8)[strength]:
            return
        length = min(int(chance.integers(3, 8)), sample.response_length)
        output = [TOOL, *chance.integers(FIRST, world.vocabulary, length - 1).tolist()]
        sample.tokens = [*sample.tokens[:-length], *output]
        sample.rollout_log_probs = [
            *sample.rollout_log_probs[:-length],
            *[(0.0, -1.0)[world.seed % 2]] * length,
        ]

    return report


def retokenised(strength: int) -> Report:
    """Encoding the text again joins symbols sampled as two tokens; log-probs do not move."""

    def report(world: World, sample: Sample, chance: np.random.Generator) -> None:
        merged = {
            world.pair(symbol): symbol
            for symbol in range(FIRST, FIRST + (2, 4, MERGEABLE)[strength])
        }
        prompt, response = (
            sample.tokens[: -sample.response_length],
            sample.tokens[-sample.response_length :],
        )
        encoded: list[int] = []
        at = 0
        while at < len(response):
            pair = (response[at], response[at + 1]) if at + 1 < len(response) else (0, 0)
            encoded.append(merged.get(pair, response[at]))
            at += 2 if pair in merged else 1
        sample.tokens, sample.response_length = [*prompt, *encoded], len(encoded)
        for name in ("rollout_log_probs", "loss_mask", "weight_versions"):
            setattr(sample, name, list(getattr(sample, name))[: len(encoded)])

    return report


def heated(strength: int, sampling: Sampling) -> Sampling:
    return replace(sampling, temperature=(0.92, 0.8, 0.6)[strength])


def nucleus(strength: int, sampling: Sampling) -> Sampling:
    return replace(sampling, top_p=(0.97, 0.9, 0.7)[strength], return_sampling_mask=False)


def likeliest(strength: int, sampling: Sampling) -> Sampling:
    return replace(sampling, top_k=(12, 6, 3)[strength], return_sampling_mask=False)


def late(strength: int) -> Sequence[str]:
    return ("--update-weights-interval", str((2, 3, 5)[strength]))


def precision(name: str) -> Callable[[int], Sequence[str]]:
    return lambda strength: ("--rollout-precision", name)


NAN = replaced((0.001, 0.004, 0.02), float("nan"))
LOST = replaced((0.003, 0.01, 0.03), -30.0)
FAULTS: dict[str, Fault] = {
    "shifted by one": Fault(cause="shifted_tokens", report=shifted),
    "other system prompt": Fault(cause="other_prompt", report=system_prompt),
    "other temperature": Fault(cause="temperature", sampling=heated),
    "top-p": Fault(cause="truncated_sampling", sampling=nucleus),
    "top-k": Fault(cause="truncated_sampling", sampling=likeliest),
    "stale weights": Fault(cause="stale_weights", flags=late),
    "never updated": Fault(
        cause="weights_not_updated", stuck=lambda strength, name: True, strengths=(1,)
    ),
    "partly updated": Fault(
        cause="weights_not_updated",
        stuck=lambda strength, name: (".0.mlp", "mlp", "layers")[strength] in name,
    ),
    "bf16": Fault(cause="rounding", detail="bf16", flags=precision("bf16"), strengths=(1,)),
    "int8": Fault(cause="rounding", detail="int8", flags=precision("int8"), strengths=(1,)),
    "fp8": Fault(cause="rounding", detail="fp8", flags=precision("fp8"), strengths=(1,)),
    "NaN": Fault(cause="broken_tokens", report=NAN),
    "lost scale of logits": Fault(cause="broken_tokens", report=LOST),
    "other rope_theta": Fault(
        cause="position_drift", rope_theta=lambda strength: (1.15, 1.5, 3.0)[strength]
    ),
    "routers in few bits": Fault(
        cause="moe_routing",
        family=MOE,
        flags=lambda strength: ("--rollout-router-bits", str((6, 5, 4)[strength])),
    ),
    "tokenised again": Fault(cause="retokenised", report=retokenised),
    "tool output trained on": Fault(cause="mask_mistake", report=tool_output),
}
"""One fault in a run. Where train.py has one strength of it, that counts as medium."""
PAIRS: dict[str, Fault] = {
    "stale weights and NaN": Fault(
        cause="stale_weights", also="broken_tokens", flags=late, report=NAN
    ),
    "stale weights and fp8": Fault(
        cause="stale_weights",
        also="rounding",
        flags=lambda strength: (*late(strength), *precision("fp8")(strength)),
    ),
    "fp8 and lost scale": Fault(
        cause="rounding", also="broken_tokens", flags=precision("fp8"), report=LOST
    ),
    "temperature and tool output": Fault(
        cause="temperature", also="mask_mistake", sampling=heated, report=tool_output
    ),
    "int8 and shifted": Fault(
        cause="rounding", also="shifted_tokens", flags=precision("int8"), report=shifted
    ),
}
"""Two faults in a run, both at medium strength."""
HEALTHY = {
    "fp32": Fault(cause="healthy"),
    "fp32, temperature 0.8": Fault(
        cause="healthy", flags=lambda strength: ("--rollout-temperature", "0.8")
    ),
    "fp32, top-p with its sets": Fault(
        cause="healthy", flags=lambda strength: ("--rollout-top-p", "0.9")
    ),
    "experts": Fault(cause="healthy", family=MOE),
}
"""Runs without a fault."""


SoundEngine = local.LocalEngine


class FaultyEngine(SoundEngine):
    """The local engine with a fault."""

    fault: Fault
    strength: int
    world: World | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stale_server = SoundEngine(*arguments, **options) if self.fault.servers else None
        for name, buffer in self._model.named_buffers():
            if name.endswith("inv_freq"):
                exponents = torch.arange(len(buffer)) / len(buffer)
                buffer.mul_(self.fault.rope_theta(self.strength) ** -exponents)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> list[list[Sample]]:
        groups = super().generate(prompts, self.fault.sampling(self.strength, sampling), seed)
        if self.stale_server is not None:
            groups[:: self.fault.servers] = self.stale_server.generate(prompts, sampling, seed)[
                :: self.fault.servers
            ]
        report: Any = self.fault.report(self.strength)
        chance = np.random.default_rng(seed)
        for sample in (
            (sample for group in groups for sample in group) if report is not None else ()
        ):
            report(self.world, sample, chance)
        return groups

    def update_weights(self, source: WeightSource, version: int) -> None:
        def received() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in source():
                stuck = self.fault.stuck(self.strength, name)
                yield name, self._weights[name].clone() if stuck else tensor

        super().update_weights(received, version)


@contextlib.contextmanager
def planted(fault: Fault, strength: int = 1, world: World | None = None) -> Iterator[None]:
    """Plants a fault in engines that train.py builds meanwhile; only token faults need a world."""
    module: Any = local  # mypy does not let a class be replaced
    module.LocalEngine = type(
        "Faulty", (FaultyEngine,), {"fault": fault, "strength": strength, "world": world}
    )
    try:
        yield
    finally:
        module.LocalEngine = SoundEngine


@dataclass
class Worlds:
    """The models of the study, made when they are needed."""

    made: dict[tuple[int, str], World] = field(default_factory=dict)

    def get(self, seed: int, family: str) -> World:
        if (seed, family) not in self.made:
            self.made = {(seed, family): make_world(seed, family)}  # one at a time
        return self.made[seed, family]


def write_task(world: World, directory: Path) -> list[str]:
    """Writes the world's first weights, prompts and a reward; returns flags that train on them."""
    names = {f"t{i}": i for i in range(world.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="t0", pad_token="t0", unk_token="t0"
    )
    checkpoint = directory / "model"
    model = world.at(0)
    model.config.eos_token_id = model.generation_config.eos_token_id = 0
    model.save_pretrained(checkpoint)
    fast.save_pretrained(checkpoint)
    prompts = torch.cat([world.prompts(step) for step in range(ROLLOUTS)])[::2]
    right = answers(world, prompts).tolist()
    rows = [
        {"prompt": words([*prompt[:-1], SEPARATOR]), "label": words(answer)}
        for prompt, answer in zip(prompts.tolist(), right, strict=True)
    ]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(REWARD)
    return [
        *("--hf-checkpoint", str(checkpoint), "--prompt-data", str(directory / "prompts.jsonl")),
        *(
            "--input-key",
            "prompt",
            "--label-key",
            "label",
            "--custom-rm-path",
            f"{directory / 'reward.py'}:reward",
        ),
        *("--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES)),
        *("--rollout-max-response-len", str(world.response_tokens), "--num-rollout", str(ROLLOUTS)),
        *("--lr", str((3e-4, 5e-4)[world.seed % 2]), "--seed", str(world.seed), "--no-progress"),
        *("--num-threads", "1", "--micro-batch-size", str(PROMPTS * SAMPLES)),
    ]


def words(tokens: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def run(world: World, fault: Fault, strength: int, dump: Path) -> None:
    """Trains a world's model with a fault; writes one file of tokens per rollout to `dump`."""
    unfinished = dump.with_name(f".{dump.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    flags = [
        *write_task(world, unfinished),
        *fault.flags(strength),
        "--output-dir",
        str(unfinished / "run"),
    ]
    written = io.StringIO()
    with planted(fault, strength, world), contextlib.redirect_stdout(written):
        status = train([*flags, "--save-debug-train-data", f"{unfinished}/{{rollout_id}}.parquet"])
    if status != 0:
        raise RuntimeError(f"train.py ended with status {status}: {written.getvalue()[-2000:]}")
    for path in (unfinished / "model", unfinished / "run"):
        shutil.rmtree(path)
    unfinished.rename(dump)
    gc.collect()  # process groups lie in reference cycles


def cases(seed: int) -> Iterator[tuple[Case, Fault]]:
    """The runs of a seed."""
    for name, fault in {**FAULTS, **PAIRS, **HEALTHY}.items():
        strengths = (1,) if name in PAIRS or name in HEALTHY else fault.strengths
        for strength in strengths:
            yield Case(name, strength, seed, fault.family or DENSE[seed % 2]), fault


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=REPORTED)
    parser.add_argument("--faults", nargs="+", default=[*FAULTS, *PAIRS, *HEALTHY])
    parser.add_argument("--dumps", type=Path, default=DUMPS / "runs")
    parser.add_argument(
        "--only-there",
        action="store_true",
        help="diagnose the dumps that are there, and run nothing",
    )
    parser.add_argument("--results", type=Path, default=None, help=f"for example {RESULTS}")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    chosen = []
    for seed in options.seeds:
        for case, fault in cases(seed):
            is_there = case.path(options.dumps).with_suffix("").exists()
            if case.fault in options.faults and (is_there or not options.only_there):
                chosen.append((case, fault))
    worlds = Worlds()
    rows = []
    for case, fault in tracked(chosen, "runs", len(chosen)):
        dump = case.path(options.dumps).with_suffix("")
        if not dump.exists():
            run(worlds.get(case.seed, case.family), fault, case.strength, dump)
        row = row_of(case, fault, read(dump))
        rows.append(row)
        strength = STRENGTHS[case.strength]
        print_line(f"{case.seed} {case.fault} {strength}: {row.found}, {row.second}")
    if options.results:
        write_rows(options.results, Row, rows)
    print(report(rows))
    return 0


def row_of(case: Case, fault: Fault, table: TokenTable) -> Row:
    """What is found in a run; of two causes either may come first."""
    row = examine(case, table)
    cause = fault.also if fault.also and row.found == fault.also else fault.cause
    return replace(row, cause=cause, right_detail=fault.detail, strength=STRENGTHS[case.strength])


def report(rows: Sequence[Row]) -> str:
    """The tables of `summary` on single faults and healthy runs, and one of the pairs."""
    single = [row for row in rows if row.fault in FAULTS]
    sound = [replace(row, fault="healthy") for row in rows if row.fault in HEALTHY]
    lines = [summary([*single, *sound], {name: fault.cause for name, fault in FAULTS.items()}), ""]
    lines += ["| planted together | one of them first | both named |", "|---|---|---|"]
    for name, fault in PAIRS.items():
        found = [row for row in rows if row.fault == name]
        both = sum({row.found, row.second} == {fault.cause, fault.also} for row in found)
        lines.append(
            f"| {name} | {sum(row.right for row in found)}/{len(found)} | {both}/{len(found)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
