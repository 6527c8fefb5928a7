"""Launch scripts written to break things: one message each, and nothing of a script is executed."""

import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_tis.main import main
from tests.faults.forked import check

TRAIN = (
    "python train.py --lr 1e-6 --hf-checkpoint m --prompt-data p.jsonl --rm-type math --num-rollout"
    " 1 --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 8 "
)
LONG = 250_000
"""Characters, near the limit of a script: quadratic code would take minutes."""

BAD_SCRIPTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "has no command that runs train.py"),
    "no training": ("echo hello\n", "has no command that runs train.py"),
    "open quote": ("echo\necho 'a\n" + TRAIN, "(line 2 and what follows it are not understood)"),
    "open substitution": (
        "X=$(dirname " + "$0" * (LONG // 2) + "\n" + TRAIN,
        "(line 1 and what follows it",
    ),
    "binary": (bytes(range(256)) * 40, "is not text in UTF-8"),
    "huge": (b"#" * (2 << 20), "is too large"),
    "nested blocks": ("{ " * 20_000 + TRAIN + "; }" * 20_000, "nests its commands too deeply"),
    "doubling": ("A=xxxxxxxxxx\n" + "A=$A$A\n" * 64 + TRAIN, "expand to more than"),
    "reading itself": ('A=\'"$A" xtrain.py \'\n"$A" xtrain.py', "nests its commands too deeply"),
    "many sources": ("".join(f"source s{i}.sh\n" for i in range(30)) + TRAIN, "sources more than"),
    "sourced fifo": ("source pipe.sh\n" + TRAIN, "is not a file"),
}
"""Script and message."""
GOOD_SCRIPTS = {
    "sourcing itself": "source run.sh\n" + TRAIN,
    "substitutions": (
        "X=$(touch RUN)\n"
        + TRAIN
        + '--save $(touch RUN) --load "$(touch RUN)" --input-key <(touch RUN)'
    ),
    "indirect variable": "X='$(touch RUN)'\n" + TRAIN + "--save ${!X}",
    "commands in a string": f'bash -c "touch RUN; {TRAIN}"',
    "trap and functions": "f() { touch RUN; }\ntrap f EXIT\nf\n" + TRAIN,
    "here document": "cat <<EOF\n$(touch RUN)\nEOF\n" + TRAIN,
    "newline in a value": TRAIN + "--save 'a\ntouch RUN\n#'",
    "escape sequences in a value": TRAIN + "--save '\x1b]0;x\x07\x1b[2J'",
    "quotes in a value": TRAIN + '--save "a\'b\\"c;touch RUN"',
    "nested substitutions": "X=" + "$(" * 20_000 + ")" * 20_000 + "\n" + TRAIN,
    "code in a flag": TRAIN + "'--sglang-x;touch RUN' 1",
    "escape sequences in paths": (
        "PYTHONPATH='/a\x1b[2J:/b;touch RUN:`touch RUN`:$(touch RUN)' " + TRAIN
    ),
    "long value": TRAIN + "--save " + "x" * LONG,
    "many variables": TRAIN + "--save x" + "$a" * (LONG // 2),
    "deep defaults of long values": (
        TRAIN + "--save x" + "${A:-" * 19 + '"$x"' * (LONG // 5) + "}" * 19
    ),
    "negative and zero counts": (
        TRAIN + "--actor-num-gpus-per-node 0 --rollout-num-gpus-per-engine -1 --colocate"
    ),
}


def mutations(seed: int, count: int) -> Iterator[str]:
    """A script with letters deleted, and replaced by characters with a meaning for a shell."""
    text = (
        'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"\nsource "${DIR}/a.sh"\n'
        "A=(\n  --lr 1e-6 # x\n  --seed 7\n)\n"
        'if [ -z "$N" ]; then\n  N=8\nfi\n'
        "ray job submit -- python3 train.py --save '$(touch RUN)' ${A[@]} \"$N\" `touch RUN`\n"
    )
    chance = random.Random(seed)
    for _ in range(count):
        letters = list(text)
        for index in chance.sample(range(len(letters)), chance.randint(1, 6)):
            letters[index] = chance.choice(["", *"'\"(){}`$\\\n#;<x"])
        yield "".join(letters)


def failure_of(
    text: str | bytes,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    statuses: tuple[int, ...],
    message: str = "",
) -> str | None:
    """Describes a failure to port a script, or returns None; one message is no failure."""
    if isinstance(text, str):
        text = text.encode()
    (folder / "run.sh").write_bytes(text)
    status = main(["port", "run.sh"])
    captured = capsys.readouterr()
    if (folder / "RUN").exists():
        return "ran a command of the script"
    if status not in statuses:
        return f"ended with {status}: {captured.err[:200]}"
    if status == 2:
        are_comments = all(line.startswith("#") for line in captured.out.splitlines())
        is_one_message = 0 < len(captured.err) < 1000 and are_comments and message in captured.err
        return None if is_one_message else f"said {captured.err[:200]!r}"
    return harm_of(captured.out)


def harm_of(printed: str) -> str | None:
    """Describes harm that the printed text could do, or returns None; it may start torchrun."""
    joined = printed.replace(" \\\n", " ").splitlines()
    lines = [line for line in joined if not line.startswith("#")]
    if len(lines) != 1 or not lines[0].startswith("torchrun "):
        return f"printed {len(lines)} commands: {lines[:3]!r}"
    if any(not (letter.isprintable() or letter == "\n") for letter in printed):
        return "printed control characters"
    quoted = re.compile(r"'[^']*'|\\.|\"(?:\\.|[^\"\\])*\"")
    # bash still runs $(…) within double quotes
    double_quoted = [part for part in quoted.findall(lines[0]) if part[0] == '"']
    unescaped = re.sub(r"\\.", "", "".join(double_quoted))
    runs_substitution = re.search(r"\$\(|`", unescaped)
    if re.search(r"[;|&<>()`]", quoted.sub("", lines[0])) or runs_substitution:
        return f"printed code: {lines[0][:300]!r}"
    return None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a pipe and short scripts that others read."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.sh")
    for number in range(30):
        (tmp_path / f"s{number}.sh").write_text("X=1\n")
    return tmp_path


@pytest.mark.parametrize("name", BAD_SCRIPTS)
def test_a_bad_script_is_one_message(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = BAD_SCRIPTS[name]
    assert failure_of(text, folder, capsys, (2,), message) is None


@pytest.mark.parametrize("name", GOOD_SCRIPTS)
def test_a_hostile_script_becomes_one_harmless_command(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failure_of(GOOD_SCRIPTS[name], folder, capsys, (0,)) is None


def test_mutated_scripts_are_harmless_or_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {}
    for number, text in enumerate(mutations(seed=7, count=300)):
        failures[f"mutation {number}"] = failure_of(text, folder, capsys, (0, 2))
    check(failures, at_least=300)
