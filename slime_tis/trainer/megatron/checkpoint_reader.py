"""Reads megatron-core's distributed checkpoints without running code from their files.

A pickle may call any function. torch's `FileSystemReader` loads `.metadata` with an unrestricted
unpickler, and torch's planner loads objects in `.distcp` files with one. Here, classes in
`.metadata` become records of plain data. Torch's classes are made from their checked fields.
Objects are loaded with `weights_only=True`. `dist_checkpointing.load` gets the two strategies.
Imported names that begin with `_` are private in torch 2.13 and megatron-core 0.16.1: check them
after an upgrade.
"""

import io
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from slime_tis.errors import first_line
from slime_tis.torch_files import NOT_TENSORS, UnsafeFile, load_tensors
from slime_tis.trainer.storage.checkpoint_files import COMMON, METADATA, SHARD_FILE

RECORDS = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.serialization", "_get_layout"),
}
"""Classes and functions in `.metadata` that become records and are never imported or called."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""Data types of tensors in `.metadata`, by their name in the module torch."""

EXTRA_STATE = re.compile(r"(.*\.)?_extra_state[0-9]*")
"""Names of transformer-engine's FP8 state, a pickle, in the state of a model."""


class SafeShardedStrategy(torch_strategy.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """megatron-core's strategy for tensors and objects of all ranks, with `CheckpointReader`."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """Loads the ranks' part of a checkpoint."""
        reader = CheckpointReader(checkpoint_dir)
        reader.read_metadata()  # raises UnsafeFile, which torch would wrap in another error
        original = torch_strategy._get_filesystem_reader
        # megatron-core has no parameter for the reader: its strategy calls this function.
        torch_strategy._get_filesystem_reader = lambda directory, cache_metadata=False: reader
        try:
            return super().load(sharded_state_dict, checkpoint_dir)
        finally:
            torch_strategy._get_filesystem_reader = original


class SafeCommonStrategy(TorchCommonLoadStrategy):  # type: ignore[misc]
    """megatron-core's strategy for `common.pt`, the state that all ranks share."""

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """Loads `common.pt`.

        Raises:
            UnsafeFile: It contains objects other than tensors and plain data.
        """
        return load_tensors(Path(checkpoint_dir) / COMMON)


class CheckpointReader(FileSystemReader):
    """torch's reader of a checkpoint directory, which runs no code of the files."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    # Without torch's parameter for the metadata of one rank, which may fall back to other files.
    def read_metadata(self) -> Metadata:
        """Returns the content of `.metadata`.

        Raises:
            UnsafeFile: The content is not torch's metadata of a checkpoint.
        """
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path) / METADATA)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Reads tensors and objects into the planner's state, file by file."""
        safe_planner: Any = _SafePlanner(planner, self)
        items_by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items_by_file.setdefault(self.file_of(item), []).append(item)
        for file, items in items_by_file.items():
            try:
                super().read_data(replace(plan, items=items), safe_planner)
            except pickle.UnpicklingError:
                # without torch's message, which recommends weights_only=False
                path = Path(self.path) / file
                raise UnsafeFile(f"{path} was not loaded: {NOT_TENSORS}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def file_of(self, item: ReadItem) -> str:
        """Returns the name of the file that has a tensor or an object."""
        name: str = self.storage_data[item.storage_index].relative_path
        return name


class _SafePlanner:
    """A planner that gets objects only after `weights_only=True` has loaded them."""

    def __init__(self, planner: LoadPlanner, reader: CheckpointReader) -> None:
        self._planner = planner
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads an object without running code, and saves it again for the planner.

        The planner loads files with `weights_only=False`.
        """
        path = Path(self._reader.path) / self._reader.file_of(read_item)
        content = load_tensors(value, where=path)
        checked = io.BytesIO()
        torch.save(content, checked)
        checked.seek(0)
        self._planner.load_bytes(read_item, checked)


def check_extra_state(state: dict[str, Any], checkpoint: Path) -> None:
    """Refuses pickled state of layers.

    transformer-engine unpickles `_extra_state` without restriction. It is empty unless a model
    trains in FP8, which this program does not support.

    Raises:
        UnsafeFile: The state of the model has such a pickle.
    """
    for name, value in state.items():
        if not EXTRA_STATE.fullmatch(name) or value is None:
            continue
        size = 1
        if isinstance(value, Tensor):
            size = value.numel()
        elif isinstance(value, io.BytesIO):
            size = len(value.getbuffer())
        if size:
            raise UnsafeFile(
                f"{checkpoint} has a state of FP8 training in {name}, which is a pickle and could"
                " run code"
            )


class _Record:
    """An object in `.metadata`: constructor arguments and state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles plain data, `torch.Size`, data types and records."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type] = {}
        """New classes for each file, because a pickle may change the attributes of a class."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the class, function or data type for a name in the pickle."""
        if (module, name) in RECORDS:
            return self._classes.setdefault((module, name), type(name, (_Record,), {}))
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise UnsafeFile(f"refers to {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Refuses references to objects outside of the file."""
        raise UnsafeFile("refers to an object outside of the file")


def read_metadata(path: Path) -> Metadata:
    """Returns the metadata of a checkpoint, built from checked plain data.

    Raises:
        UnsafeFile: The file names a class or function that torch's metadata does not contain, or
            its content has another form.
        OSError: The file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            record = _MetadataUnpickler(file).load()
        return _metadata(record)
    except OSError:
        raise
    except UnsafeFile as error:
        problem = f"it {error}, which is not part of torch's metadata of a checkpoint"
        raise UnsafeFile(f"{path} was not loaded: {problem}") from None
    except Exception as error:  # unpickling damaged bytes may raise anything
        problem = (
            f"it is not torch's metadata of a checkpoint ({type(error).__name__}:"
            f" {first_line(error)})"
        )
        raise UnsafeFile(f"{path} was not loaded: {problem}") from None


def _metadata(record: Any) -> Metadata:
    """Returns torch's metadata, without the saved plans, which loading does not need."""
    fields = _fields(record, "Metadata")
    tensors = {}
    for name, entry in _checked(fields["state_dict_metadata"], dict).items():
        tensors[_checked(name, str)] = _storage_metadata(entry)
    storage = {}
    for index, entry in _checked(fields["storage_data"], dict).items():
        storage[_index(index)] = _storage_info(entry)
    return Metadata(state_dict_metadata=tensors, storage_data=storage, storage_meta=StorageMeta())


def _storage_metadata(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    dtype, *_ = _checked(_state(fields["properties"], "TensorProperties"), tuple)
    chunks = []
    for chunk in _checked(fields["chunks"], list):
        sizes = _fields(chunk, "ChunkStorageMetadata")
        chunks.append(
            ChunkStorageMetadata(offsets=_size(sizes["offsets"]), sizes=_size(sizes["sizes"]))
        )
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_checked(dtype, torch.dtype)),
        size=_size(fields["size"]),
        chunks=chunks,
    )


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset = fields.get("offset")
    index = fields.get("index")
    return MetadataIndex(
        fqn=_checked(fields["fqn"], str),
        offset=None if offset is None else _size(offset),
        index=None if index is None else _checked(index, int),
    )


def _storage_info(record: Any) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    path = _checked(fields["relative_path"], str)
    if not re.fullmatch(SHARD_FILE, path):  # otherwise it could be any file of this machine
        raise UnsafeFile(f"refers to the file {path!r}")
    if fields.get("transform_descriptors"):
        raise UnsafeFile("refers to a transformation of its files")
    return _StorageInfo(
        relative_path=path,
        offset=_checked(fields["offset"], int),
        length=_checked(fields["length"], int),
    )


def _size(value: Any) -> torch.Size:
    return torch.Size(_checked(value, torch.Size))


def _fields(record: Any, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = _checked(_state(record, name), dict)
    return fields


def _state(record: Any, name: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise TypeError(f"{type(record).__name__} in the place of {name}")
    return record.state


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} in the place of {kind.__name__}")
    return value
