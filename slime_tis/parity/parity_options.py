"""The options of `slime-tis parity`."""

from collections.abc import Callable

from slime_tis.parity.executions import EXECUTIONS, PRECISIONS

SAMPLES = 4
"""Default of --samples."""
ADAPTER_SAMPLES = 16
"""Default of --samples with --adapter: the smallest number that proves a cause."""
NO_ADAPTER = "none"
"""Value of --other-adapter for an execution without adapter."""


def add_parity_options(add: Callable[..., object]) -> None:
    """Adds the options to a parser; `add` adds one argument."""
    add("checkpoint", metavar="CHECKPOINT", help="Hugging Face directory, or ORG/NAME of the Hub")
    titles = "; ".join(f"{name}: {entry.title}" for name, entry in EXECUTIONS.items())
    add(
        "--reference",
        choices=[*EXECUTIONS],
        default="full",
        help=f"execution that is taken as right (default %(default)s): {titles}",
    )
    other = "execution that is compared with it (default decode); may be repeated"
    add("--other", choices=[*EXECUTIONS], action="append", default=[], help=other)
    precision = "precision of both executions (default %(default)s)"
    add("--precision", choices=PRECISIONS, default="fp32", help=precision)
    other_precision = "precision of the other execution, if it differs"
    add("--other-precision", choices=PRECISIONS, default="", help=other_precision)
    other_checkpoint = "checkpoint of the other execution, if it differs"
    add("--other-checkpoint", default="", metavar="DIR", help=other_checkpoint)
    adapter = (
        "LoRA adapter of PEFT, which both executions apply without merging; a server must have it"
        " itself"
    )
    add("--adapter", default="", metavar="DIR", help=adapter)
    other_adapter = f"adapter of the other execution, if it differs; {NO_ADAPTER}: without adapter"
    add("--other-adapter", default="", metavar="DIR", help=other_adapter)
    served = (
        "name under which the server has loaded the adapter; without it, the server's weights must"
        " have the adapter"
    )
    add("--served-adapter", default="", metavar="NAME", help=served)
    older = "older adapter, which is named if the other execution has it; may be repeated"
    add("--older-adapter", action="append", default=[], metavar="DIR", help=older)
    prompts = (
        "file with a prompt per line: text, or JSON objects with `prompt` or `tokens` in a .jsonl"
        " (default: random tokens)"
    )
    add("--prompts", default="", metavar="FILE", help=prompts)
    samples = f"prompts (default {SAMPLES}, with --adapter {ADAPTER_SAMPLES})"
    add("--samples", type=int, default=None, metavar="N", help=samples)
    tokens = "tokens that are sampled after each prompt, also for `decode` (default %(default)s)"
    add("--tokens", type=int, default=32, metavar="N", help=tokens)
    seed = "seed of random prompts and of sampling (default %(default)s)"
    add("--seed", type=int, default=0, metavar="N", help=seed)
    chunk = "tokens of a pass of `chunks` (default %(default)s)"
    add("--chunk-size", type=int, default=16, metavar="N", help=chunk)
    shared = "give `local` and `training` the operations of train.py --true-on-policy"
    add("--true-on-policy", action="store_true", help=shared)
    url = "address of the server of `sglang` or `vllm`, such as http://127.0.0.1:30000"
    add("--url", default="", metavar="URL", help=url)
    device = "device of torch of transformers' executions, such as cuda:0 (default %(default)s)"
    add("--device", default="cpu", metavar="DEVICE", help=device)
    out = "also write an HTML report with heat maps of all operations"
    add("--out", default="", metavar="FILE", help=out)
    add("--json", action="store_true", help="print JSON")
    limit = "exit with status 1 if mean abs(Δ) of log-probs exceeds this number of nats, for CI"
    add("--fail-on", type=float, default=None, metavar="NATS", help=limit)
