"""Launch scripts written to break things: one message each, and nothing of a script is executed."""

import os
import random
import re
from pathlib import Path

import pytest

from slime_tis.main import main
from tests.faults.forked import check

TRAIN = "python train.py --lr 1e-6 "

LONG = 250_000
"""Characters, near the limit of a script: quadratic code would take minutes."""

BAD_SCRIPTS = {
    "empty": "",
    "no training": "echo hello\n",
    "open quote": "echo 'a\n" + TRAIN,
    "binary": bytes(range(256)) * 40,
    "huge": b"#" * (2 << 20),
    "nested blocks": "{ " * 20_000 + TRAIN + "; }" * 20_000,
    "doubling": "A0=xxxxxxxxxx\n" + "\n".join(f"A{i + 1}=$A{i}$A{i}" for i in range(64)) + f"\n{TRAIN} $A64",
    "many sources": "".join(f"source s{i}.sh\n" for i in range(30)) + TRAIN,
    "sourced fifo": "source pipe.sh\n" + TRAIN,
}
GOOD_SCRIPTS = {
    "sourcing itself": "source run.sh\n" + TRAIN,
    "command substitution": "X=$(touch RUN)\n" + TRAIN + "--save $(touch RUN)",
    "quoted substitution": TRAIN + '--save "$(touch RUN)"',
    "process substitution": TRAIN + "--save <(touch RUN)",
    "indirect variable": "X='$(touch RUN)'\n" + TRAIN + "--save ${!X}",
    "commands in a string": 'bash -c "touch RUN; python train.py --lr 1"',
    "trap and functions": "f() { touch RUN; }\ntrap f EXIT\nf\n" + TRAIN,
    "here document": "cat <<EOF\n$(touch RUN)\nEOF\n" + TRAIN,
    "newline in a value": TRAIN + "--save 'a\ntouch RUN\n#'",
    "escape sequences in a value": TRAIN + "--save '\x1b]0;x\x07\x1b[2J'",
    "quotes in a value": TRAIN + '--save "a\'b\\"c;touch RUN"',
    "nested substitutions": "X=" + "$(" * 20_000 + ")" * 20_000 + "\n" + TRAIN,
    "code in a flag": TRAIN + "'--sglang-x;touch RUN' 1",
    "escape sequences in paths": "PYTHONPATH='/a\x1b[2J:/b;touch RUN:`touch RUN`:$(touch RUN)' " + TRAIN,
    "long value": TRAIN + "--save " + "x" * LONG,
    "many variables": TRAIN + "--save x" + "$a" * (LONG // 2),
    "deep defaults of long values": TRAIN + "--save x" + "${A:-" * 19 + '"$x"' * (LONG // 5) + "}" * 19,
    "negative and zero counts": TRAIN + "--actor-num-gpus-per-node 0 --rollout-num-gpus-per-engine -1 --colocate",
}


@pytest.fixture
def folder(tmp_path):
    for number in range(30):
        (tmp_path / f"s{number}.sh").write_text("X=1\n")
    os.mkfifo(tmp_path / "pipe.sh")
    return tmp_path


def mutations(seed, count):
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


def try_script(text, folder, capsys, statuses):
    """What went wrong in porting a script; None where it was ported, or refused in one message."""
    path = folder / "run.sh"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        status = main(["port", str(path)])
    except BaseException as error:
        return f"raised {type(error).__name__}: {error}"
    captured = capsys.readouterr()
    if any(each.name == "RUN" for each in (*folder.iterdir(), *Path.cwd().iterdir())):
        return "ran a command of the script"
    if status not in statuses:
        return f"ended with {status}: {captured.err[:200]}"
    if status == 2:
        return None if 0 < len(captured.err) < 1000 and not captured.out else f"said {captured.err[:200]!r}"
    return harmful(captured.out)


def harmful(printed):
    """Whether running what was printed would do anything but start one command with these words."""
    lines = [line for line in printed.replace(" \\\n", " ").splitlines() if not line.startswith("#")]
    if len(lines) != 1 or not lines[0].startswith("torchrun "):
        return f"printed {len(lines)} commands: {lines[:3]!r}"
    if any(not (letter.isprintable() or letter == "\n") for letter in printed):
        return "printed control characters"
    quoted = re.compile(r"'[^']*'|\\.|\"(?:\\.|[^\"\\])*\"")
    inside = "".join(part for part in quoted.findall(lines[0]) if part[0] == '"')  # where bash still runs $(…)
    if re.search(r"[;|&<>()`]", quoted.sub("", lines[0])) or re.search(r"\$\(|`", re.sub(r"\\.", "", inside)):
        return f"printed code: {lines[0][:300]!r}"
    return None


def test_scripts(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    tried = {name: try_script(text, folder, capsys, (2,)) for name, text in BAD_SCRIPTS.items()}
    tried |= {name: try_script(text, folder, capsys, (0,)) for name, text in GOOD_SCRIPTS.items()}
    for number, text in enumerate(mutations(seed=7, count=300)):
        tried[f"mutation {number}"] = try_script(text, folder, capsys, (0, 2))
    check(tried, at_least=300)
