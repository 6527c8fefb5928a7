"""Broken reward functions end in one message."""

from pathlib import Path
from typing import Any

from tests.faults.forked import run_forked
from tests.runs import make_task

# Name → code of a file with a reward function `fn`, status, and part of the message.
REWARDS: dict[str, tuple[str, str]] = {
    "none": ("def fn(args, sample): pass", "returned None"),
    "nan": ("def fn(args, sample): return float('nan')", "returned nan"),
    "inf": ("def fn(args, sample): return -float('inf')", "returned -inf"),
    "text": ("def fn(args, sample): return '1'", "returned '1'"),
    "bytes": ("def fn(args, sample): return b'1'", "returned b'1'"),
    "huge integer": ("def fn(args, sample): return 10**400", "returned an integer of 1329 bits"),
    "enormous integer": ("def fn(args, sample): return 1 << 10**7", "returned an integer of 10000001 bits"),
    "complex": ("def fn(args, sample): return 1j", "returned 1j"),
    "list": ("def fn(args, sample): return [1.0]", "returned [1.0]"),
    "tensor of two": ("import torch\ndef fn(args, sample): return torch.ones(2)", "returned tensor([1., 1.])"),
    "coroutine of a coroutine": (
        "async def g(): return 1\nasync def fn(args, sample): return g()",
        "must return a finite number",
    ),
    "dict": ("def fn(args, sample): return {'a': 1}", "say which of 'a' is the reward with --reward-key"),
    "hostile repr": (
        "class X:\n    def __repr__(self): raise SystemExit(0)\ndef fn(args, sample): return X()",
        "cannot be read: SystemExit: 0",
    ),
    "hostile float": (
        "class X:\n    def __float__(self): raise RuntimeError('no')\ndef fn(args, sample): return X()",
        "cannot be read: RuntimeError: no",
    ),
    "raises": ("def fn(args, sample):\n    raise KeyError('x')", "line 2) raised KeyError: 'x'"),
    "raises nothing said": ("def fn(args, sample):\n    raise ValueError", "line 2) raised ValueError"),
    "raises many lines": (
        "def fn(args, sample):\n    raise ValueError('a\\nb\\x1b[2J' * 100)",
        "raised ValueError: a b",
    ),
    "raises later": ("async def fn(args, sample):\n    return sample.nothing", "line 2) raised AttributeError"),
    "exits": ("import sys\ndef fn(args, sample):\n    sys.exit(0)", "line 3) called sys.exit(0)"),
    "exits in a coroutine": ("async def fn(args, sample):\n    raise SystemExit('x')", "called sys.exit('x')"),
    "recursion": ("def fn(args, sample): return fn(args, sample)", "raised RecursionError"),
    "interrupts itself": ("def fn(args, sample):\n    raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "cancels itself": (
        "import asyncio\nasync def fn(args, sample):\n    raise asyncio.CancelledError",
        "raised CancelledError",
    ),
    "loop in a loop": (
        "import asyncio\nasync def fn(args, sample):\n    return asyncio.run(asyncio.sleep(0))",
        "raised RuntimeError",
    ),
    "too few": ("def fn(args, samples): return [1.0]", "returned [1.0] for the 4 samples"),
    "too many": ("def fn(args, samples): return [1.0] * 99", "for the 4 samples"),
    "a number for a group": ("def fn(args, samples): return 1.0", "returned 1.0 for the 4 samples"),
    "a dict for a group": ("def fn(args, samples): return {'a': 1}", "for the 4 samples"),
    "one bad of a group": ("def fn(args, samples): return [1, 2, None, 4]", "returned None"),
    "empties the samples": (
        "def fn(args, samples):\n    samples.clear()\n    return []",
        "returned [] for the 4 samples",
    ),
    "empties the tokens": (
        "def fn(args, sample):\n    sample.tokens.clear()\n    return 1",
        "changed the tokens",
    ),
    "changes a token": (
        "def fn(args, sample):\n    sample.tokens[0] = 10**9\n    return 1",
        "changed the tokens",
    ),
    "changes log-probs": (
        "def fn(args, sample):\n    sample.rollout_log_probs[0] = float('nan')\n    return 1",
        "changed the tokens, log-probs",
    ),
    "moves a sample": ("def fn(args, sample):\n    sample.group_index = 77\n    return 1", "places of a sample"),
    "masks with halves": ("def fn(args, sample):\n    sample.loss_mask[0] = 0.5\n    return 1", "or its loss_mask"),
    "masks too little": ("def fn(args, sample):\n    sample.loss_mask.pop()\n    return 1", "or its loss_mask"),
    "masks with text": ("def fn(args, sample):\n    sample.loss_mask = 'x'\n    return 1", "or its loss_mask"),
    "metadata without end": (
        "def fn(args, sample):\n    sample.metadata['self'] = sample.metadata\n    return 1",
        "its metadata nests deeper than 100 levels",
    ),
    "metadata of another kind": (
        "def fn(args, sample):\n    sample.metadata = None\n    return 1",
        "left None as the metadata",
    ),
    "hostile keys": (
        "class X:\n    def __str__(self): raise SystemExit(0)\ndef fn(args, sample):\n"
        "    sample.metadata[X()] = 1\n    return 1",
        "cannot be read: SystemExit: 0",
    ),
    "an ambiguous switch": (
        "import torch\ndef fn(args, sample):\n    sample.remove_sample = torch.ones(2)\n    return 1",
        "cannot be read: RuntimeError",
    ),
    "no parameters": ("def fn(): return 1", "cannot be called as fn(args, sample)"),
    "one more parameter": ("def fn(args, sample, more): return 1", "cannot be called as fn(args, sample)"),
    "no function": ("fn = 3", "fn"),
    "another name": ("def other(args, sample): return 1", "has no function 'fn'; it has other"),
    "syntax": ("def fn(args, sample) return 1", "line 1"),
    "import": ("import nothing_of_this_name\ndef fn(args, sample): return 1", "nothing_of_this_name"),
    "exits when imported": ("import sys\nsys.exit(0)", "called sys.exit(0)"),
}


def test_reward_functions(tmp_path: Path, tally: Any) -> None:
    task = make_task(tmp_path / "task")
    task += ["--num-rollout", "1"]
    count = tally("reward functions")
    for number, (name, (code, message)) in enumerate(REWARDS.items()):
        file = tmp_path / f"reward_{number}.py"
        file.write_text(code + "\n")
        argv = [*task, "--custom-rm-path", f"{file}:fn", "--output-dir", str(tmp_path / f"run_{number}")]
        outcome = run_forked(argv, tmp_path / f"log_{number}")
        said = outcome.error.strip()
        failure = None
        if outcome.status != 2 or outcome.traceback:
            failure = f"ended with {outcome.status}: {said[-300:]}"
        elif message not in said or len(said) > 900 or "\x1b" in said or str(file) not in said:
            failure = f"said {said!r}"
        count.record(name, failure)
    count.check(at_least=45)
