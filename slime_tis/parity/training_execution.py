"""The training engine: Megatron layers over packed samples."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slime_tis.errors import quoted_path
from slime_tis.families import FAMILIES
from slime_tis.hf_directory import read_model_config
from slime_tis.hf_tensors import check_tensors
from slime_tis.parity.executions import Record, Side
from slime_tis.parity.recording import Recorder, Recording, Rows
from slime_tis.parity.samples import Samples
from slime_tis.parity.shared_kernels import kernels_of
from slime_tis.parity.training_sites import recorded
from slime_tis.peft_directory import check_base
from slime_tis.trainer.configs.adapter_targets import check_adapters
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from slime_tis.trainer.megatron.training_engine import TrainingEngine


def check(side: Side) -> None:
    """Refuses a model or an adapter that the engine does not train, from the files' headers.

    Raises:
        ValueError: The model, its tensors or the adapter does not fit.
    """
    model = read_model_config(side.checkpoint, "the checkpoint")
    check_tensors(side.checkpoint, model)
    if side.adapter:
        with _naming_the_adapter():
            check_adapters(_config(side), FAMILIES[model["architectures"][0]])
        check_base(
            side.adapter,
            side.checkpoint,
            f"the adapter is {quoted_path(side.adapter)}",
            layers=model["num_hidden_layers"],
        )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    kernels_of(side, device_type)


@contextmanager
def opened(side: Side) -> Iterator[Record]:
    """Builds the training engine on one rank; yields its execution."""
    # megatron-core warns of layers that it does not know.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    config = _config(side)
    parallel = initialize(config)
    try:
        kernels = kernels_of(side, parallel.device.type)
        with _naming_the_adapter():
            engine = TrainingEngine(
                config, parallel, temperature=1.0, total_steps=1, kernels=kernels
            )

        @torch.no_grad()
        def record(samples: Samples, substitutes: Recording | None = None) -> Recording:
            return _record(engine, side, samples, substitutes)

        yield record
    finally:
        shut_down()


def _config(side: Side) -> MegatronConfig:
    """Returns the engine's options."""
    return MegatronConfig(
        hf_checkpoint=side.checkpoint,
        bf16=side.precision == "bf16",
        lora_adapter_path=side.adapter or None,
        # Packed once per sample, so that every token has a row.
        share_prompts=False,
        micro_batch_size=1,
    )


@contextmanager
def _naming_the_adapter() -> Iterator[None]:
    """Replaces the option of train.py in errors about the adapter; parity has no such option."""
    try:
        yield
    except ValueError as error:
        message = str(error).replace("--lora-adapter-path is", "the adapter is")
        raise ValueError(message) from error


def _record(
    engine: TrainingEngine, side: Side, samples: Samples, substitutes: Recording | None
) -> Recording:
    """Scores all tokens but the first of every sample, in one packed row."""
    recorder = Recorder(samples.total, substitutes)
    token_T = torch.arange(samples.total)
    recorder.begin(Rows((1, samples.total), token_T, token_T))
    lengths = [len(tokens) - 1 for tokens in samples.tokens]
    batch = make_batch(
        samples.tokens,
        [[1] * length for length in lengths],
        [[0.0] * length for length in lengths],
        [[0] * length for length in lengths],
    )
    with recorded(engine, recorder):
        log_probs_L = engine.log_probs(batch, [list(range(len(samples)))])
    log_probs_T = torch.full([samples.total], torch.nan)
    log_probs_T[samples.predicted] = log_probs_L.float().cpu()
    return Recording(
        name=side.execution,
        precision=side.precision,
        results=recorder.results,
        log_probs_T=log_probs_T,
        is_scored_T=samples.predicted,
        shapes=recorder.shapes,
    )
