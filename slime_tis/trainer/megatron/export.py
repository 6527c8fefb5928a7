"""Exports the policy as a Hugging Face directory."""

from pathlib import Path

from slime_tis.trainer.megatron.checkpoint import CheckpointError
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.storage import exports
from slime_tis.trainer.storage.hf_checkpoint import SHARD_BYTES, side_files, write_hf_checkpoint


def save_hf(directory: str | Path, engine: TrainingEngine) -> Path | None:
    """Writes the policy as a Hugging Face directory, under another name until it is complete; a collective.

    Returns:
        On the main process its path: `directory`, or a numbered sibling if `directory` has unknown files by now. None
        on the other processes.

    Raises:
        CheckpointError: it could not be written; `directory` is unchanged.
    """
    tensors = engine.named_hf_tensors()
    if not engine.parallel.is_main:
        for _ in tensors:
            pass
        return None
    final, like = Path(directory).resolve(), Path(engine.config.hf_checkpoint)
    unfinished = None
    try:
        unfinished = exports.begin(final, [file.name for file in side_files(like)])
        write_hf_checkpoint(unfinished, tensors, like=like, shard_bytes=SHARD_BYTES)
        return exports.finish(unfinished, final)
    except OSError as error:
        for _ in tensors:  # the collective continues for the other ranks
            pass
        if unfinished is not None:
            exports.discard(unfinished)
        raise CheckpointError(f"could not write {final}: {error}") from error
