"""Gives the same weights, prompts and tokens to four engines and compares their log-probs.

    python -m studies.engines.run      # the first command of `make study-engines`

SGLang, vLLM and transformers sample answers. SGLang, vLLM, transformers and the layers of this
project's trainer (megatron-core) score answers in one pass. Every stage starts one server or loads
one model, and writes its log-probs below --records; stages that are complete are not repeated. At
last all pairs of log-probs of the same tokens are compared: results.csv and README.md.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from slime_tis.hf_directory import read_model_config
from slime_tis.trainer.data.prompts import load_prompts
from studies.engines import page
from studies.engines.records import Records
from studies.engines.results import RESULTS, model_rows, read_results, write_results
from studies.engines.servers import MissingEnvironment
from studies.engines.stages import Model, Study, stages

RECORDS = Path("runs/studies/engines")


MODELS = {
    "sort_digits": Model(
        name="sort_digits",
        checkpoint=Path("data/sort_digits/checkpoint"),
        prompts=Path("data/sort_digits/eval.jsonl"),
        response=12,
        max_length=64,
        count=64,
        target="make data",
    ),
    "smollm2": Model(
        name="smollm2",
        checkpoint=Path("data/smollm2/checkpoint"),
        prompts=Path("data/smollm2/prompts/eval.jsonl"),
        response=16,
        max_length=512,
        count=16,
        target="make data-smollm2",
        is_chat=True,
    ),
}


def main() -> int:
    """Runs all stages that can run, and writes the table and the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="which models"
    )
    parser.add_argument(
        "--records", type=Path, default=RECORDS, help=f"log-probs of stages (default {RECORDS})"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="table to write")
    parser.add_argument(
        "--draw", action="store_true", help="write only the tables of README.md, from --results"
    )
    options = parser.parse_args()
    if options.draw:
        print(page.write(read_results(options.results)))
        return 0
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    rows = []
    if options.results.exists():
        # The rows of models that are not measured now stay.
        rows = [row for row in read_results(options.results) if row.model not in options.models]
    is_complete = True
    for name in options.models:
        study = load(MODELS[name], options.records / name)
        is_complete &= run_stages(study)
        rows += model_rows(name, study.records)
    if not is_complete:
        print("The table is not written, because stages are missing.", file=sys.stderr)
        return 1
    write_results(options.results, rows)
    if options.results == RESULTS:
        page.write(rows)
    print(options.results)
    return 0


def load(model: Model, directory: Path) -> Study:
    """Returns the study of a model.

    Raises:
        SystemExit: The checkpoint or the prompts do not exist.
    """
    for path in (model.checkpoint / "config.json", model.prompts):
        if not path.exists():
            raise SystemExit(f"error: {path} does not exist: run `{model.target}`, which makes it.")
    tokenizer = AutoTokenizer.from_pretrained(model.checkpoint, local_files_only=True)
    prompts = load_prompts(
        model.prompts, tokenizer, input_key="prompt", apply_chat_template=model.is_chat
    )
    return Study(
        model=model,
        records=Records(directory),
        prompts=[list(prompt.token_ids) for prompt in prompts[: model.count]],
        end=tokenizer.eos_token_id,
        vocab_size=read_model_config(str(model.checkpoint))["vocab_size"],
    )


def run_stages(study: Study) -> bool:
    """Runs the missing stages; returns whether all are complete."""
    is_complete = True
    for stage in stages(study):
        if study.records.finished(stage.name):
            continue
        print(f"{study.model.name}: {stage.name}", flush=True)
        try:
            stage.run()
        except MissingEnvironment as error:
            print(f"skipped: {error}", file=sys.stderr)
            is_complete = False
        else:
            study.records.finish(stage.name)
    return is_complete


if __name__ == "__main__":
    sys.exit(main())
