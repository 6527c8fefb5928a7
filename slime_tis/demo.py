"""The commands `slime-tis demo` and `slime-tis diagnose --demo`: a tiny model with a mismatch, and what explains it."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from slime_tis.analysis.diagnosis.rescore import load_model
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.analysis.report.report_commands import diagnosis, report
from slime_tis.errors import quoted_path
from slime_tis.trainer.sort_digits import EOS, Example, make_rows, prepare

FLAGS = (
    *(
        "--input-key",
        "prompt",
        "--label-key",
        "label",
        "--rm-type",
        "exact_match",
        "--rollout-shuffle",
    ),
    *("--num-rollout", "100", "--rollout-batch-size", "16", "--n-samples-per-prompt", "8"),
    *("--rollout-max-response-len", "12", "--lr", "1.5e-4", "--weight-decay", "0"),
    *(
        "--rollout-precision",
        "fp8",
        "--update-weights-interval",
        "3",
        "--use-tis",
        "--num-threads",
        "1",
    ),
)
"""Training on samples of an fp8 engine whose weights are up to two steps old, with truncated
importance weights."""
NEXT_STEPS = """
Next steps
  open {report}
  slime-tis report --help           reports on other runs, and on dumps of slime, verl, NeMo-RL and prime-rl
  slime-tis train --help            trains your model on your prompts
  slime-tis port run.sh             rewrites a launch script of slime"""
EXAMPLE = Example(
    digits=8,
    train_prompts=512,
    eval_prompts=64,
    hidden_size=64,
    layers=2,
    accuracy=(0.1, 1.0),
    sampled_accuracy=0.05,
)
PENALTY = 1.1


def demo(out: str) -> int:
    """Trains the tiny model in a new directory, writes the report and prints the diagnosis; returns the exit status."""
    from slime_tis.trainer.cli.train_arguments import (
        parse_args,
    )  # Megatron-core, which `diagnose --demo` does not need
    from slime_tis.trainer.train import main as train
    from slime_tis.trainer.train import prepare_terminal

    directory = _new_directory(out, "--out DIR")
    data, run = directory / "data", directory / "run"
    prepare_terminal()
    with _one_thread():
        made = prepare(data)
    print(
        f"{data}: {made['parameters']:,} parameters, greedy accuracy {made['accuracy']:.2f}",
        flush=True,
    )
    paths = {
        "--hf-checkpoint": data / "checkpoint",
        "--prompt-data": data / "train.jsonl",
        "--eval-prompt-data": data / "eval.jsonl",
        "--dump-details": run / "dump",
        "--output-dir": run,
    }
    flags = [str(word) for flag in paths.items() for word in flag]
    status = train(parse_args([*flags, *FLAGS], prog="slime-tis demo"))
    if status == 0:
        print(report([str(run)]), diagnosis(str(run)), sep="\n\n")
        print(NEXT_STEPS.format(report=run / "report.html"))
    return status


def diagnosis_demo(out: str) -> str:
    """Samples with a repetition penalty into a new directory, and returns the diagnosis.

    Raises:
        ValueError: The directory exists.
    """
    directory = _new_directory(out, "directory after --demo")
    logging.disable_progress_bar()
    checkpoint, dump = directory / "checkpoint", directory / "dump.parquet"
    with _one_thread():
        prepare(directory, example=EXAMPLE)
        write(dump, _samples(str(checkpoint)))
        page = report([str(dump)], out=str(directory / "report.html"))
        text = diagnosis(str(dump), hf_checkpoint=str(checkpoint))
    planted = (
        f"Planted: a repetition penalty of {PENALTY} in the rollout engine, which training does not"
        " know."
    )
    again = "Again: " + shlex.join(
        ["slime-tis", "diagnose", str(dump), "--hf-checkpoint", str(checkpoint)]
    )
    return "\n\n".join((planted, text, page, again))


def _new_directory(out: str, option: str) -> Path:
    """Returns a path at which a directory can be made; raises ValueError before any work is done for it."""
    if os.path.lexists(out):
        raise ValueError(
            f"error: {quoted_path(out)} exists already; remove it, or give another {option}."
        )
    directory = Path(out)
    try:
        # permissions alone do not tell: root may write to /proc, where nothing can be made
        directory.mkdir(parents=True)
        directory.rmdir()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"error: {quoted_path(out)} cannot be made ({reason}); give another {option}."
        ) from None
    return directory


@contextmanager
def _one_thread() -> Iterator[None]:
    """Computes with one thread; more gain little at this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.no_grad()
def _samples(checkpoint: str) -> TokenTable:
    """Samples of transformers' `generate` with the penalty, with the log-probs of both engines."""
    model, tokenizer = (
        load_model(checkpoint),
        AutoTokenizer.from_pretrained(checkpoint, local_files_only=True),
    )
    prompts = tokenizer([row["prompt"] for row in make_rows(EXAMPLE, 0)[1]], return_tensors="pt")[
        "input_ids"
    ]
    torch.manual_seed(0)
    options = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": EXAMPLE.digits + 1,
        "repetition_penalty": PENALTY,
    }
    made = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    tokens = made.sequences[:, prompts.shape[1] :, None]
    train = (
        model(made.sequences).logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1).gather(2, tokens)
    )
    rollout = torch.stack(made.scores, 1).log_softmax(-1).gather(2, tokens)
    parts = []
    for i, prompt in enumerate(prompts):
        end = [*tokens[i, :, 0].tolist(), EOS].index(EOS) + 1
        columns = {"train_log_prob": train, "rollout_log_prob": rollout, "token": tokens}
        parts.append(
            SampleParts(
                prompt=prompt.numpy(), **{k: v[i, :end, 0].numpy() for k, v in columns.items()}
            )
        )
    return TokenTable.from_parts(parts, {"tokenizer": checkpoint})
