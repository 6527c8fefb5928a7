"""Makes the example's policy and prompts: sort ten digits, `3141592653>` → `1123345569`.

    python examples/sort_digits/prepare.py --out data/sort_digits
    python examples/sort_digits/prepare.py --experts 8 --out data/sort_digits_moe

writes a Qwen3 checkpoint directory, dense or a mixture of experts, with its tokenizer,
`train.jsonl` and `eval.jsonl` in slime's form, and, last, `complete.json`.
"""

import argparse
import os
from pathlib import Path

import torch

from slime_tis.demo.sort_digits import COMPLETE, EXPERTS_PER_TOKEN, Example, prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the prompts and the weights (default 0)"
    )
    parser.add_argument(
        "--experts", type=int, default=0, help="of every layer; 0 makes a dense model (default)"
    )
    options = parser.parse_args()
    if options.experts not in (0, *range(EXPERTS_PER_TOKEN, 129)):
        parser.error(f"--experts is {options.experts} but must be 0 or {EXPERTS_PER_TOKEN} to 128.")
    if is_complete(parser, options.out):
        return
    torch.set_num_threads(1)  # more gain little at this size, and cost much where cores are shared
    report = prepare(options.out, seed=options.seed, example=Example(experts=options.experts))
    print(
        f"{options.out}: {report['parameters']:,} parameters, {report['steps']} supervised steps,"
        f" accuracy {report['accuracy']:.2f} greedy and {report['sampled_accuracy']:.2f} sampled,"
        f" {report['seconds']:.0f} s."
    )


def is_complete(parser: argparse.ArgumentParser, out: Path) -> bool:
    """Whether the example exists, with a message; other files at its path end the program."""
    if (out / COMPLETE).exists():
        print(f"{out} is complete already.")
        return True
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        parser.error(
            f"{out} exists and is not an example of ours; remove it or choose another --out."
        )
    return False


if __name__ == "__main__":
    main()
