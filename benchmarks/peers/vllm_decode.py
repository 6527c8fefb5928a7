"""vLLM on the decoding task, in its environment: python vllm_decode.py CHECKPOINT PRECISION."""

import os
import sys

# The engine in this process, without threads bound to cores that other contenders use.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

from decode_task import DecodeTask, print_rates, prompt_token_ids
from vllm import LLM, SamplingParams

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def main(checkpoint: str, precision: str) -> None:
    engine = LLM(
        model=checkpoint,
        dtype=DTYPES[precision],
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=DecodeTask.sequences,
    )
    prompts = [{"prompt_token_ids": token_ids} for token_ids in prompt_token_ids()]

    def generate(new_tokens: int) -> int:
        sampling = SamplingParams(
            n=DecodeTask.samples,
            max_tokens=new_tokens,
            ignore_eos=True,
            temperature=1.0,
            logprobs=0,
            seed=1,
        )
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.token_ids) for answer in answers for output in answer.outputs)

    print_rates(generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
