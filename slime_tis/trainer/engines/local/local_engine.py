"""The in-process rollout engine, on transformers."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slime_tis.errors import CustomFunctionError, first_line
from slime_tis.peft_directory import TENSOR
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling, check_room
from slime_tis.trainer.engines.event_loops import CANCELLED, cancel_and_wait, run
from slime_tis.trainer.engines.function_requests import (
    Generation,
    Request,
    RequestOptions,
    RolloutFunction,
    sample_of,
)
from slime_tis.trainer.engines.function_rollouts import (
    FunctionBatch,
    FunctionCall,
    calls_over_ranks,
    resumed_groups,
)
from slime_tis.trainer.engines.local.continuous_batching import ContinuousBatching
from slime_tis.trainer.engines.local.invariant_model import batching_options, install
from slime_tis.trainer.engines.local.load_model import (
    eos_token_ids,
    linear_weight_names,
    load_model,
    weights_by_file_name,
)
from slime_tis.trainer.engines.local.slot_cache import check_config
from slime_tis.trainer.engines.local.token_sampling import (
    filtered_logits,
    log_softmax,
    prompt_uniforms,
)
from slime_tis.trainer.engines.local.unmerged_adapters import UnmergedAdapters
from slime_tis.trainer.engines.rollout_engine import SentRows, WeightSource
from slime_tis.trainer.engines.weight_rounding import DTYPES, ROUNDINGS, Precision, round_bits
from slime_tis.trainer.engines.weight_updates import OUTPUT_LAYER
from slime_tis.trainer.invariant.self_check import Kernels
from slime_tis.trainer.matrix_products import use_fast_linear_layers
from slime_tis.trainer.rank_collectives import map_over_ranks
from slime_tis.trainer.storage.checkpoint_files import ROLLOUT_WEIGHTS

NAME = "the local engine"


def roundings(
    model: PreTrainedModel, precision: str, router_bits: int | None
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Returns the rounding functions of weights by name.

    Args:
        model: The rollout model.
        precision: Rounds linear layers and experts if it is fp8, int8 or int4.
        router_bits: Rounds routers to this number of bits; None does not round them.
    """
    by_name: dict[str, Callable[[Tensor], Tensor]] = {}
    if precision in ROUNDINGS:
        by_name = dict.fromkeys(linear_weight_names(model), ROUNDINGS[precision])
    if router_bits is not None:
        round_router = partial(round_bits, bits=router_bits)
        for name, _ in model.named_parameters():
            if name.endswith(".mlp.gate.weight"):
                by_name[name] = round_router
    return by_name


@dataclass(frozen=True)
class CompletedRollout:
    """A completed rollout."""

    groups: list[list[Sample]]

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers of complete and of all responses."""
        total = sum(map(len, self.groups))
        return total, total

    def is_done(self) -> bool:
        """True: an in-process engine samples immediately."""
        return True

    def result(self) -> list[list[Sample]]:
        """The groups."""
        return self.groups


class LocalEngine:
    """Samples with a Hugging Face model in this process; see `rollout_engine.RolloutEngine`.

    A sample depends only on the seed, its prompt and the weights, not on its batch or rank. In a
    torch.distributed job every rank has the complete model and samples its share of the prompts.

    Engines with 8-bit and 4-bit weights are emulated: matrices of linear layers and experts are
    rounded when they are loaded, and the model computes with the rounded values in training's
    precision. In bf16, each value is rounded again, to 8 significant bits.
    """

    can_checkpoint_weights = True
    workers: tuple[str, ...] = ("local",)
    http_address = None

    def __init__(  # noqa: PLR0913
        self,
        hf_checkpoint: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        precision: Precision = "fp32",
        emulation_dtype: torch.dtype = torch.float32,
        router_bits: int | None = None,
        kernels: Kernels | None = None,
        lora_scale: float | None = None,
        device: torch.device | str = "cpu",
        check_interrupts: Callable[[], None] = lambda: None,
    ) -> None:
        """Loads the model.

        Args:
            hf_checkpoint: Directory of the model.
            tokenizer: Its tokenizer.
            precision: Precision of the weights.
            emulation_dtype: Type in which an engine with 8-bit or 4-bit weights computes.
            router_bits: Rounds routers to this number of bits; None does not round them.
            kernels: Operations of training; None for transformers' own.
            lora_scale: Scale of LoRA adapters. Weight updates then have A and B by PEFT's names,
                and the model's weights stay. None if updates have all weights.
            device: Device of the model.
            check_interrupts: Called while the engine samples.
        """
        self.weight_version = 0
        self._serves_functions = False
        self._tokenizer = tokenizer
        self._check_interrupts = check_interrupts
        self._model = load_model(hf_checkpoint, DTYPES.get(precision, emulation_dtype)).to(device)
        check_config(self._model.config)
        self._invariant_options: dict[str, Any] = {}
        if kernels is not None:
            install(self._model, kernels)
            self._invariant_options = batching_options(kernels)
        else:
            use_fast_linear_layers(self._model)
        self._weights = weights_by_file_name(self._model)
        self._adapters: UnmergedAdapters | None = None
        if lora_scale is not None:
            self._adapters = UnmergedAdapters(self._model, lora_scale)
        self._precision: Precision = precision
        self._roundings = roundings(self._model, precision, router_bits)
        for name in self._roundings:
            self._assign(name, self._weights[name])
        self._eos_token_ids = eos_token_ids(self._model, tokenizer)
        self.max_context_len = getattr(self._model.config, "max_position_embeddings", None)

    @property
    def model(self) -> PreTrainedModel:
        """The rollout model, for comparisons of its states."""
        return self._model

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        *,
        function: RolloutFunction | None = None,
        concurrency: int = 1,
        num_groups: int | None = None,
    ) -> CompletedRollout:
        """Samples or calls the function immediately; a function that blocks delays all others."""
        if num_groups is not None:
            raise ValueError(
                "the local engine completes all groups of a rollout; use --rollout-engine sglang."
            )
        if function is None:
            return CompletedRollout(self.generate(prompts, sampling, seed))

        async def make_rollouts(calls: Sequence[Sequence[FunctionCall]]) -> None:
            batching = self._batching(sampling)
            batch = FunctionBatch(
                calls,
                function,
                batching.answer,
                sampling,
                concurrency,
                vocab_size=self._model.get_input_embeddings().num_embeddings,
                end_sample=batching.end_sample,
            )

            def ended(task: asyncio.Task[None]) -> None:
                # A user's function may cancel every task of the loop, this one included.
                if task.cancelled():
                    batch.fail(CustomFunctionError(CANCELLED))
                elif isinstance(error := task.exception(), Exception):
                    batch.fail(error)

            answering = asyncio.create_task(batching.run())
            answering.add_done_callback(ended)
            self._serves_functions = True
            try:
                await batch.run()
            finally:
                self._serves_functions = False
                await cancel_and_wait([answering])

        calls = resumed_groups([], prompts, sampling.n_samples, seed)
        return CompletedRollout(calls_over_ranks(lambda share: run(make_rollouts(share)), calls))

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> list[list[Sample]]:
        """See `rollout_engine.RolloutEngine`.

        Raises:
            ValueError: A prompt leaves no room for a response.
        """
        for prompt in prompts:
            check_room(prompt, sampling, self.max_context_len)
        calls = resumed_groups([], prompts, sampling.n_samples, seed)
        responses = map_over_ranks(lambda share: self._respond(share, sampling), calls)
        groups = []
        for calls_of_group, responses_of_group in zip(calls, responses, strict=True):
            samples = []
            for call, response in zip(calls_of_group, responses_of_group, strict=True):
                samples.append(sample_of(call.prompt, response, call.group_index, call.number))
            groups.append(samples)
        return groups

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Loads all weights and rounds them, or loads the adapters.

        Raises:
            ValueError: A weight is unknown, missing or of another shape.
            RuntimeError: Functions are sending requests.
        """
        if self._serves_functions:
            raise RuntimeError(
                "weights cannot change while functions use the local engine; update them"
                " afterwards."
            )
        if self._adapters is not None:
            for name, tensor in source():
                self._adapters.assign(name, tensor)
            self.weight_version = version
            return
        arrived = set()
        for name, tensor in source():
            held = self._weights.get(name)
            if held is None or tensor.shape != held.shape:
                shape = tuple(tensor.shape)
                raise ValueError(
                    f"weight update {version} has {name!r} of shape {shape}, and the rollout model"
                    " does not."
                )
            self._assign(name, tensor)
            arrived.add(held.data_ptr())
        # By address: tied weights have two names but arrive under one.
        missing = [
            name for name, weight in self._weights.items() if weight.data_ptr() not in arrived
        ]
        if missing:
            raise ValueError(
                f"weight update {version} lacks {len(missing)} parameters, the first"
                f" {missing[0]!r}."
            )
        self.weight_version = version

    def weight_precision(self, name: str) -> Precision:
        """The 8-bit or 4-bit precision of rounded weights, else the weight's dtype.

        Router biases, which transformers keeps in float32, count as fp32.
        """
        rounding = ROUNDINGS.get(self._precision)
        if rounding is not None and self._roundings.get(name) is rounding:
            return self._precision
        precisions = {dtype: precision for precision, dtype in DTYPES.items()}
        if self._adapters is not None and TENSOR.fullmatch(name):
            return precisions[self._adapters.dtype]
        if name not in self._weights:
            return "fp32"
        return precisions[self._weights[name].dtype]

    def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Tensors whose rows differ in a bit, except routers that --rollout-router-bits rounds."""
        rounding = ROUNDINGS.get(self._precision)
        # Looked up in the model: a tied output layer can have become a stale copy.
        output_layer = {OUTPUT_LAYER: self._model.get_output_embeddings().weight}
        held = self._weights | output_layer
        if self._adapters is not None:
            held |= self._adapters.tensors()
        wrong = []
        for name, rows in sent.items():
            if self._roundings.get(name) not in (None, rounding):
                continue
            held_rows = held[name][rows.first :: rows.stride].cpu()
            # An emulated engine rounds to its precision, then to the type in which it computes.
            if not torch.equal(held_rows, rows.rows.to(held_rows.dtype)):
                wrong.append(name)
        return {NAME: wrong}

    @torch.no_grad()
    def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """See `rollout_engine.RolloutEngine`."""
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        log_probs = log_softmax(self._model(ids).logits[0, :-1])
        return {NAME: log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist()}

    def cached_tokens(self, token_ids: Sequence[int]) -> dict[str, int]:
        """Returns nothing: no keys and values outlive a rollout."""
        return {}

    @torch.no_grad()
    def top_log_probs(
        self, texts: Sequence[Sequence[int]], sampling: Sampling, count: int
    ) -> list[dict[int, float]]:
        """See `rollout_engine.RolloutEngine`."""
        result = []
        for text in texts:
            ids = torch.tensor([list(text)], device=self._model.device)
            logits_BV = self._model(ids).logits[:, -1]
            logits_BV = filtered_logits(
                logits_BV, temperature=sampling.temperature, top_p=1.0, top_k=-1
            )
            top = log_softmax(logits_BV)[0].topk(min(count, logits_BV.shape[1]))
            result.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        return result

    def unfinished(self) -> list[list[Sample]]:
        """An empty list: every response is complete."""
        return []

    def resume_unfinished(self, groups: list[list[Sample]]) -> None:
        """Raises ValueError if another engine left unfinished groups."""
        if groups:
            raise ValueError(
                f"the checkpoint has {len(groups)} unfinished groups of a partial rollout; resume"
                " with --rollout-engine sglang --partial-rollout."
            )

    def metrics(self) -> dict[str, float]:
        """An empty dict."""
        return {}

    def save_weights(self, directory: Path) -> None:
        """Writes the rounded weights into a checkpoint."""
        held = dict(self._tensors())
        if self._adapters is not None:
            held = self._adapters.tensors()
        tensors = {name: weight.cpu() for name, weight in held.items()}
        save_file(tensors, directory / ROLLOUT_WEIGHTS)

    def load_weights(self, directory: Path, version: int) -> None:
        """Loads the weights that `save_weights` wrote, without rounding them again.

        Raises:
            ValueError: The file is damaged, or its weights do not fit.
        """
        path = directory / ROLLOUT_WEIGHTS
        try:
            with safe_open(str(path), "pt") as file, torch.no_grad():
                if self._adapters is not None:
                    for name in file.keys():  # noqa: SIM118  (the file is no dictionary)
                        self._adapters.assign(name, file.get_tensor(name))
                    self.weight_version = version
                    return
                for name, weight in self._tensors():
                    weight.copy_(file.get_tensor(name))
        # `copy_` raises RuntimeError if the file's tensor has another shape.
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ValueError(
                f"{path} was not loaded: {first_line(error)}; restore the checkpoint."
            ) from error
        self.weight_version = version

    def close(self) -> None:
        """Frees the model."""
        del self._model, self._weights

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Named tensors of the model, tied ones once, without buffers such as rotary tables."""
        persistent = self._model.state_dict().keys()
        yield from self._model.named_parameters()
        for name, buffer in self._model.named_buffers():
            if name in persistent:
                yield name, buffer

    def _assign(self, name: str, tensor: Tensor) -> None:
        if name in self._roundings:
            tensor = self._roundings[name](tensor)
        with torch.no_grad():
            self._weights[name].copy_(tensor)

    def _batching(self, sampling: Sampling) -> ContinuousBatching:
        return ContinuousBatching(
            model=self._model,
            tokenizer=self._tokenizer,
            context_len=self.max_context_len,
            eos_token_ids=frozenset(self._eos_token_ids),
            weight_version=self.weight_version,
            records_routing=sampling.records_routing,
            check_interrupts=self._check_interrupts,
            **self._invariant_options,
        )

    def _respond(
        self, groups: Sequence[Sequence[FunctionCall]], sampling: Sampling
    ) -> list[list[Generation]]:
        """Samples the responses of each group."""
        options = RequestOptions(sampling=sampling, stop=sampling.stop, no_stop_trim=True)
        requests = []
        for index, group in enumerate(groups):
            first = group[0]
            request = Request(
                token_ids=list(first.prompt.token_ids),
                options=options,
                key=b"",  # the uniforms below replace those of the key
                session=(index, None),
            )
            uniforms = prompt_uniforms(
                first.key.seed,
                first.key.prompt_index,
                first.key.occurrence,
                n_samples=sampling.n_samples,
                length=sampling.max_response_len,
            )
            for row in uniforms:
                requests.append((request, row))
        responses = iter(self._batching(sampling).answer_all(requests))
        return [list(islice(responses, len(group))) for group in groups]
