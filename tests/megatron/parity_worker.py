"""Spawned by tests of parity: loads each checkpoint under a parallel layout and compares with transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_tis.hf_directory import load_config, moe_sizes
from slime_tis.trainer.megatron import hf_weights
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.megatron.hf_weights import GATHERED_BYTES
from slime_tis.trainer.megatron.packing import RowSplit, pack
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.options.megatron import MegatronConfig

LENGTHS = (7, 13, 20)


def compare(directory: Path, parallel: Parallel, layout: dict[str, Any]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    vocab = reference.config.vocab_size
    engine = TrainingEngine(_config(directory, layout), parallel, temperature=1.0, total_steps=1)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(vocab, (length,), generator=generator).tolist() for length in LENGTHS]
    batch = make_batch(tokens, [[1]] * len(tokens), [[0.0]] * len(tokens), [[0]] * len(tokens))

    split = RowSplit(tensor_size=parallel.tensor_size if engine.config.sequence_parallel else 1)
    packed = pack(batch, split, rotary=engine.model.rotary)
    with torch.no_grad():
        every_row = replace(packed.packed_seq_params, response_rows=None, gives_logits=True)
        shard = engine.model.module(packed.input_ids, packed.position_ids, None, packed_seq_params=every_row)[0]
        shards = [torch.empty_like(shard) for _ in range(parallel.tensor_size)]
        dist.all_gather(shards, shard.contiguous(), group=parallel.tensor_group)
        logits = torch.cat(shards, 1)[: sum(LENGTHS), :vocab]
        expected = torch.cat([reference(torch.tensor([ids])).logits[0] for ids in tokens])
    difference = (logits - expected).abs().max().item()
    bound = 2e-5 if "shared_expert_intermediate_size" in vars(reference.config) else 1e-5
    assert difference <= bound, f"{directory.name}: logits differ by {difference}"

    columns = engine.log_probs(batch, [[*range(len(LENGTHS))]], sums_squares=True)
    squares = expected[torch.tensor(LENGTHS).cumsum(0) - 2].softmax(1).square().sum(1)  # predict the last tokens
    torch.testing.assert_close(columns[:, 1], squares, rtol=1e-5, atol=1e-6)

    for at_once in (GATHERED_BYTES, 1):  # all experts of a layer, and one of each rank
        hf_weights.GATHERED_BYTES = at_once
        names = load_file(directory / "model.safetensors")
        for name, tensor in engine.named_hf_tensors():
            assert torch.equal(tensor, names.pop(name)), f"{directory.name}: {name} changed on its way"
        assert not names, f"{directory.name}: {sorted(names)} were not exported"


def _config(directory: Path, layout: dict[str, Any]) -> MegatronConfig:
    is_tensor_parallel = layout.get("tensor_model_parallel_size", 1) > 1
    return MegatronConfig(
        hf_checkpoint=str(directory),
        sequence_parallel=is_tensor_parallel and moe_sizes(load_config(directory)) is not None,  # megatron-core asks
        **layout,
    )


def compare_all(parallel: Parallel, directory: Path, layout: dict[str, Any]) -> None:
    """Compares every checkpoint under `directory`."""
    for checkpoint in sorted(path for path in directory.iterdir() if path.is_dir()):
        compare(checkpoint, parallel, layout)
        (checkpoint / f"parity_{parallel.rank}").touch()
