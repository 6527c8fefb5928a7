"""The in-process engine on the decoding task: python our_decode.py CHECKPOINT PRECISION."""

import sys

import torch
from decode_task import DecodeTask, print_rates, prompt_token_ids

from slime_tis.trainer.data.sample import Prompt, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine


def main(checkpoint: str, precision: str) -> None:
    torch.set_num_threads(1)
    engine = LocalEngine(checkpoint, load_tokenizer(checkpoint), precision=precision)  # type: ignore[arg-type]
    # No sample ends early, so both contenders decode the same number of tokens.
    engine._eos_token_ids = ()
    prompts = []
    for index, token_ids in enumerate(prompt_token_ids()):
        prompts.append(Prompt(index=index, text="", token_ids=tuple(token_ids)))

    def generate(new_tokens: int) -> int:
        sampling = Sampling(n_samples=DecodeTask.samples, max_response_len=new_tokens)
        groups = engine.generate(prompts, sampling, 1)
        return sum(sample.response_length for group in groups for sample in group)

    print_rates(generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
