"""Shared prompts, and logits of response rows only: time and peak memory of forward and backward.

    python -m benchmarks.shared_prompts --hf-checkpoint data/smollm2/checkpoint \\
        --prompts 8 --prompt-tokens 48 --response-tokens 12 64 --rounds 5

Random prompts and responses, 8 responses per prompt, one micro-batch, one thread, float32. CPU
time; every round runs each contender once. The log-probs of all contenders are compared with the
first one's.
"""

import argparse
import csv
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import provenance
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.data.sample import SamplingMask
from slime_tis.trainer.megatron.architecture import ResponseModel
from slime_tis.trainer.megatron.batch import TrainingBatch, make_batch
from slime_tis.trainer.megatron.packing import MicroBatch
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from slime_tis.trainer.megatron.training_engine import TrainingEngine

ROWS = Path(__file__).with_suffix(".csv")
SAMPLES = 8
"""Responses to a prompt."""
MIB = 2**20


class EveryRow(TrainingEngine):
    """megatron-core's output layer over all tokens, of which the response tokens are selected."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        module = self.model.module
        (module.__class__,) = ResponseModel.__bases__
        if module.post_process and self.config.sequence_parallel:
            module.output_layer.sequence_parallel, module.output_layer.allreduce_dgrad = True, False

    def _pack(self, batch: TrainingBatch) -> MicroBatch:
        micro = super()._pack(batch)
        self.rows = micro.packed_seq_params.response_rows
        layout = replace(micro.packed_seq_params, response_rows=None, gives_logits=True)
        return replace(micro, packed_seq_params=layout)

    def _from_logits(self, logits: Tensor, micro: MicroBatch) -> tuple[Tensor, ...]:
        rows, mask = self.rows, micro.sampling_mask
        assert rows is not None
        target_T = torch.zeros(len(logits), dtype=torch.int64).index_copy(0, rows, micro.target_L)
        if mask is not None:
            lengths = torch.zeros(len(logits), dtype=torch.int32).index_copy(0, rows, mask.lengths)
            mask = SamplingMask(mask.token_ids, lengths)
        every_row = replace(micro, target_L=target_T, sampling_mask=mask)
        return tuple(values_T[rows] for values_T in super()._from_logits(logits, every_row))


CONTENDERS: dict[str, tuple[type[TrainingEngine], bool]] = {
    "every row": (EveryRow, False),
    "response rows": (TrainingEngine, False),
    "response rows, shared prompts": (TrainingEngine, True),
}


def batch_of(
    vocabulary: int, prompts: int, prompt_tokens: int, response_tokens: int
) -> TrainingBatch:
    """Random groups."""
    chance = torch.Generator().manual_seed(0)

    def draw(count: int, length: int) -> list[list[int]]:
        found: list[list[int]] = torch.randint(
            3, vocabulary, (count, length), generator=chance
        ).tolist()
        return found

    tokens = [
        [*prompt, *response]
        for prompt in draw(prompts, prompt_tokens)
        for response in draw(SAMPLES, response_tokens)
    ]
    rows = [[1] * response_tokens] * len(tokens)
    return make_batch(tokens, rows, rows, rows)


class Measured:
    """One contender."""

    def __init__(self, kind: type[TrainingEngine], config: MegatronConfig, parallel: Any) -> None:
        self.engine = kind(config, parallel, temperature=1.0, total_steps=1)
        self.log_probs = torch.empty(0)

    def seconds(self, batch: TrainingBatch) -> float:
        """CPU time of one pass over the batch."""
        self.engine.ddp.zero_grad_buffer()
        start = time.process_time()
        self.engine._run(batch, [list(range(len(batch)))], self._loss, forward_only=False)
        return time.process_time() - start

    def peak_mib(self, batch: TrainingBatch) -> float:
        """Memory of a pass in addition to weights and gradients."""
        return peak_mib(lambda: self.seconds(batch))

    def _loss(
        self, micro: MicroBatch, log_probs_L: Tensor, entropy_L: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        self.log_probs = log_probs_L.detach()
        return -log_probs_L.sum(), torch.tensor(len(log_probs_L), dtype=torch.int), None


def peak_mib(work: Callable[[], object]) -> float:
    """Additional memory during a call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    work()
    return (status("VmHWM") - before) / MIB


def status(name: str) -> int:
    """Bytes of memory of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(
    contenders: dict[str, Measured], batch: TrainingBatch, rounds: int
) -> list[dict[str, str | float | int]]:
    """The rows of one size."""
    for one in contenders.values():
        one.seconds(batch)  # makes buffers
    seconds = [
        {name: one.seconds(batch) for name, one in contenders.items()} for _ in range(rounds)
    ]
    first = next(iter(contenders.values()))
    return [
        {
            "contender": name,
            "median_s": round(statistics.median(row[name] for row in seconds), 4),
            "times_response_rows": round(
                statistics.median(row[name] / row["response rows"] for row in seconds), 3
            ),
            "peak_mib": round(one.peak_mib(batch), 1),
            "log_prob_difference": float(
                f"{float((one.log_probs - first.log_probs).abs().max()):.1e}"
            ),
        }
        for name, one in contenders.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and appends rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--response-tokens", type=int, nargs="+", default=[12, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    config = MegatronConfig(hf_checkpoint=options.hf_checkpoint, micro_batch_size=1_000_000)
    parallel = initialize(config)
    contenders = {
        name: Measured(kind, replace(config, share_prompts=shares), parallel)
        for name, (kind, shares) in CONTENDERS.items()
    }
    vocabulary = next(iter(contenders.values())).engine.model.hf_config.vocab_size
    about = {
        **provenance(Path(options.hf_checkpoint).resolve().parent.name, options.rounds),
        "prompts": options.prompts,
        "samples": SAMPLES,
        "prompt_tokens": options.prompt_tokens,
    }
    for response_tokens in options.response_tokens:
        batch = batch_of(vocabulary, options.prompts, options.prompt_tokens, response_tokens)
        for row in measure(contenders, batch, options.rounds):
            print(row, flush=True)
            append(options.out, about | {"response_tokens": response_tokens} | row)
    shut_down()


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a row to a CSV file, which begins with the names of its columns."""
    is_new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
