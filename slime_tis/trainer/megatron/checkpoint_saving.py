"""Writes training checkpoints, at once or in the background.

`sharded_checkpoint` has their content, and reads them. Work around megatron-core 0.16.1 uses
private names: check it after an upgrade.
"""

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from slime_tis.trainer.megatron.sharded_checkpoint import (
    CheckpointError,
    files_of_this_rank,
    reason,
    remove_older,
    sharded_state,
)
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.rank_collectives import on_every_rank
from slime_tis.trainer.storage import checkpoint_files as files


def save(
    directory: str | Path,
    step: int,
    engine: TrainingEngine,
    trainer_state: dict[str, Any],
    *,
    retain: int,
    write_extra: Callable[[Path], object] = lambda directory: None,
    before_it_counts: Callable[[], object] = lambda: None,
) -> None:
    """Writes the checkpoint `directory/iter_STEP`, then removes older checkpoints of the run.

    Args:
        directory: The directory of the run's checkpoints.
        step: Number of optimizer steps made.
        engine: The engine that is saved.
        trainer_state: Content of the trainer's file.
        retain: Number of the run's newest checkpoints to keep.
        write_extra: Writes further files to the given directory, on the main process.
        before_it_counts: Called when all files are written, before the checkpoint gets the name
            under which a run resumes it.

    Raises:
        CheckpointError: The checkpoint could not be written.
    """
    final = files.checkpoint_path(directory, step)
    saving = Saving(final=final, engine=engine, run=trainer_state["run"], retain=retain)
    saving.start(trainer_state, write_extra, in_background=False)
    saving.complete(before_it_counts)


@dataclass(kw_only=True)
class Saving:
    """A checkpoint that is being written: started, then completed or abandoned.

    In the background, a thread of each rank writes copies of the tensors and computes checksums.
    Collectives run only in `start`, `is_written` and `complete`, so that they never meet those of
    training. Until the end of `complete`, the directory has the name of an unfinished checkpoint.
    """

    final: Path
    """The checkpoint's path."""
    engine: TrainingEngine
    run: str
    """Identity of the run."""
    retain: int
    """Number of the run's newest checkpoints to keep."""
    _thread: threading.Thread | None = field(default=None, init=False)
    _finalize: Sequence[Callable[[], None]] = field(default=(), init=False)
    """Megatron-core's collectives after all tensors are written."""
    _sums: dict[str, str] = field(default_factory=dict, init=False)
    """Checksums that the thread has computed, by name."""
    _error: Exception | None = field(default=None, init=False)
    """Error of the thread."""

    def start(
        self,
        trainer_state: dict[str, Any],
        write_extra: Callable[[Path], object],
        *,
        in_background: bool,
    ) -> None:
        """Writes the small files, and the tensors now or in the background; a collective.

        Arguments as in `save`.

        Raises:
            CheckpointError: A file could not be written, or memory for the copies is missing.
        """

        def write_state() -> None:
            write_extra(self._path)
            text = json.dumps(trainer_state, indent=2) + "\n"
            (self._path / files.TRAINER_STATE).write_text(text, encoding="utf-8")

        with self._discarding_after_an_error(), self.engine.timer("save"), self._naming():
            self._on_main(lambda: files.begin(self.final))
            request = _plan_sharded(sharded_state(self.engine, is_loading=False), self._path)
            self._finalize = request.finalize_fns
            self._on_main(write_state)
            if in_background:
                copied: list[Any] = []
                # a rank without memory for copies must not leave the others alone
                on_every_rank(lambda: copied.append(_with_copies(request)))
                # a daemon: a run that ends with an error does not wait for the disk
                self._thread = threading.Thread(
                    target=self._write_in_background, args=(copied[0],), name="save", daemon=True
                )
                self._thread.start()
            else:
                _write(request)

    def is_written(self) -> bool:
        """Returns whether all ranks have written their files; a collective."""
        is_writing = self._thread is not None and self._thread.is_alive()
        return not self.engine.parallel.largest(int(is_writing))

    def complete(self, before_it_counts: Callable[[], object] = lambda: None) -> None:
        """Waits for the tensors, and gives the checkpoint its name; a collective.

        Then removes older checkpoints of the run.

        Raises:
            CheckpointError: A file could not be written.
        """
        path = self._path
        with self._discarding_after_an_error():
            with self.engine.timer("save"), self._naming():
                self._wait()
                # no rank may be in a collective that another one does not reach
                on_every_rank(self._raise_error)
                for finalize in self._finalize:
                    finalize()
                sums = self._checksums()
                self._on_main(lambda: files.write_manifest(path, sums))
            before_it_counts()
            with self._naming():
                self._on_main(lambda: files.finish(path, self.final, self.run))
        if self.engine.parallel.is_main:
            remove_older(self.final, self.run, self.retain)

    def abandon(self) -> None:
        """Removes the unfinished checkpoint after an error of the run."""
        self._wait()
        if self.engine.parallel.is_main:
            files.discard(self._path)

    @property
    def _path(self) -> Path:
        return files.unfinished_path(self.final)

    def _on_main(self, action: Callable[[], object]) -> None:
        """Runs an action on the main process; its error is raised on all ranks."""
        on_every_rank(action if self.engine.parallel.is_main else lambda: None)

    def _write_in_background(self, request: Any) -> None:
        """Writes the tensors of this rank, and computes the checksums of their files."""
        try:
            _write(request)
            _, buckets, _ = request.async_fn_args or (0, (), None)
            names = [name for _, name, _ in buckets]
            # a file that could not be written is an error that megatron-core reports
            written = [name for name in names if (self._path / name).is_file()]
            self._sums = files.checksums(self._path, written)
        except Exception as error:
            self._error = error

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _checksums(self) -> dict[str, str]:
        """Returns the checksums of all files; the ranks share those that no thread computed."""
        names = files.files_of(self._path)
        for name in names:  # files with other names would never be removed
            assert files.OWN_FILE.fullmatch(name), name
        sums: dict[str, str] = {}
        for computed in on_every_rank(lambda: self._sums):
            sums |= computed
        remaining = [name for name in names if name not in sums]
        mine = files_of_this_rank(remaining)
        for computed in on_every_rank(lambda: files.checksums(self._path, mine)):
            sums |= computed
        return sums

    @contextmanager
    def _discarding_after_an_error(self) -> Iterator[None]:
        """Removes the unfinished checkpoint if the block fails."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Raises CheckpointError, with the checkpoint's path, after any error."""
        try:
            yield
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"could not write checkpoint {self.final}: {reason(error)}; earlier checkpoints"
                " are intact, free space (or fix the path) and resume with --load"
            ) from error


def _plan_sharded(state: dict[str, Any], directory: Path) -> Any:
    """Returns megatron-core's request to save a state, which this process writes; a collective.

    `dist_checkpointing.save` would write in a child process, and wait forever if it is killed.
    """
    # Without this queue, megatron-core starts a manager process, which imports the program's main
    # module again.
    filesystem_async._results_queue = queue.Queue()
    request = dist_checkpointing.save(state, str(directory), async_sharded_save=True)
    assert request is not None
    if request.async_fn is not None:  # this rank has something to write
        transforms, _ = request.async_fn.args
        request = request._replace(async_fn=partial(_write_buckets, transforms))
    return request


def _with_copies(request: Any) -> Any:
    """Returns the request with copies of this rank's tensors in main memory."""
    if request.async_fn is None:
        return request
    _, buckets, _ = request.async_fn_args
    copied = []
    for path, name, (texts, tensors) in buckets:
        copies = [(item, tensor.to("cpu", copy=True)) for item, tensor in tensors]
        copied.append((path, name, (texts, copies)))
    # megatron-core keeps this list until the end, and may have cloned tensors for it
    buckets[:] = copied
    return request._replace(preload_fn=None)


def _write(request: Any) -> None:
    """Writes the tensors of this rank, as the request's `execute_sync` does without finalizing."""
    if request.async_fn is None:
        return
    rank, buckets, results = request.async_fn_args
    if request.preload_fn is not None:
        buckets = request.preload_fn()
    request.async_fn(rank, buckets, results)


def _write_buckets(
    transforms: list[Any], rank: int, buckets: list[Any], results: "queue.Queue[Any]"
) -> None:
    """Replaces megatron-core's function that writes each bucket in a child process."""
    outcomes: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        written: queue.Queue[tuple[int, Any]] = queue.Queue()
        started: queue.Queue[int] = queue.Queue()
        started.put(number)  # megatron-core takes the number when it has written the bucket
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, written, started, use_fsync=True
        )
        _, outcomes[number] = written.get()
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            results.put(_os_error(outcome))
            return
    results.put(outcomes)


def _os_error(error: Exception) -> BaseException:
    """Returns the OSError that caused an error; the error if there is none.

    For a full disk, torch's message only says that file positions differ.
    """
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return link or error
