"""Writes GSM8K as a prompt file.

    python examples/qwen3_gsm8k/prepare.py --parquet FILE.parquet --out train.jsonl

The data set is `openai/gsm8k` on the Hugging Face hub (`hf download openai/gsm8k --repo-type
dataset`).
"""

import argparse
import json
from pathlib import Path

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."


def row(question: str, answer: str) -> dict[str, object]:
    """A row of the prompt file: chat messages, and the number after the answer's ####."""
    messages = [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}]
    return {"messages": messages, "label": answer.rsplit("####", 1)[-1].strip()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parquet", type=Path, required=True, help="a file of openai/gsm8k")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    options = parser.parse_args()
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(options.parquet).to_pylist()
    with options.out.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row(each["question"], each["answer"])) + "\n" for each in rows)
    print(f"{len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
