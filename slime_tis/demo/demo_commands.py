"""The commands `slime-tis demo` and `slime-tis diagnose --demo`.

Both create a mismatch with a tiny model, and explain it.
"""

import gc
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
from slime_tis.demo.sort_digits import EOS, Example, make_rows, prepare
from slime_tis.errors import quoted_path

OPTIONS = {
    "--input-key": "prompt",
    "--label-key": "label",
    "--rm-type": "exact_match",
    "--num-rollout": "60",
    "--rollout-batch-size": "16",
    "--n-samples-per-prompt": "8",
    "--rollout-max-response-len": "12",
    "--lr": "1.5e-4",
    "--weight-decay": "0",
    "--rollout-precision": "fp8",
    "--update-weights-interval": "3",
    "--num-threads": "1",
}
"""Training on samples of an fp8 engine whose weights are up to two steps old."""
SWITCHES = ["--rollout-shuffle", "--use-tis"]
"""Truncated importance weights correct the mismatch."""
NEXT_STEPS = """
Next steps
  open {report}
  slime-tis report --help           reports on other runs, and on dumps of other trainers
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
"""A smaller model than that of `demo`, since sampling and rescoring are enough."""
PENALTY = 1.1
"""Repetition penalty of the rollout engine, which divides the logits of repeated tokens."""


def demo(out: str, *, owns_process: bool = False) -> int:
    """Trains the tiny model in a new directory, writes the report and prints the diagnosis.

    Args:
        out: The directory.
        owns_process: Whether the process ends with the demo.

    Returns:
        The exit status of the training.

    Raises:
        ValueError: The directory exists or cannot be made.
    """
    # imported here, because `diagnose --demo` runs without Megatron-core
    from slime_tis.trainer.cli.train_arguments import parse_args
    from slime_tis.trainer.training_command import main as train
    from slime_tis.trainer.training_command import prepare_terminal

    if owns_process:
        # As in `slime_tis.main.train`: no collection visits the objects of imported modules.
        gc.freeze()
    directory = _new_directory(out, "--out DIR")
    data = directory / "data"
    run = directory / "run"
    prepare_terminal()
    with _one_thread():
        model = prepare(data, with_progress=True)
    parameters = model["parameters"]
    accuracy = model["accuracy"]
    print(f"{data}: {parameters:,} parameters, greedy accuracy {accuracy:.2f}", flush=True)
    options = {
        "--hf-checkpoint": str(data / "checkpoint"),
        "--prompt-data": str(data / "train.jsonl"),
        "--eval-prompt-data": str(data / "eval.jsonl"),
        "--dump-details": str(run / "dump"),
        "--output-dir": str(run),
        **OPTIONS,
    }
    flags = list(SWITCHES)
    for flag, value in options.items():
        flags += [flag, value]
    status = train(parse_args(flags, prog="slime-tis demo"))
    if status == 0:
        print(report([str(run)]), diagnosis(str(run)), sep="\n\n")
        print(NEXT_STEPS.format(report=run / "report.html"))
    return status


def diagnosis_demo(out: str) -> str:
    """Samples with a repetition penalty into a new directory, and returns the diagnosis.

    Raises:
        ValueError: The directory exists or cannot be made.
    """
    directory = _new_directory(out, "directory after --demo")
    logging.disable_progress_bar()
    checkpoint = str(directory / "checkpoint")
    dump = str(directory / "dump.parquet")
    with _one_thread():
        prepare(directory, example=EXAMPLE, with_progress=True)
        write(Path(dump), _sample_with_penalty(checkpoint))
        page = report([dump], out=str(directory / "report.html"))
        text = diagnosis(dump, hf_checkpoint=checkpoint)
    planted = (
        f"Planted: a repetition penalty of {PENALTY} in the rollout engine, which training does not"
        " know."
    )
    command = shlex.join(["slime-tis", "diagnose", dump, "--hf-checkpoint", checkpoint])
    return "\n\n".join((planted, text, page, f"Again: {command}"))


def _new_directory(out: str, option: str) -> Path:
    """Returns a path at which a directory can be made.

    Raises:
        ValueError: The path exists or no directory can be made there, before any work is done.
    """
    if os.path.lexists(out):
        raise ValueError(
            f"error: {quoted_path(out)} exists already; remove it, or give another {option}."
        )
    directory = Path(out)
    try:
        # permissions do not tell: root may write to /proc, but nothing can be made there
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
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _sample_with_penalty(checkpoint: str) -> TokenTable:
    """Returns samples of transformers' `generate` with the penalty, scored with and without it."""
    model = load_model(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    _, held_out = make_rows(EXAMPLE, seed=0)
    questions = [row["prompt"] for row in held_out]
    prompts = tokenizer(questions, return_tensors="pt")["input_ids"]
    prompt_len = prompts.shape[1]
    torch.manual_seed(0)
    generated = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        return_dict_in_generate=True,
        output_scores=True,
        do_sample=True,
        top_k=0,
        max_new_tokens=EXAMPLE.digits + 1,
        repetition_penalty=PENALTY,
    )
    tokens = generated.sequences[:, prompt_len:, None]
    # position i of the logits predicts token i + 1
    logits = model(generated.sequences).logits[:, prompt_len - 1 : -1]
    train_log_probs = logits.log_softmax(-1).gather(2, tokens)
    # `scores` are the logits after the penalty
    scores = torch.stack(generated.scores, 1)
    rollout_log_probs = scores.log_softmax(-1).gather(2, tokens)
    samples = []
    for i, prompt in enumerate(prompts):
        response = tokens[i, :, 0].tolist()
        end = [*response, EOS].index(EOS) + 1
        sample = SampleParts(
            prompt=prompt.numpy(),
            train_log_prob=train_log_probs[i, :end, 0].numpy(),
            rollout_log_prob=rollout_log_probs[i, :end, 0].numpy(),
            token=tokens[i, :end, 0].numpy(),
        )
        samples.append(sample)
    return TokenTable.from_parts(samples, {"tokenizer": checkpoint})
