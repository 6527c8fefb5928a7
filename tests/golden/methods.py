"""Cases of methods_2026.json: inputs and outputs of peers' code."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

FILE = json.loads((Path(__file__).parent / "methods_2026.json").read_text())
BATCHES = {batch["name"]: batch for batch in FILE["batches"]}


@dataclass(frozen=True)
class Case:
    """One call of a peer's function: [B, T] float32 inputs, its parameters and its outputs."""

    params: dict[str, Any]
    outputs: dict[str, Any]
    batch: str

    def input(self, name):
        return torch.tensor(BATCHES[self.batch][name], dtype=torch.float32)

    def output(self, name):
        """float32; the strings "nan" and "inf" of the file become numbers."""
        return torch.tensor(_numbers(self.outputs[name]), dtype=torch.float32)

    def inexact(self, name):
        """bool, where the peer's float32 decision is not the exact one."""
        mask = torch.zeros_like(self.output(name)).bool()
        for position in self.outputs.get("differs_from_float64", {}).get(name, ()):
            mask[tuple(position) if isinstance(position, list) else position] = True
        return mask


def cases(method, *, without="", **params):
    """Parameters of a test: a method's cases with these parameters, without one name."""
    (entry,) = [entry for entry in FILE["methods"] if entry["name"] == method]
    chosen = [
        Case(params=case["params"], outputs=case, batch=case["batch"])
        for case in entry["cases"]
        if params.items() <= case["params"].items() and without not in case["params"]
    ]
    assert chosen, f"{method} has no case with {params}"
    ids = [f"{method}-{case.batch}-{number}" for number, case in enumerate(chosen)]
    return [pytest.param(case, id=name) for case, name in zip(chosen, ids, strict=True)]


def _numbers(value):
    return [_numbers(each) for each in value] if isinstance(value, list) else float(value)
