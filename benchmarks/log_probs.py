"""Time and peak memory of log-probs from hidden states, against log-probs from all logits.

    python -m benchmarks.log_probs --hf-checkpoint data/smollm2/checkpoint --rounds 5
    python -m benchmarks.log_probs --vocabulary 151936 --rounds 5

One micro-batch of random tokens, one thread, float32. CPU time; every round runs each contender
once. The log-probs of all contenders are compared with the first one's.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.provenance import provenance
from benchmarks.shared_prompts import Measured, append, batch_of, peak_mib
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.batch import TrainingBatch
from slime_tis.trainer.megatron.packing import MicroBatch
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from slime_tis.trainer.megatron.training_engine import TrainingEngine

ROWS = Path(__file__).with_suffix(".csv")


class AllLogits(TrainingEngine):
    """Logits of all response tokens, saved for the backward pass."""

    def _from_hidden_states(self, hidden_LI: Tensor, micro: MicroBatch) -> tuple[Tensor, ...]:
        module = self.model.module
        logits, _ = module.output_layer(hidden_LI.unsqueeze(1), weight=module.output_weight())
        return self._from_logits(logits.squeeze(1), micro)


class Contender(Measured):
    """One way to compute log-probs, with the engine that all of them share."""

    def __init__(self, engine: TrainingEngine, kind: type[TrainingEngine], every: int = 1) -> None:
        """A contender with the log-probs of `kind`; one of `every` log-probs is in the loss."""
        self.engine, self.kind, self.every = engine, kind, every
        self.log_probs = torch.empty(0)

    def seconds(self, batch: TrainingBatch) -> float:
        """CPU time of one pass over the batch."""
        self.engine.__class__ = self.kind
        return super().seconds(batch)

    def logits_mib(self, batch: TrainingBatch) -> float:
        """Returns the memory of output layer, log-probs and autograd's gradient of the weight."""
        self.engine.__class__ = self.kind
        micro, inputs = self.engine._pack(batch), self.engine.model.config.hidden_size
        hidden_LI = torch.randn(len(micro.target_L), inputs, requires_grad=True)

        def once() -> None:
            log_probs_L, _ = self.engine._from_hidden_states(hidden_LI, micro)
            log_probs_L[:: self.every].sum().backward()

        return peak_mib(once)

    def _loss(
        self, micro: MicroBatch, log_probs_L: Tensor, entropy_L: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        loss, denominator, _ = super()._loss(micro, log_probs_L[:: self.every], entropy_L)
        self.log_probs = log_probs_L.detach()
        return loss, denominator, None


CONTENDERS: dict[str, tuple[type[TrainingEngine], int]] = {
    "all logits": (AllLogits, 1),
    "fused": (TrainingEngine, 1),
    "fused, half of the tokens without gradient": (TrainingEngine, 2),
}


def random_model(directory: Path, vocabulary: int) -> None:
    """A small model with random tied weights, whose largest part is the output layer."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def measure(model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model."""
    config = MegatronConfig(hf_checkpoint=str(model), micro_batch_size=1_000_000)
    parallel = initialize(config)
    engine = TrainingEngine(config, parallel, temperature=1.0, total_steps=1)
    contenders = {
        name: Contender(engine, kind, every) for name, (kind, every) in CONTENDERS.items()
    }
    vocabulary = engine.model.hf_config.vocab_size
    batch = batch_of(vocabulary, options.prompts, options.prompt_tokens, options.response_tokens)
    contenders["all logits"].seconds(batch)  # makes buffers
    peaks = {name: one.peak_mib(batch) for name, one in contenders.items()}
    logits = {
        name: statistics.median(one.logits_mib(batch) for _ in range(options.rounds))
        for name, one in contenders.items()
    }
    seconds = [
        {name: one.seconds(batch) for name, one in contenders.items()}
        for _ in range(options.rounds)
    ]
    first = contenders["all logits"]
    rows = [
        {
            "vocabulary": vocabulary,
            "response_tokens": sum(batch.responses.response_lengths),
            "contender": name,
            "median_s": round(statistics.median(row[name] for row in seconds), 3),
            "times_all_logits": round(
                statistics.median(row[name] / row["all logits"] for row in seconds), 3
            ),
            "peak_mib": round(peaks[name], 1),
            "logits_mib": round(logits[name], 1),
            "log_prob_difference": float(
                f"{float((one.log_probs - first.log_probs).abs().max()):.1e}"
            ),
        }
        for name, one in contenders.items()
    ]
    shut_down()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and appends rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hf-checkpoint", type=Path)
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=151_936,
        help="of a random model, where no checkpoint is given",
    )
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument(
        "--response-tokens", type=int, default=96, help="of each of the 8 samples of a prompt"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    about = provenance(
        "random" if options.hf_checkpoint is None else options.hf_checkpoint.resolve().parent.name,
        options.rounds,
    )
    with tempfile.TemporaryDirectory() as directory:
        if options.hf_checkpoint is None:
            random_model(Path(directory), options.vocabulary)
        for row in measure(options.hf_checkpoint or Path(directory), options):
            print(row, flush=True)
            append(options.out, about | row)


if __name__ == "__main__":
    main()
