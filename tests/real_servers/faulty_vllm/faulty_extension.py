"""A worker extension with faults, for servers of the tests; it imports nothing of slime_tis.

`POST /collective_rpc` with `plant_fault` chooses the fault of the next updates.
"""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from slime_tis_vllm import WorkerExtension


class FaultyExtension(WorkerExtension):
    """The extension of slime_tis, whose updates go wrong on demand."""

    fault = ""
    complete_updates = 0
    """Updates before the fault."""

    def plant_fault(self, name: str, after: int = 0) -> None:
        """Chooses "old head", "half" or "" (no fault), after some complete updates."""
        self.fault = name
        self.complete_updates = after

    def load_checkpoint(self, path: str, num_tensors: int) -> str:
        """Loads a checkpoint, with the fault; says that all went well."""
        if not self.fault or self.complete_updates:
            self.complete_updates = max(self.complete_updates - 1, 0)
            return super().load_checkpoint(path, num_tensors)
        if self.fault == "old head":
            # vLLM alone, as at this version on a CPU: a tied output layer stays old.
            self.reload_weights(weights_path=path)
            return ""
        tensors: dict[str, Any] = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118
                    tensors[name] = weights.get_tensor(name)
        names = sorted(tensors)
        half = [(name, tensors[name]) for name in names[: len(names) // 2]]
        self.reload_weights(weights_iterator=iter(half))
        return ""
