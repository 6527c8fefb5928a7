"""The command `slime-tis diagnose --demo`: plants a fault in a tiny model's rollout engine, and finds it."""

import os
import shlex
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from slime_tis.analysis.diagnosis.rescore import load_model
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.analysis.report.command import diagnosis, report
from slime_tis.errors import quoted_path
from slime_tis.trainer.sort_digits import EOS, Example, make_rows, prepare

EXAMPLE = Example(
    digits=8, train_prompts=512, eval_prompts=64, hidden_size=64, layers=2, accuracy=(0.1, 1.0), sampled_accuracy=0.05
)
PENALTY = 1.1


def demo(out: str) -> str:
    """Samples with a repetition penalty into a new directory, and returns the diagnosis.

    Raises:
        ValueError: The directory exists.
    """
    directory = Path(out)
    if os.path.lexists(directory):
        raise ValueError(
            f"error: {quoted_path(out)} exists already; remove it, or give another directory after --demo."
        )
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more gain little at this size
    prepare(directory, example=EXAMPLE)
    checkpoint, dump = directory / "checkpoint", directory / "dump.parquet"
    write(dump, _samples(str(checkpoint)))
    page = report([str(dump)], out=str(directory / "report.html"))
    text = diagnosis(str(dump), hf_checkpoint=str(checkpoint))
    torch.set_num_threads(threads)
    planted = f"Planted: a repetition penalty of {PENALTY} in the rollout engine, which training does not know."
    again = "Again: " + shlex.join(["slime-tis", "diagnose", str(dump), "--hf-checkpoint", str(checkpoint)])
    return "\n\n".join((planted, text, page, again))


@torch.no_grad()
def _samples(checkpoint: str) -> TokenTable:
    """Samples of transformers' `generate` with the penalty, with the log-probs of both engines."""
    model, tokenizer = load_model(checkpoint), AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    prompts = tokenizer([row["prompt"] for row in make_rows(EXAMPLE, 0)[1]], return_tensors="pt")["input_ids"]
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": EXAMPLE.digits + 1, "repetition_penalty": PENALTY}
    made = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    tokens = made.sequences[:, prompts.shape[1] :, None]
    train = model(made.sequences).logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1).gather(2, tokens)
    rollout = torch.stack(made.scores, 1).log_softmax(-1).gather(2, tokens)
    parts = []
    for i, prompt in enumerate(prompts):
        end = [*tokens[i, :, 0].tolist(), EOS].index(EOS) + 1
        columns = {"train_log_prob": train, "rollout_log_prob": rollout, "token": tokens}
        parts.append(SampleParts(prompt=prompt.numpy(), **{k: v[i, :end, 0].numpy() for k, v in columns.items()}))
    return TokenTable.from_parts(parts, {"tokenizer": checkpoint})
