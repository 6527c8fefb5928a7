"""The policy as a Hugging Face directory, for everybody else."""

from pathlib import Path

from slime_tis.trainer.megatron.checkpoint import CheckpointError
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.storage import exports
from slime_tis.trainer.storage.hf_checkpoint import SHARD_BYTES, side_files, write_hf_checkpoint


def save_hf(directory: str | Path, engine: TrainingEngine) -> Path | None:
    """Writes the policy as a Hugging Face directory, under another name until it is whole; a collective.

    Returns:
        Where it is, on the main process: `directory`, or one beside it with a number where somebody else's files have
        come to `directory` meanwhile. None on the others.

    Raises:
        CheckpointError: it could not be written; what was at `directory` is as it was.
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
        for _ in tensors:  # other ranks take part in it
            pass
        if unfinished is not None:
            exports.discard(unfinished)
        raise CheckpointError(f"could not write {final}: {error}") from error
