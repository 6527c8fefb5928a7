"""Launch scripts and reward functions made to break things: one message each, and nothing of a script is run."""

import os
import random
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_tis.main import main
from tests.faults.forked import run_forked
from tests.runs import make_task

TRAIN = "python train.py --lr 1e-6 "
LONGEST = 10.0
"""Seconds that one script may take."""

BAD_SCRIPTS: dict[str, str | bytes] = {
    "empty": "",
    "no training": "echo hello\n",
    "open quote": "echo 'a\n" + TRAIN,
    "open double quote": 'X="a\n' + TRAIN,
    "open substitution": "X=$(a\n" + TRAIN,
    "open brace": "X=${a\n" + TRAIN,
    "open array": "A=(--x\n" + TRAIN,
    "open backquote": "X=`a\n" + TRAIN,
    "closing alone": ")\n))\n}\n" + "echo\n",
    "binary": bytes(range(256)) * 40,
    "null bytes": b"python train.py\0--lr 1",
    "latin": "python train.py --lr 1 # \xe9".encode("latin-1"),
    "utf-16": TRAIN.encode("utf-16"),
    "huge": b"#" * (2 << 20),
    "nested substitutions": "X=" + "$(" * 20_000 + ")" * 20_000 + "\n" + TRAIN,
    "nested parentheses": "(" * 20_000 + ")" * 20_000 + "\n" + TRAIN,
    "nested defaults": TRAIN + "${A:-" * 5_000 + "}" * 5_000,
    "doubling": "A0=xxxxxxxxxx\n" + "\n".join(f"A{i + 1}=$A{i}$A{i}" for i in range(64)) + f"\n{TRAIN} $A64",
    "doubling arrays": "A0=(x x)\n"
    + "\n".join(f"A{i + 1}=(${{A{i}[@]}} ${{A{i}[@]}})" for i in range(64))
    + f"\n{TRAIN} ${{A64[@]}}",
    "doubling by appending": "A=(x x)\n" + "A+=(${A[@]})\n" * 64 + TRAIN + "${A[@]}",
    "many sources": "".join(f"source s{i}.sh\n" for i in range(30)) + TRAIN,
    "deep sources": "source d0.sh\n" + TRAIN,
    "sourced binary": "source binary.sh\n" + TRAIN,
    "sourced directory": "source folder\n" + TRAIN,
    "sourced fifo": "source pipe.sh\n" + TRAIN,
}
GOOD_SCRIPTS: dict[str, str | bytes] = {
    "sourcing itself": "source run.sh\n" + TRAIN,
    "sourcing in a circle": "source a.sh\n" + TRAIN,
    "missing source": "source nowhere.sh\n" + TRAIN,
    "source of an unset variable": 'source "$NOWHERE/x.sh"\n' + TRAIN,
    "source of a null device": "source /dev/null\n" + TRAIN if not Path("/dev/null").exists() else TRAIN,
    "command substitution": "X=$(touch RUN)\n" + TRAIN + "--save $(touch RUN)",
    "backquotes": TRAIN + "--save `touch RUN`",
    "quoted substitution": TRAIN + '--save "$(touch RUN)"',
    "escaped substitution": TRAIN + "--save '$(touch RUN)' --wandb-group \\$\\(touch\\ RUN\\)",
    "substitution in a default": TRAIN + "--save ${X:-$(touch RUN)}",
    "substitution in arithmetic": TRAIN + "--seed $(( $(touch RUN) + 1 ))",
    "process substitution": TRAIN + "--save <(touch RUN)",
    "substitution in a variable's name": TRAIN + "--save ${$(touch RUN)}",
    "substitution in a subscript": TRAIN + "--save ${A[$(touch RUN)]}",
    "indirect variable": "X='$(touch RUN)'\n" + TRAIN + "--save ${!X}",
    "unset variable with a value like code": TRAIN + '--save "${X};touch RUN"',
    "commands around": "touch RUN\n" + TRAIN + "; touch RUN\n",
    "commands in a string": 'bash -c "touch RUN; python train.py --lr 1"',
    "eval": "eval 'touch RUN'\n" + TRAIN,
    "trap and functions": "f() { touch RUN; }\ntrap f EXIT\nf\n" + TRAIN,
    "here document": "cat <<EOF\n$(touch RUN)\nEOF\n" + TRAIN,
    "code in a comment": "# $(touch RUN)\n" + TRAIN + "# $(touch RUN)",
    "newline in a value": TRAIN + "--save 'a\ntouch RUN\n#'",
    "newline in a flag": TRAIN + "$'--x\ntouch RUN'",
    "escape sequences in a value": TRAIN + "--wandb-group '\x1b]0;x\x07\x1b[2J'",
    "bidirectional text": TRAIN + "--wandb-group '\u202etxet'",
    "quotes in a value": TRAIN + '--wandb-group "a\'b\\"c;touch RUN"',
    "long value": TRAIN + "--wandb-group " + "x" * 60_000,
    "many flags": TRAIN + " ".join(f"--x{i}" for i in range(5_000)),
    "very long line": TRAIN + "--a " * 100_000,
    "numbers beyond": TRAIN + "--actor-num-gpus-per-node 999999999 --global-batch-size 999999999 --colocate",
    "negative and zero counts": TRAIN + "--actor-num-gpus-per-node 0 --rollout-num-gpus-per-engine -1 --colocate",
    "unicode counts": TRAIN + "--actor-num-gpus-per-node ٣ --rollout-num-gpus ²",
    "equals and nothing": TRAIN + "--seed= --= --=x -- --",
    "flag twice": TRAIN + "--seed 1 --seed 2",
    "surrogates": (TRAIN + "--wandb-group x").encode() + "\U0010ffff".encode(),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with files to source."""
    for number in range(30):
        (tmp_path / f"s{number}.sh").write_text("X=1\n")
        (tmp_path / f"d{number}.sh").write_text(f"source d{number + 1}.sh\n")
    (tmp_path / "a.sh").write_text("source b.sh\n")
    (tmp_path / "b.sh").write_text("source a.sh\n")
    (tmp_path / "binary.sh").write_bytes(b"\xff\0\xfe")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.sh")
    return tmp_path


def mutations(seed: int, count: int) -> Iterator[str]:
    """A script with letters deleted, doubled and replaced by what means something to a shell."""
    text = (
        'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"\nsource "${DIR}/a.sh"\n'
        "A=(\n  --lr 1e-6 # x\n  --seed 7\n)\n"
        'if [ -z "$N" ]; then\n  N=8\nfi\n'
        "ray job submit -- python3 train.py --save '$(touch RUN)' ${A[@]} \"$N\" `touch RUN`\n"
    )
    chance = random.Random(seed)
    for _ in range(count):
        letters = list(text)
        for _ in range(chance.randint(1, 6)):
            letters[chance.randrange(len(letters))] = chance.choice(
                ["", "'", '"', "(", ")", "{", "}", "`", "$", "\\", "\n", "#", ";", "<", "x"]
            )
        yield "".join(letters)


def try_script(text: str | bytes, folder: Path, capsys: Any, statuses: tuple[int, ...]) -> str | None:
    """What went wrong in porting a script; None where it was ported, or refused in one message."""
    path = folder / "run.sh"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    started = time.monotonic()
    try:
        status = main(["port", str(path)])
    except BaseException as error:
        return f"raised {type(error).__name__}: {error}"
    captured = capsys.readouterr()
    if time.monotonic() - started > LONGEST:
        return f"took {time.monotonic() - started:.0f} s"
    if any(each.name == "RUN" for each in (*folder.iterdir(), *Path.cwd().iterdir())):
        return "ran a command of the script"
    if status not in statuses:
        return f"ended with {status}: {captured.err[:200]}"
    if status == 2:
        return None if 0 < len(captured.err) < 1000 and not captured.out else f"said {captured.err[:200]!r}"
    return harmful(captured.out)


def harmful(printed: str) -> str | None:
    """Whether running what was printed would do anything but start one command with these words."""
    lines = [line for line in printed.replace(" \\\n", " ").splitlines() if not line.startswith("#")]
    if len(lines) != 1 or not lines[0].startswith("torchrun "):
        return f"printed {len(lines)} commands: {lines[:3]!r}"
    if any(not (letter.isprintable() or letter == "\n") for letter in printed):
        return "printed control characters"
    quoted = shlex.shlex(lines[0], posix=True, punctuation_chars=True)
    quoted.whitespace_split = True
    operators = [word for word in quoted if word in (";", "|", "&", "&&", "||", "<", ">", "(", ")")]
    unquoted = "".join(part for part in lines[0].split("'")[::2])
    if "$(" in unquoted.replace("\\$(", "") or "`" in unquoted.replace("\\`", "") or operators:
        return f"printed code: {lines[0][:300]!r}"
    return None


def test_scripts(folder: Path, capsys: Any, tally: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    count = tally("launch scripts")
    for name, text in BAD_SCRIPTS.items():
        count.record(name, try_script(text, folder, capsys, (2,)))
    for name, text in GOOD_SCRIPTS.items():
        count.record(name, try_script(text, folder, capsys, (0,)))
    for number, text in enumerate(mutations(seed=7, count=300)):
        count.record(f"mutation {number}", try_script(text, folder, capsys, (0, 2)))
    count.check(at_least=350)


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
    place = task.index("--custom-rm-path")
    task = [*task[:place], *task[place + 2 :], "--num-rollout", "1"]
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
