"""Proofs for runs that train a LoRA adapter: --hf-checkpoint is the adapter's directory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_tis.analysis.diagnosis.checkpoint_proof import prove
from slime_tis.analysis.diagnosis.hypotheses.weights import for_weights, read_adapter
from tests.checkpoints import make_checkpoint
from tests.diagnosis.test_proof import dump
from tests.diagnosis.test_proof_checkpoints import Weights, engine, loaded, save_adapter

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "start", "llama")


@pytest.fixture(scope="module")
def adapters(start: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of attention and MLP: after some steps, and after more steps."""
    state = loaded(start).state_dict()
    generator = torch.Generator().manual_seed(0)
    tensors: Weights = {}
    for layer in range(2):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            place = f"model.layers.{layer}.{name}"
            rows, columns = state[f"{place}.weight"].shape
            prefix = f"base_model.model.{place}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, columns, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) / 50
    paths = []
    for _ in range(2):
        path = tmp_path_factory.mktemp("adapter")
        config = {**PLAIN, "base_model_name_or_path": str(start)}
        save_adapter(path, tensors, json.dumps(config))
        paths.append(path)
        for name in tensors:
            if ".lora_B." in name:
                noise = torch.randn(tensors[name].shape, generator=generator)
                tensors[name] = tensors[name] + noise / 50
    return paths


def with_adapter(start: Path, adapter: Path, scale: float = 1.0, part: str = "") -> Weights:
    """The weights that an engine has if it applies a part of an adapter with another scale."""
    own = loaded(start).state_dict()
    weights = {}
    for name, weight in read_adapter(str(adapter), own).items():
        if part in name:
            weights[name] = own[name] + scale * (weight - own[name])
    return weights


def trained(start: Path, adapter: Path) -> Any:
    """The model with an adapter."""
    model = loaded(start)
    model.load_state_dict(with_adapter(start, adapter), strict=False)
    return model


# scale of the newer adapter, the part that the engine has, and the fitted value
ADAPTER_FAULTS = {
    "absent": (0.0, "", "applies the adapter", -1.0),
    "half of alpha": (0.5, "", "applies the adapter", -0.5),
    "twice": (2.0, "", "applies the adapter", 1.0),
    "only the attention": (1.0, "attn", "applies the MLP of the adapter", -1.0),
}


@pytest.mark.parametrize(
    ("scale", "part", "claim", "value"), ADAPTER_FAULTS.values(), ids=ADAPTER_FAULTS
)
def test_a_fault_of_the_trained_adapter_is_named(
    scale: float, part: str, claim: str, value: float, start: Path, adapters: list[Path]
) -> None:
    _, newer = adapters
    training = trained(start, newer)
    rollout = engine(start, with_adapter(start, newer, scale, part))
    _, proof = prove(dump(training, rollout), str(newer))
    assert proof.is_proven and proof.engine == "rollout", proof.sentence
    assert claim in proof.sentence
    assert proof.explanations[0].value == pytest.approx(value, abs=0.02)


def test_ranges_of_layers_are_tried() -> None:
    own = {f"model.layers.{layer}.mlp.up_proj.weight": torch.zeros(1, 1) for layer in range(8)}
    adapted = {name: torch.ones(1, 1) for name in own}
    names = [name for name in for_weights("a", own, adapted, is_adapter=True) if "layer" in name]
    ranges = ["0 to 3", "4 to 7", "0 to 1", "2 to 3", "4 to 5", "6 to 7"]
    assert names == [f"layers {layers} of the adapter a" for layers in ranges]


def test_an_older_adapter_in_the_engine_is_named(start: Path, adapters: list[Path]) -> None:
    older, newer = adapters
    training = trained(start, newer)
    rollout = engine(start, with_adapter(start, older))
    _, proof = prove(dump(training, rollout), str(newer), [str(older)])
    assert proof.is_proven and proof.engine == "rollout", proof.sentence
    assert f"has the weights of {older}, 1 of the way" in proof.sentence


def test_an_adapter_of_a_missing_model_is_refused(start: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path, {"x": torch.zeros(1)}, json.dumps({"base_model_name_or_path": "a/b"}))
    with pytest.raises(ValueError, match="'a/b', which is no model directory on this machine"):
        prove(dump(loaded(start), engine(start, {})), str(tmp_path))


def test_an_adapter_with_scales_per_layer_is_refused(start: Path, tmp_path: Path) -> None:
    config = {**PLAIN, "alpha_pattern": {"q_proj": 4}}
    save_adapter(tmp_path, {"x": torch.zeros(1)}, json.dumps(config))
    with pytest.raises(ValueError, match=r"has alpha_pattern .* only plain LoRA"):
        read_adapter(str(tmp_path), {})
