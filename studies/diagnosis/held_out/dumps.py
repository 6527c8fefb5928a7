"""The cases of a seed and their dumps: faults, pairs, and healthy runs of all precisions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from studies.diagnosis.held_out.engines import Engine, Sample, sample_step, score
from studies.diagnosis.held_out.models import SMOLLM2, TINY, World
from studies.diagnosis.held_out.network_faults import Build, on_model, with_cache
from studies.diagnosis.held_out.planted import FAULTS, PAIRS, Fault, Scope, Side

SERVERS = ("http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://10.0.0.3:30000")
FAULTY_SERVER = 1
HIDDEN = ("", "", "", "entropy", "", "versions", "", "tokens", "entropy and versions")
"""Columns that a dump lacks; without tokens it lacks the entropy and the prompt too."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A healthy run whose engines have some precision."""

    name: str
    rollout: Build
    """Changes the rollout engine."""
    accepts: frozenset[str]
    """Precisions that `rounding` may name; empty if only `healthy` is right."""
    training: Build | None = None
    """Changes training; None leaves fp32."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Precisions that the dump names."""
    form: str = "single"
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One dump."""

    seed: int
    family: str
    names: tuple[str, ...]
    """Planted faults; none in a healthy run."""
    kind: str
    """named, coming, unnamed, pair or healthy."""
    scope: Scope = "all"
    sides: tuple[Side, ...] = ()
    """Engine of each fault."""
    hidden: str = ""
    shows_servers: bool = False
    precision: Precision | None = None

    @property
    def planted(self) -> str:
        if self.precision is not None:
            return self.precision.name
        return " + ".join(self.names)


# Precisions


def rounded(weight: Tensor, precision: str) -> Tensor:
    """Nearest numbers of a precision; fp8, int8 and int4 have a scale per row."""
    if precision in ("bf16", "fp16"):
        return weight.to(torch.bfloat16 if precision == "bf16" else torch.float16).float()
    largest = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[precision]
    scale = weight.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
    scaled = weight.float() / scale
    if precision == "fp8":
        return (scaled.to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)
    return (scaled.round() * scale).to(weight.dtype)


def in_weights(precision: str) -> Build:
    """Matrices of the layers are rounded; bf16 and fp16 round all tensors."""

    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            is_matrix = parameter.dim() == 2 and ".layers." in name
            if is_matrix or precision in ("bf16", "fp16"):
                parameter.copy_(rounded(parameter, precision))

    return on_model(change)


def in_arithmetic(dtype: torch.dtype) -> Build:
    return lambda _, engine: replace(engine, dtype=dtype)


def in_activations(precision: str) -> Build:
    """Weights and the inputs of the layers' matrices are rounded, as in fp8 inference."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded(inputs[0], precision),)

    def change(model: Any) -> None:
        for module in model.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(rounded(module.weight, precision))
                module.register_forward_pre_hook(hook)

    return on_model(change)


def in_cache(precision: str) -> Build:
    return with_cache(lambda x: rounded(x, precision).to(x.dtype))


def both(first: Build, second: Build) -> Build:
    return lambda world, engine: second(world, first(world, engine))


def unchanged(_: World, engine: Engine) -> Engine:
    return engine


def double(_: World, engine: Engine) -> Engine:
    return replace(engine, dtype=torch.float64)


BF16 = in_arithmetic(torch.bfloat16)
FP16 = in_arithmetic(torch.float16)


def tiny_precisions() -> list[Precision]:
    """Healthy runs of tiny models: each precision with its name in the dump and without."""
    rows = [
        Precision(name="healthy: fp32", rollout=unchanged, accepts=frozenset()),
        Precision(name="healthy: fp32, chat", rollout=unchanged, accepts=frozenset(), form="chat"),
        Precision(
            name="healthy: fp32, reasoning",
            rollout=unchanged,
            accepts=frozenset(),
            form="reasoning",
        ),
        Precision(
            name="healthy: fp32, images", rollout=unchanged, accepts=frozenset(), form="image"
        ),
        Precision(
            name="healthy: fp32, temperature 0.7",
            rollout=unchanged,
            accepts=frozenset(),
            temperature=0.7,
        ),
        Precision(name="healthy: fp64 rollout", rollout=double, accepts=frozenset()),
        Precision(
            name="healthy: bf16, images", rollout=BF16, accepts=frozenset(["bf16"]), form="image"
        ),
        Precision(
            name="healthy: bf16, chat", rollout=BF16, accepts=frozenset(["bf16"]), form="chat"
        ),
    ]
    kinds: list[tuple[str, str, Build, Build | None]] = [
        ("fp16 weights", "fp16", in_weights("fp16"), None),
        ("bf16 weights", "bf16", in_weights("bf16"), None),
        ("fp8 weights", "fp8", in_weights("fp8"), None),
        ("int8 weights", "int8", in_weights("int8"), None),
        ("int4 weights", "int4", in_weights("int4"), None),
        ("fp16 arithmetic", "fp16", FP16, None),
        ("bf16 arithmetic", "bf16", BF16, None),
        ("fp8 arithmetic", "fp8", in_activations("fp8"), None),
        ("int8 arithmetic", "int8", in_activations("int8"), None),
        ("fp8 KV cache", "fp8", in_cache("fp8"), None),
        ("int8 KV cache", "int8", in_cache("int8"), None),
        ("int4 KV cache", "int4", in_cache("int4"), None),
        ("bf16 on both sides", "bf16", BF16, BF16),
        ("fp16 on both sides", "fp16", FP16, FP16),
        ("fp8 rollout, bf16 training", "fp8", both(in_weights("fp8"), BF16), BF16),
    ]
    rows += with_and_without_name(kinds)
    return rows


def smollm2_precisions() -> list[Precision]:
    """Healthy runs of SmolLM2, whose rollout is in bf16 unless stated otherwise."""
    kinds: list[tuple[str, str, Build, Build | None]] = [
        ("bf16 arithmetic", "bf16", BF16, None),
        ("bf16 on both sides", "bf16", BF16, BF16),
        ("bf16 weights", "bf16", in_weights("bf16"), None),
        ("fp8 weights, bf16 arithmetic", "fp8", both(in_weights("fp8"), BF16), BF16),
        ("int8 weights, bf16 arithmetic", "int8", both(in_weights("int8"), BF16), BF16),
        ("int4 weights, bf16 arithmetic", "int4", both(in_weights("int4"), BF16), BF16),
        ("fp8 KV cache, bf16 arithmetic", "fp8", both(in_cache("fp8"), BF16), BF16),
    ]
    return with_and_without_name(kinds)


def with_and_without_name(
    kinds: Sequence[tuple[str, str, Build, Build | None]],
) -> list[Precision]:
    rows = []
    for name, precision, rollout, training in kinds:
        trained_in = "fp32"
        if training is not None:
            trained_in = "fp16" if precision == "fp16" else "bf16"
        # Arithmetic in bf16 makes noise of its own, which may be the larger part.
        accepted = frozenset({precision, trained_in} - {"fp32"})
        if "bf16 arithmetic" in name:
            accepted |= {"bf16"}
        known = (("precision", trained_in), ("rollout_precision", precision))
        for metadata in ((), known):
            suffix = ", named" if metadata else ""
            rows.append(
                Precision(
                    name=f"healthy: {name}{suffix}",
                    rollout=rollout,
                    training=training,
                    accepts=accepted,
                    metadata=metadata,
                )
            )
    return rows


# Cases


def chosen(options: Sequence[Any], key: str) -> Any:
    """One of the options; the same key always gives the same one."""
    return random.Random(key).choice(options)


def cases(seed: int, family: str) -> list[Case]:
    """All dumps of a seed with a tiny model, whose family depends on the case, or with SmolLM2."""
    is_tiny = family != SMOLLM2
    rows = []
    for fault in FAULTS.values():
        if is_tiny or fault.smollm2:
            rows.append(case_of(seed, family, fault))
    if is_tiny:
        for pair in PAIRS:
            sides = tuple(FAULTS[name].sides[0] for name in pair)
            rows.append(
                Case(
                    seed=seed,
                    family=chosen(common_families(pair), f"{seed} {pair} family"),
                    names=pair,
                    kind="pair",
                    sides=sides,
                )
            )
    precisions = tiny_precisions() if is_tiny else smollm2_precisions()
    for precision in precisions:
        of = chosen(TINY, f"{seed} {precision.name}") if is_tiny else family
        rows.append(
            Case(
                seed=seed,
                family=of,
                names=(),
                kind="healthy",
                precision=precision,
                shows_servers=chosen((False, True), f"{seed} {precision.name} servers"),
            )
        )
    return rows


def common_families(names: Sequence[str]) -> list[str]:
    return [family for family in TINY if all(family in FAULTS[name].families for name in names)]


def case_of(seed: int, family: str, fault: Fault) -> Case:
    key = f"{seed} {family} {fault.name}"
    scope = chosen(fault.scopes, f"{key} scope")
    hidden = chosen(HIDDEN, f"{key} hidden")
    of = chosen(fault.families, f"{key} family") if family != SMOLLM2 else family
    shows_servers = chosen((False, True), f"{key} servers")
    if fault.name == "older weights, reported as older" and "versions" in hidden:
        hidden = ""  # without versions it is another fault
    return Case(
        seed=seed,
        family=of,
        names=(fault.name,),
        kind=fault.kind,
        scope=scope,
        sides=(chosen(fault.sides, f"{key} side"),),
        hidden=hidden,
        shows_servers=shows_servers,
    )


# Dumps


@dataclass(kw_only=True)
class Scored:
    """A sample with training's values."""

    sample: Sample
    train: list[float]
    entropy: list[float]
    is_faulty: bool


def make(case: Case, world: World) -> list[Scored]:
    """Samples and scores all steps of a case."""
    # Dropout and logit noise draw from torch's global generator.
    torch.manual_seed(seed_of(case, 0))
    rollout, training = clean_engines(case, world)
    faulty_rollout = rollout
    faulty_training = training
    for name, side in zip(case.names, case.sides, strict=True):
        if side == "rollout":
            faulty_rollout = FAULTS[name].build(world, faulty_rollout)
        else:
            faulty_training = FAULTS[name].build(world, faulty_training)
    scored = []
    rng = random.Random(seed_of(case, 1))
    for step in range(world.steps):
        samples = new_samples(case, world, step, rng)
        faulty = []
        clean = []
        for sample in samples:
            if is_faulty(case, world, sample, rng):
                faulty.append(sample)
            else:
                clean.append(sample)
        sample_step(world, rollout, clean, seed_of(case, 10 + step))
        sample_step(world, faulty_rollout, faulty, seed_of(case, 50 + step))
        if faulty:
            faulty_rollout.report(faulty, rng)
        scored += scored_step(training, clean, rng, is_faulty=False)
        scored += scored_step(faulty_training, faulty, rng, is_faulty=True)
    return sorted(scored, key=lambda each: (each.sample.step, each.sample.index))


def clean_engines(case: Case, world: World) -> tuple[Engine, Engine]:
    """Rollout and training; SmolLM2 has a bf16 rollout unless the case has another precision."""
    temperature = 1.0
    if case.names:
        temperature = FAULTS[case.names[0]].temperature
    if case.precision is not None:
        temperature = case.precision.temperature
    rollout = Engine(model=world.at, temperature=temperature)
    training = Engine(model=world.at, temperature=temperature)
    if case.precision is not None:
        rollout = case.precision.rollout(world, rollout)
        if case.precision.training is not None:
            training = case.precision.training(world, training)
    elif not world.is_tiny:
        rollout = replace(rollout, dtype=torch.bfloat16)
    return rollout, training


def seed_of(case: Case, number: int) -> int:
    return random.Random(f"{case.seed} {case.family} {case.planted} {number}").randrange(2**31)


def new_samples(case: Case, world: World, step: int, rng: random.Random) -> list[Sample]:
    """Empty samples; two of them share a prompt."""
    form = "single"
    forms = [FAULTS[name].form for name in case.names]
    if case.precision is not None:
        form = case.precision.form
    for each in forms:
        if each != "single":
            form = each
    samples = []
    for index in range(world.samples):
        if index % 2 == 0:
            task = world.task(rng, form)
        samples.append(Sample(task=task, step=step, index=index))
    for sample in samples:
        after = [*samples[sample.index + 1 :], *samples[: sample.index]]
        # The next prompt's samples come first, and the sibling last.
        siblings = [each for each in after if each.task is sample.task]
        sample.neighbors = [each for each in after if each.task is not sample.task] + siblings
    return samples


def is_faulty(case: Case, world: World, sample: Sample, rng: random.Random) -> bool:
    if not case.names:
        return False
    chance = rng.random()
    if case.scope == "later":
        return sample.step >= world.steps // 2
    if case.scope == "part":
        return chance < 0.35 or sample.index == 2
    if case.scope == "server":
        return sample.index % len(SERVERS) == FAULTY_SERVER
    return True


def scored_step(
    engine: Engine, samples: list[Sample], rng: random.Random, *, is_faulty: bool
) -> list[Scored]:
    rows = []
    for sample, (train, entropy) in zip(samples, score(engine, samples), strict=True):
        rows.append(Scored(sample=sample, train=train, entropy=entropy, is_faulty=is_faulty))
    if rows:
        apply_training_report(engine, rows, rng)
    return rows


def apply_training_report(engine: Engine, rows: list[Scored], rng: random.Random) -> None:
    """A fault of reports in training changes training's values and not the rollout's."""
    copies = [replace(row.sample, log_probs=list(row.train)) for row in rows]
    engine.report(copies, rng)
    for row, changed in zip(rows, copies, strict=True):
        row.train = changed.log_probs


def parts_of(case: Case, row: Scored) -> SampleParts:
    sample = row.sample
    hides_tokens = case.hidden == "tokens"
    entropy = None if hides_tokens or "entropy" in case.hidden else row.entropy
    versions = sample.versions or [sample.step] * len(sample.response)
    workers = [sample.index % len(SERVERS)] * len(sample.response)
    return SampleParts(
        train_log_prob=row.train,
        rollout_log_prob=sample.log_probs,
        loss_mask=sample.mask,
        entropy=entropy,
        token=None if hides_tokens else sample.response,
        prompt=None if hides_tokens else sample.task.prompt,
        weight_version=None if "versions" in case.hidden else versions,
        rollout_worker=workers if case.shows_servers else None,
        step=sample.step,
        sample_index=sample.index,
        group=sample.index // 2,
    )


def metadata_of(case: Case) -> dict[str, Any]:
    metadata: dict[str, Any] = {"source": "held-out generator", "temperature": 1.0}
    if case.names:
        metadata["temperature"] = FAULTS[case.names[0]].temperature
    if case.precision is not None:
        metadata["temperature"] = case.precision.temperature
        metadata.update(case.precision.metadata)
    if case.shows_servers:
        metadata["workers"] = list(SERVERS)
    return metadata


def write_dump(case: Case, rows: Sequence[Scored], path: Path) -> None:
    parts = [parts_of(case, row) for row in rows]
    write(path, TokenTable.from_parts(parts, metadata_of(case)))
