"""Log-probs by transformers and by the layers of this project's trainer, in this process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_tis.analysis.diagnosis.rescore import load_model
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.engines.local.token_sampling import filtered_logits, log_softmax
from slime_tis.trainer.engines.weight_rounding import DTYPES
from slime_tis.trainer.megatron.batch import TrainingBatch, fixed_partition, make_batch
from slime_tis.trainer.megatron.packing import pack
from slime_tis.trainer.megatron.parallel import Parallel, initialize, shut_down
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from studies.engines.clients import Scored
from studies.engines.measures import Top
from studies.engines.records import TOP_TOKENS, Precision, Report, Sampling, TokenSet

LOWEST = -1e4
"""A log-prob whose probability is 0 in float32."""
DISTRIBUTIONS: tuple[Report, ...] = ("raw", "temperature", "processed")


def scored(logits_LV: Tensor, tokens: Sequence[int], sampling: Sampling, report: Report) -> Scored:
    """Returns log-probs and likeliest tokens of a distribution.

        raw          log softmax(z)
        temperature  log softmax(z / temperature)
        processed    the same over the tokens that top-p keeps

    Args:
        logits_LV: z at each token.
        tokens: Ids, one per row.
        sampling: Temperature and top-p.
        report: Which of the three distributions.
    """
    # Temperature 0 draws the likeliest token; log-probs are then those of temperature 1.
    temperature = 1.0
    top_p = 1.0
    if report != "raw":
        temperature = sampling.temperature
    if report == "processed":
        top_p = sampling.top_p
    filtered_LV = filtered_logits(logits_LV, temperature=temperature, top_p=top_p, top_k=-1)
    log_probs_LV = log_softmax(filtered_LV)
    target_L1 = torch.tensor(list(tokens))[:, None]
    # A removed token has the log-prob −inf and no share of the entropy.
    entropy_L = -(log_probs_LV.exp() * log_probs_LV.clamp_min(LOWEST)).sum(1)
    return Scored(
        log_probs=log_probs_LV.gather(1, target_L1)[:, 0].tolist(),
        top=likeliest(log_probs_LV),
        entropy=entropy_L.tolist(),
    )


def likeliest(log_probs_LV: Tensor) -> list[Top]:
    """Returns the 20 likeliest tokens of each row, without removed ones."""
    values_LK, tokens_LK = log_probs_LV.topk(min(TOP_TOKENS, log_probs_LV.shape[1]), dim=1)
    tops: list[Top] = []
    for tokens, values in zip(tokens_LK.tolist(), values_LK.tolist(), strict=True):
        top = {}
        for token, value in zip(tokens, values, strict=True):
            if value > -torch.inf:
                top[token] = value
        tops.append(top)
    return tops


def reports(
    logits_LV: Tensor, tokens: Sequence[int], sampling: Sampling
) -> Mapping[Report, Scored]:
    """Returns the distributions that differ under a sampling."""
    if sampling.temperature in (0.0, 1.0) and sampling.top_p == 1.0:
        return {"raw": scored(logits_LV, tokens, sampling, "raw")}
    return {report: scored(logits_LV, tokens, sampling, report) for report in DISTRIBUTIONS}


class TransformersModel:
    """A checkpoint in transformers, one sequence at a time."""

    def __init__(self, checkpoint: Path, precision: Precision) -> None:
        self.model: Any = load_model(str(checkpoint)).to(DTYPES[precision]).eval()

    @torch.inference_mode()
    def in_one_pass(self, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
        """Returns logits [L, V] of the answer's tokens."""
        ids = torch.tensor([[*prompt, *response]])
        logits: Tensor = self.model(ids, logits_to_keep=len(response) + 1).logits
        return logits[0, :-1].float()

    @torch.inference_mode()
    def decoded(self, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
        """Returns the same, token by token with a cache of keys and values."""
        rows = []
        cache = None
        ids = list(prompt)
        for token in response:
            output = self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows.append(output.logits[0, -1].float())
            ids = [token]
        return torch.stack(rows)

    @torch.inference_mode()
    def sample(
        self, prompt: Sequence[int], sampling: Sampling, *, length: int, end: int, seed: int
    ) -> list[int]:
        """Samples an answer token by token with a cache."""
        generator = torch.Generator().manual_seed(seed)
        response: list[int] = []
        cache = None
        ids = list(prompt)
        while len(response) < length and end not in response:
            output = self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits_1V = output.logits[:, -1]
            if sampling.temperature == 0.0:
                token = int(logits_1V.argmax())
            else:
                filtered_1V = filtered_logits(
                    logits_1V, temperature=sampling.temperature, top_p=sampling.top_p, top_k=-1
                )
                token = int(filtered_1V.softmax(-1).multinomial(1, generator=generator))
            response.append(token)
            ids = [token]
        return response


@contextmanager
def megatron(checkpoint: Path) -> Iterator["MegatronModels"]:
    """Starts megatron-core on one rank, and shuts it down."""
    parallel = initialize(MegatronConfig(hf_checkpoint=str(checkpoint)))
    try:
        yield MegatronModels(checkpoint, parallel)
    finally:
        shut_down()


class MegatronModels:
    """A checkpoint in the layers of this project's trainer."""

    def __init__(self, checkpoint: Path, parallel: Parallel) -> None:
        self._checkpoint = checkpoint
        self._parallel = parallel

    def load(self, precision: Precision) -> TrainingEngine:
        """Returns the engine that train.py builds with --bf16 or without."""
        config = MegatronConfig(hf_checkpoint=str(self._checkpoint), bf16=precision == "bf16")
        return TrainingEngine(config, self._parallel, temperature=1.0, total_steps=1)


def megatron_scores(
    engine: TrainingEngine, tokens: TokenSet, per_row: int
) -> Mapping[Report, list[Scored]]:
    """Scores a token set as training does.

    The log-probs at temperature 1 are those of a training pass. Likeliest tokens and other
    distributions come from the logits of the same layers.

    Args:
        engine: The trainer's engine.
        tokens: The token set.
        per_row: Sequences that are packed into one row.
    """
    batch = _batch(tokens)
    with torch.no_grad():
        trained_L = engine.log_probs(batch, fixed_partition(len(batch), per_row))
    lengths = [len(response) for response in tokens.responses]
    trained = iter(trained_L.split(lengths))
    found: dict[Report, list[Scored]] = {}
    for start in range(0, len(batch), per_row):
        rows = list(range(start, min(start + per_row, len(batch))))
        responses = [tokens.responses[row] for row in rows]
        logits = _logits(engine, batch.select(rows)).split([len(each) for each in responses])
        for response, logits_LV in zip(responses, logits, strict=True):
            for report, one in reports(logits_LV, response, tokens.sampling).items():
                if report == "raw":
                    one = replace(one, log_probs=next(trained).tolist())
                found.setdefault(report, []).append(one)
    return found


def _batch(tokens: TokenSet) -> TrainingBatch:
    ones = [[1] * len(response) for response in tokens.responses]
    zeros = [[0] * len(response) for response in tokens.responses]
    unknown = [[0.0] * len(response) for response in tokens.responses]
    return make_batch(tokens.sequences(), ones, unknown, zeros)


@torch.no_grad()
def _logits(engine: TrainingEngine, batch: TrainingBatch) -> Tensor:
    """Returns logits [L, V] of the answers' tokens, which the trainer itself never builds."""
    micro = pack(batch, rotary=engine.model.rotary)
    micro.packed_seq_params.gives_logits = True
    engine.ddp.train(False)
    output: Tensor = engine.ddp(
        input_ids=micro.input_ids,
        position_ids=micro.position_ids,
        attention_mask=None,
        packed_seq_params=micro.packed_seq_params,
    )
    # The columns that pad the vocabulary are not tokens.
    return output[0, :, : engine.model.hf_config.vocab_size].float()
