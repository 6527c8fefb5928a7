"""Plants every fault of the hypotheses in samples of sort digits, and prints the proofs' answers.

    python -m studies.diagnosis.proofs [FAULT ...]    # after `make data`; ten minutes on one core

The engine samples token by token with the fault, and training scores the samples without it. Faults
and hypotheses share their code, so this shows that hypotheses are told from each other, not that
they model an engine. `tests/diagnosis/test_proof.py` plants faults with transformers' own tools.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_tis.analysis.diagnosis.checkpoint_proof import prove
from slime_tis.analysis.diagnosis.hypotheses import Hypothesis, Input, hypotheses, with_prompt
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.progress import print_line, tracked

DATA = Path("data/sort_digits")
SAMPLES, RESPONSE = 48, 11
PLANTED = {
    **{
        "repetition penalty": 1.07,
        "presence penalty": 0.4,
        "frequency penalty": 0.3,
        "temperature": 0.85,
        "soft cap": 10.0,
        "minimum length": 11.0,
    },
    **{
        "top-p": 0.9,
        "top-k": 5.0,
        "min-p": 0.07,
        "rope_theta": 1.5,
        "linear rope scaling": 2.0,
        "norm epsilon": 1e-3,
    },
    **dict.fromkeys(
        (
            "bf16",
            "fp16",
            "bf16 weights",
            "fp8 weights",
            "fp8 weights and activations",
            "int8 weights",
            "int4 weights",
            "fp8 KV cache",
        ),
        0.0,
    ),
    **{
        "first prompt tokens missing": 1.0,
        "last prompt tokens missing": 1.0,
        "pads attended": 3.0,
        "pads after the prompt": 2.0,
        "prompt cut": 8.0,
        "YaRN rope scaling": 4.0,
        "dynamic rope scaling": 2.0,
        "position gap": 1.0,
    },
    **{
        "attention window": 8.0,
        "packed neighbor": 0.0,
        "shift": 1.0,
        "log base": 2.0,
        "clamped": -1.5,
    },
    **{"reported in bf16": 0.0, "exchanged": 1.0},
}


def read(tokens: list[int], response: int) -> Input:
    return Input(
        tokens=torch.tensor(tokens), response=response, positions=torch.arange(len(tokens))
    )


def next_logits(
    model: Any, fault: Hypothesis, value: float, sample: Input, before: Sequence[Input]
) -> torch.Tensor:
    """Logits [1, V] of the last token of the sample, which the engine has not read."""
    seen = sample if fault.inputs is None else fault.inputs(sample, value, before)
    if fault.prompt is not None:
        seen = with_prompt(
            seen, fault.prompt(seen.tokens[: len(seen.tokens) - seen.response], round(value))
        )
    mask = (
        None
        if seen.mask is None
        else torch.where(seen.mask, 0.0, torch.finfo(model.dtype).min)[None, None]
    )
    cache = {} if seen.cache is None else {"past_key_values": seen.cache(), "use_cache": True}
    output = model(
        seen.tokens[None], position_ids=seen.positions[None], attention_mask=mask, **cache
    )
    logits = output.logits[0, -2:-1].float()
    if fault.logits is None:
        return logits
    history = torch.zeros(sample.response - 1, logits.shape[1])
    return fault.logits(torch.cat([history, logits]), sample, value)[-1:]


@torch.no_grad()
def dump(model: Any, prompts: list[list[int]], fault: Hypothesis, value: float) -> TokenTable:
    """Samples of the faulty engine, with the log-probs of both engines."""
    generator = torch.Generator().manual_seed(1)
    samples: list[list[int]] = []
    rollout: list[torch.Tensor] = []
    with nullcontext() if fault.network is None else fault.network(model, value):
        for prompt in prompts:
            tokens, log_probs = list(prompt), []
            before = read(samples[-1], RESPONSE) if samples else read([*prompt, 0], 1)
            for t in range(RESPONSE):
                scores = next_logits(
                    model, fault, value, read([*tokens, 0], t + 1), [before]
                ).log_softmax(-1)[0]
                tokens.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
                log_probs.append(scores[tokens[-1]])
            samples.append(tokens)
            rollout.append(torch.stack(log_probs))
    parts = []
    for tokens, reported in zip(
        samples, rollout if fault.outputs is None else fault.outputs(rollout, value), strict=True
    ):
        response = torch.tensor(tokens[-RESPONSE:])
        logits = model(torch.tensor([tokens])).logits[0, -RESPONSE - 1 : -1]
        train = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        columns: dict[str, Any] = {"token": response.numpy(), "prompt": tokens[:-RESPONSE]}
        parts.append(
            SampleParts(train_log_prob=train.numpy(), rollout_log_prob=reported.numpy(), **columns)
        )
    return TokenTable.from_parts(parts)


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    checkpoint = DATA / "checkpoint"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rows = (DATA / "eval.jsonl").read_text().splitlines()[:SAMPLES]
    prompts = [tokenizer(json.loads(row)["prompt"])["input_ids"] for row in rows]
    table = hypotheses(model, prompt=max(map(len, prompts)))
    print("| planted | named | share that disappears | proven | runner-up |\n|---|---|---|---|---|")
    planted = PLANTED
    if chosen:
        planted = {name: value for name, value in PLANTED.items() if name in chosen}
    for name, value in tracked(planted.items(), "proofs", len(planted)):
        _, proof = prove(dump(model, prompts, table[name], value), str(checkpoint))
        best = proof.explanations[0]
        others = [each for each in proof.explanations[1:] if each.name not in proof.rivals]
        row = (
            f"{name} {value:g}",
            " or ".join((f"{best.name} {best.value:.4g}", *proof.rivals)),
            f"{best.share:.1%}",
            "yes" if proof.is_proven else "by its noise" if proof.is_noise else "no",
            f"{others[0].name}, {others[0].share:.0%}" if others else "",
        )
        print_line(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
