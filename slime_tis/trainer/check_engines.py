"""Compares both engines on a few answers before training relies on them (`--check-engines`).

The rollout engine answers some prompts with the options of training, and the training engine scores
the answers with the same weights: Δ = log π_train − log π_rollout of every sampled token. The
search for the cause starts if mean |Δ| is above `max_gap`, the bound that precision explains, or if
Δ has a pattern that precision does not explain. After the first weight update SGLang answers the
same prompts again. A prefix cache with states of older weights then raises mean |Δ|.

For each prompt, the likeliest next tokens of both engines are compared too, at one position of an
answer (`analysis.diagnosis.top_tokens`). This needs no reference and shows settings of the sampler.
"""

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from slime_tis.analysis.diagnosis.causes import CAUSES
from slime_tis.analysis.diagnosis.checkpoint_proof import prove
from slime_tis.analysis.diagnosis.diagnose import MIN_CERTAIN_CONFIDENCE, diagnose
from slime_tis.analysis.diagnosis.top_tokens import Position, TopTokens, compare_top_tokens
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.errors import first_line
from slime_tis.parity.executions import PRECISIONS
from slime_tis.progress import print_line
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.build import training_sampling
from slime_tis.trainer.engines.rollout_engine import RolloutEngine
from slime_tis.trainer.first_difference import difference_from_checkpoint
from slime_tis.trainer.learner import Learner
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.rank_collectives import on_rank_zero
from slime_tis.trainer.train_dump import sample_parts
from slime_tis.trainer.weight_sync import compare, max_gap

PROMPTS = 16
"""Largest number of prompts that the rollout engine answers."""
SAMPLES_PER_PROMPT = 2
"""Answers to each prompt."""
RESPONSE_TOKENS = 32
"""Largest length of an answer, in tokens."""
TOP_TOKENS = 8
"""Number of likeliest next tokens that are compared at one position."""
STRIDE = 7
"""Tokens by which the compared positions of two successive answers differ."""
MAX_PROMPT_TOKENS = 2048
"""Longer prompts are skipped, so that the check takes seconds."""
SEED = 2**32 - 1
"""Number of the check's batch of prompts, which no rollout reaches."""
MAX_PROVEN_BYTES = 1 << 30
"""Largest checkpoint that the search for the cause scores again on a CPU."""
GROWTH = 3.0
"""Factor by which mean |Δ| may grow after an update, in addition to `SMALL`."""
SMALL = 1e-4
"""Growth of mean |Δ| that is always allowed, in nats per token."""
MARGIN = 0.5
"""Largest mean |Δ| of sampled tokens as a share of `max_gap`: twice the noise of SmolLM2-135M in
bf16 or fp8."""
HARMLESS = ("healthy", "rounding")
"""Findings that the precision of the engines explains."""
ATTENTION = "model.layers.0.self_attn.q_proj.weight"
"""A weight with the precision of the rollout engine's matrices."""

Mode = Literal["warn", "stop", "off"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why the engines disagree."""

    sentence: str
    is_certain: bool
    """Whether the mismatch is larger than precision explains, or its cause is proven."""


def show(parallel: Parallel, lines: Sequence[str]) -> None:
    """Prints the lines of a check on the main rank, warnings on stderr."""
    if not parallel.is_main:
        return
    for line in lines:
        stream = sys.stdout
        if line.startswith("warning"):
            stream = sys.stderr
        print_line(line, stream)


@dataclass(kw_only=True)
class EngineCheck:
    """The comparison before the first step, and after the first weight update."""

    mode: Mode
    learner: Learner
    sampler: RolloutEngine
    prompts: Sequence[Prompt]
    path: Path
    """Dump of the answers if the engines disagree."""
    rollout_engine: str
    """Value of --rollout-engine."""
    repeats: bool
    """Whether to compare again after the first weight update: only an engine with a prefix cache
    needs it."""
    gap: float | None = field(default=None, init=False)
    """Mean |Δ| before the first step, nats; None before the check."""

    def before_training(self) -> list[str]:
        """Compares the engines and returns lines to print; a collective.

        Raises:
            ValueError: They disagree, and the mode is stop.
        """
        short = [prompt for prompt in self.prompts if len(prompt.token_ids) <= MAX_PROMPT_TOKENS]
        prompts = short[:PROMPTS]
        self.repeats &= self.mode != "off" and bool(prompts)
        if self.mode == "off":
            return []
        if not prompts:
            return [
                f"the engines are not compared: no prompt of at most {MAX_PROMPT_TOKENS} tokens is"
                " known"
            ]
        self.prompts = prompts
        comparison = self._compare()
        if comparison is None:
            self.repeats = False
            return self._alarm(
                "the rollout engine gave no answer before the first step; check its log."
            )
        samples, table, gap = comparison
        self.gap = gap
        tokens = sum(sample.response_length for sample in samples)
        size = f"mean abs(Δ) is {gap:.2g} nats over {tokens} tokens of {len(samples)} answers"
        precision = on_rank_zero(lambda: self.sampler.weight_precision(ATTENTION))
        bound = MARGIN * max_gap(self.learner.engine.config.precision, precision, tokens)
        top = self._top_tokens(samples, bound / 2)
        if top is not None:
            size = f"{size}; {top.size}"
        # Negated, so that a gap of NaN is large.
        is_large = not gap <= bound
        fault = on_rank_zero(lambda: self._fault(table, top, is_large=is_large))
        if fault is None:
            return [f"engines agree before the first step: {size}"]
        # An engine that disagrees already cannot show a stale cache after the update.
        self.repeats = False
        sentences = [f"the engines disagree before the first step: {size}.", fault.sentence]
        operation = self._first_difference(samples)
        if operation:
            sentences.append(operation)
        sentences.append(self._advice(precision))
        return self._alarm(" ".join(sentences), stops=fault.is_certain)

    def _advice(self, rollout_precision: str | None) -> str:
        """Returns the commands that search further for the cause."""
        checkpoint = self.learner.engine.config.hf_checkpoint
        advice = (
            f"`slime-tis diagnose {self.path} --hf-checkpoint {checkpoint}` scores the answers"
            " again."
        )
        parity = self._parity_command(rollout_precision)
        if parity:
            advice += f" `{parity}` compares the engines on the checkpoint, operation by operation."
        return advice

    def _first_difference(self, samples: Sequence[Sample]) -> str:
        """Names the first operation of training that differs from transformers'; a collective.

        Returns:
            A sentence. It is empty if a rank has a part of the layers or of the sequences, if the
            policy is not the checkpoint, or if the checkpoint is large.
        """
        config = self.learner.engine.config
        parallel = self.learner.parallel
        is_divided = parallel.pipeline_size * parallel.context_size > 1 or config.sequence_parallel
        # An adapter of an earlier run changes the policy.
        if is_divided or config.lora_adapter_path is not None:
            return ""
        size = on_rank_zero(lambda: checkpoint_bytes(config.hf_checkpoint))
        if size > MAX_PROVEN_BYTES:
            return ""
        # The longest answer shows most positions.
        longest = max(samples, key=lambda sample: len(sample.tokens))
        try:
            return difference_from_checkpoint(self.learner, longest.tokens)
        # A check that fails must not end the run.
        except Exception as error:
            return f"Comparing operations failed: {first_line(error)}"

    def _parity_command(self, rollout_precision: str | None) -> str:
        """Returns the command that compares both engines; empty if it does not know one of them."""
        config = self.learner.engine.config
        if config.precision not in PRECISIONS:
            return ""
        words = ["slime-tis", "parity", config.hf_checkpoint, "--precision", config.precision]
        if self.rollout_engine != "local":
            # Behind a router, servers have no names.
            if not self.sampler.workers:
                return ""
            words += ["--reference", "training", "--other", self.rollout_engine]
            words += ["--url", self.sampler.workers[0]]
        elif rollout_precision in PRECISIONS:
            words += ["--reference", "training", "--other", "local"]
            if rollout_precision != config.precision:
                words += ["--other-precision", rollout_precision]
        else:
            # The rounded weights of the engine exist only there.
            words += ["--reference", "full", "--other", "training"]
        return shlex.join(words)

    def after_update(self) -> list[str]:
        """Compares the engines again, once, and returns lines to print; a collective."""
        if not self.repeats:
            return []
        self.repeats = False
        comparison = self._compare()
        assert self.gap is not None  # before_training ran
        if comparison is None:
            return []
        _, _, gap = comparison
        if gap <= GROWTH * self.gap + SMALL:
            return []
        return self._alarm(
            f"mean abs(Δ) on the same prompts is {gap:.2g} nats after the first weight update and"
            f" was {self.gap:.2g} before. The rollout engine has a stale prefix cache, or a server"
            " missed the update: flush the cache at every update, and compare the weights with"
            " --check-weight-sync."
        )

    def _alarm(self, message: str, *, stops: bool = True) -> list[str]:
        """Returns a message as a warning, or ends the run with it."""
        if self.mode == "stop" and stops:
            raise ValueError(f"--check-engines: {message}")
        return [f"warning: {message}"]

    def _compare(self) -> tuple[list[Sample], TokenTable, float] | None:
        """Samples answers and scores them by both engines; a collective.

        Returns:
            The answers, a table of their log-probs, and mean |Δ|; None without answers.
        """
        sampling = self._sampling
        # The seed of a batch, as rollouts compute theirs, with a number that no rollout reaches.
        seed = (self.learner.rollout.rollout_seed << 32) + SEED
        groups = self.sampler.generate(self.prompts, sampling, seed)
        samples = [sample for sample in chain.from_iterable(groups) if sample.response_length]
        if not samples:
            return None
        rows, gap = self._scores(samples)
        parts = list(map(sample_parts, samples, rows))
        metadata = {
            "source": "slime_tis",
            "temperature": sampling.temperature,
            "workers": list(self.sampler.workers),
        }
        return samples, TokenTable.from_parts(parts, metadata), gap

    @property
    def _sampling(self) -> Sampling:
        """The options of training with fewer and shorter answers."""
        options = self.learner.rollout
        length = min(RESPONSE_TOKENS, options.rollout_max_response_len)
        return replace(
            training_sampling(options), n_samples=SAMPLES_PER_PROMPT, max_response_len=length
        )

    def _scores(self, samples: Sequence[Sample], size: int = 1) -> tuple[list[list[float]], float]:
        """Scores responses by the training engine; a collective.

        Args:
            samples: The scored samples.
            size: Number of samples in a micro-batch.

        Returns:
            Log-probs per response, and mean |Δ|.
        """
        batch, log_probs_L = self.learner.score(samples, size)
        parallel = self.learner.parallel
        tokens = batch.responses.to(log_probs_L.device)
        comparison = compare(parallel, tokens.rollout_log_probs_L, log_probs_L, None, None)
        rows: list[list[float]] = []
        if parallel.is_last_stage:
            log_probs_N = parallel.ranks.over_context(tokens.slices.scatter(log_probs_L))
            lengths = [sample.response_length for sample in samples]
            rows = [row.tolist() for row in log_probs_N.split(lengths)]
        return parallel.broadcast_from_last_stage(rows), comparison.gap

    def _top_tokens(self, samples: Sequence[Sample], noise: float) -> TopTokens | None:
        """Compares the likeliest next tokens within an answer to each prompt; a collective.

        Training scores each of these tokens as a response of one token.
        """
        texts = []
        for number, sample in enumerate(samples[::SAMPLES_PER_PROMPT]):
            # Different positions, because errors may depend on the position.
            length = STRIDE * number % sample.response_length
            texts.append([*sample.prompt_ids, *sample.response_ids[:length]])
        answers = self.sampler.top_log_probs(texts, self._sampling, TOP_TOKENS)
        # After a failure of the engine there are fewer answers.
        answered = [(text, top) for text, top in zip(texts, answers, strict=False) if top]
        responses = []
        for text, top in answered:
            for token, log_prob in top.items():
                response = Sample(
                    tokens=[*text, token],
                    response_length=1,
                    loss_mask=[1],
                    rollout_log_probs=[log_prob],
                    weight_versions=[self.sampler.weight_version],
                )
                responses.append(response)
        if not responses:
            return None
        rows, _ = self._scores(responses, TOP_TOKENS)
        trained = chain.from_iterable(rows)
        positions = []
        for text, top in answered:
            trained_top = {token: next(trained) for token in top}
            positions.append(Position(text, trained_top, top))
        return compare_top_tokens(positions, noise)

    def _fault(self, table: TokenTable, top: TopTokens | None, *, is_large: bool) -> Fault | None:
        """Finds why the engines disagree and writes the dump; None if precision explains it."""
        diagnosis = diagnose(table)
        finding = diagnosis.findings[0]
        is_named = finding.cause not in HARMLESS and finding.confidence >= MIN_CERTAIN_CONFIDENCE
        is_shown = top is not None and bool(top.cause)
        if not (is_large or is_named or is_shown):
            return None
        title = finding.title
        if top is not None and top.cause:
            title = CAUSES[top.cause].title
        sentence = f"The likely cause: {title}."
        is_proven = is_shown
        checkpoint = self.learner.engine.config.hf_checkpoint
        size = checkpoint_bytes(checkpoint)
        # Nothing is left to score if a certain finding explains all tokens. With a loaded LoRA
        # adapter, the checkpoint is not the policy.
        answers = diagnosis.rest
        has_adapter = self.learner.engine.config.lora_adapter_path is not None
        is_scored = not has_adapter and size <= MAX_PROVEN_BYTES
        if answers is not None and answers.valid.any() and is_scored:
            try:
                _, proof = prove(answers, checkpoint)
            # A check that fails must not end the run.
            except Exception as error:
                sentence = f"{sentence} Scoring again failed: {first_line(error)}"
            else:
                if proof.causes == ("rounding",) and not (is_large or is_shown):
                    return None
                if diagnosis.server or not proof.causes:
                    sentence = f"{sentence} {proof.sentence}"
                else:
                    sentence = proof.sentence
                is_proven = is_shown or proof.is_proven
        if top is not None:
            sentence = f"{sentence} The likeliest tokens: {top.evidence}."
        from slime_tis.analysis.dumps.files import check_replaceable, write  # needs pyarrow, 25 MiB

        with suppress(OSError, ValueError):
            check_replaceable(self.path)
            write(self.path, table)
        return Fault(sentence=sentence, is_certain=is_large or is_proven)


def checkpoint_bytes(directory: str) -> int:
    """Returns the size of the weights of a Hugging Face directory."""
    return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
