"""Malformed command lines and YAML files, and absurd values that parse: one message or a run, never
a traceback.

Every option is tried with every value that its kind refuses, on the command line and in YAML, with
what it needs beside it, so that the value itself is what is refused; and alone, where it would have
no effect.
"""

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from slime_tis.options.command_line import needs_of
from slime_tis.options.fields import flag
from slime_tis.options.values import MAX_TEXT
from slime_tis.trainer.cli.train_arguments import parse_args
from slime_tis.trainer.cli.train_options import COMMAND_LINE, OPTIONS
from tests.checkpoints import make_checkpoint
from tests.faults.forked import Outcome, check, run_forked
from tests.runs import make_task

LONGEST_LINE = 600
"""Characters of a line of a message."""

BASE = {
    "hf_checkpoint": "model",
    "prompt_data": "train.jsonl",
    "rollout_batch_size": "4",
    "n_samples_per_prompt": "8",
    "rollout_max_response_len": "12",
    "num_rollout": "3",
    "rm_type": "exact_match",
}
NOT_WHOLE = (
    "x",
    "1.5",
    "nan",
    "inf",
    "1e3",
    "0x10",
    "1_000",
    "１２",
    "true",
    "[1]",
    "9" * 5000,
    "-" * 9,
)
NOT_A_NUMBER = ("x", "nan", "1e999", "-1e999", "0.5_2", "1,5", "１", "true", "9" * 5000, "--")
NOT_TEXT = ("a\x1b[2Jb", "a\nb", "\x00", "\udc80", "x" * (MAX_TEXT + 1))
BLANK = ("", " ", "\t")
NOT_VERBATIM = ("", "\udc80", "x" * (MAX_TEXT + 1))
"""What options refuse whose text counts as it is, such as a newline that ends an answer."""
WRONG = {bool: ("maybe", "2", "nan", "tru e"), int: NOT_WHOLE, float: NOT_A_NUMBER, str: NOT_TEXT}
SAMPLES = {
    "save": "ckpt",
    "eval_prompt_data": "eval.jsonl",
    "eval_temperature": "1",
    "rollout_rs": "token_k1",
    "rs_veto_threshold": "1e-4",
    "sglang_launch": "1",
}
"""Values of options that others need."""

COMPANIONS = {
    "rollout_rs": ("--rollout-rs-threshold", "2"),
    "sglang_router_ip": ("--sglang-router-port", "1"),
}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line that is accepted, with its files in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    make_checkpoint("model", "qwen3", max_position_embeddings=64)
    for name in ("train.jsonl", "eval.jsonl"):
        Path(name).write_text('{"input": "21>", "label": "12"}\n')
    line = []
    for name, value in BASE.items():
        line += [flag(name), value]
    assert attempt(line) == (0, "")
    return line


def attempt(argv: Sequence[str]) -> tuple[int | None, str]:
    """Exit status of parse_args and its stderr; None and the exception if it raised another one."""
    error = io.StringIO()
    try:
        with redirect_stderr(error), redirect_stdout(io.StringIO()):
            parse_args(list(argv))
    except SystemExit as stop:
        return (stop.code if isinstance(stop.code, int) else 1), error.getvalue()
    except BaseException as wrong:
        return None, f"{type(wrong).__name__}: {wrong}"[:300]
    return 0, error.getvalue()


def fault(argv: Sequence[str], *, refused: bool | None = True) -> str | None:
    """Describes a wrong answer to a command line, or returns None.

    With `refused=None` it may be accepted or refused.
    """
    status, error = attempt(argv)
    if status not in (0, 2):
        return f"ended with {status}: {error}"
    if status == 0 and refused:
        return "was accepted"
    if status == 2 and refused is False:
        return f"was refused: {error}"
    return fault_of_message(error, status)


def fault_of_message(error: str, status: int) -> str | None:
    """Describes a fault of stderr, or returns None: a refusal is one short printable line."""
    lines = error.splitlines()
    if status == 2 and len(lines) != 1:
        return f"said {len(lines)} lines: {error[:200]}"
    for line in lines:
        if len(line) > LONGEST_LINE:
            return f"said {len(line)} characters in a line: {line[:200]}"
        if "Traceback" in line or not line.isprintable():
            return f"said {line!r:.200}"
    return None


def context(name: str) -> list[str]:
    """The flags that an option needs to have an effect, and those that they need."""
    words: list[str] = []
    for need in needs_of(COMMAND_LINE, name)[:1]:
        value = need.value or SAMPLES.get(need.option)
        words += [*context(need.option), flag(need.option)]
        if value is not None:
            words.append(value)
        words += COMPANIONS.get(need.option, ())
    return words


def kind_of(option: Any) -> type:
    """The type of an option's value, or of the items of a list; str for one of several words."""
    kind = option.type.item
    return str if option.type.choices else kind


def wrong_values(option: Any) -> Iterator[str]:
    """Texts that no option of this kind takes, and numbers beyond its limits."""
    if option.verbatim:
        yield from NOT_VERBATIM
        return
    yield from BLANK
    yield from WRONG[kind_of(option)]
    if option.type.choices:
        yield from ("nonsense", option.type.choices[0].upper(), ",".join(option.type.choices[:2]))
    if option.type.limits is not None:
        numbers = [10**18, -(10**18), 2**64, -0.001, 1e300, -1e300, 1e-300]
        if kind_of(option) is int:
            numbers = [10**18, -(10**18), 2**63, -2]
        yield from (str(number) for number in numbers if not option.type.limits.allow(number))


def test_every_option_with_every_wrong_value(base: list[str]) -> None:
    failures = {}
    for name, option in OPTIONS.items():
        for value in wrong_values(option):
            line = [*base, *context(name), f"{flag(name)}={value}"]
            failures[f"{flag(name)} {value!r:.60}"] = fault(line)
    check(failures, at_least=700)


def test_every_option_with_every_wrong_value_in_yaml(base: list[str]) -> None:
    failures = {}
    for name, option in OPTIONS.items():
        if name == "custom_config_path":
            continue
        for value in list(wrong_values(option))[::2]:
            Path("run.yaml").write_text(f"{name}: {json.dumps(value)}\n", encoding="utf-8")
            line = [
                word for word in base if name not in BASE or word not in (flag(name), BASE[name])
            ]
            failures[f"{name}: {value!r:.60}"] = fault(
                [*line, *context(name), "--custom-config-path", "run.yaml"]
            )
        for text in ("[[1]]", "{a: {b: c}}", "{}"):
            Path("run.yaml").write_text(f"{name}: {text}\n")
            failures[f"{name}: {text}"] = fault(
                [*base, *context(name), "--custom-config-path", "run.yaml"]
            )
    check(failures, at_least=500)


def sample(option: Any) -> str:
    """A value that an option takes."""
    if option.name in SAMPLES:
        return SAMPLES[option.name]
    if option.type.choices:
        return option.type.choices[0]
    word = {bool: "true", int: "1", float: "0.5", str: "word"}[kind_of(option)]
    return {
        "tis_mode": "clip",
        "tis_level": "token",
        "rs_level": "token",
        "rejection_normalizer": "original",
    }.get(option.name, word)


def test_every_option_without_what_it_needs(base: list[str]) -> None:
    failures = {}
    unlike = {"policy-loss": ["--use-rollout-logprobs", "--policy-loss", "reinforce"]}
    unlike["advantage-estimator"] = ["--advantage-estimator", "rloo"]
    unlike["rollout-engine"] = ["--rollout-engine", "sglang", "--sglang-url", "http://a:1"]
    for name in (option.name for option in OPTIONS.values() if option.needs):
        words = []
        if any(need.met_by(OPTIONS[need.option].default) for need in needs_of(COMMAND_LINE, name)):
            words = next(
                (words for key, words in unlike.items() if f"--{key}=" in _needs(name)), []
            )
        line = [*base, *words, f"{flag(name)}={sample(OPTIONS[name])}"]
        status, error = attempt(line)
        failure = fault(line)
        if failure is None and "has no effect without" not in error:
            failure = f"said {error!r}"
        failures[f"{flag(name)} ({status})"] = failure
    check(failures, at_least=50)


def _needs(name: str) -> str:
    return " ".join(OPTIONS[name].needs)


WORDS = [
    [""],
    ["--"],
    ["--use-tis", "word"],
    ["--eval-prompt-data"],
    ["--\x1b[2J"],
    ["--" + "x" * 100_000],
    ["--lr=" + "1" * 1_000_000],
    ["--sglang-launch", "1", "--sglang-tp-size", "2"],
    ["--rollout-correction-preset", "decoupled_geo_rs", "--use-rollout-logprobs", "--use-tis"],
    ["--custom-config-path", "none", "--custom-config-path", "."],
    ["--custom-config-path", "/dev/zero"],
    ["--prompt-data", "/dev/zero"],
    ["--eval-prompt-data", "a" * 4000, "eval.jsonl", "a" * 4000, "eval.jsonl"],
    ["--rollout-rs", ",".join(["token_k1"] * 1000) + ",x" * 500],
    ["--rollout-rs", "token_k1", "--rollout-rs-threshold", "2_1"],
    ["--rm-type", "x" * 4000],
    ["--save-debug-rollout-data", "{rollout_id.__class__}"],
    ["--save-debug-rollout-data", "{rollout_id:999999999}"],
    ["--context-parallel-size", "4096"],
    ["--use-rs", "--rs-upper-bound", "0.5", "--rs-lower-bound", "0.6"],
    ["--rollout-engine", "sglang", "--sglang-url", "http://" + "a" * 4000],
    ["--rollout-engine", "sglang", "--sglang-router-ip", "a b", "--sglang-router-port", "1"],
    [
        "algorithm.rollout_correction.rollout_rs=token",
        "algorithm.rollout_correction.rollout_rs_threshold=-1",
    ],
    ["algorithm.gamma=1"],
]


def test_malformed_command_lines(base: list[str]) -> None:
    """tests/cli/test_refusals.py has more, with their messages."""
    failures = {}
    for words in WORDS:
        failures[f"{words!r:.80}"] = fault([*base, *words])
        failures[f"{words!r:.80} first"] = fault([*words, *base], refused=None)
    check(failures, at_least=40)


def bomb(levels: int, width: int = 9) -> str:
    """Aliases of aliases, whose text would double with every level."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


def verl(block: str) -> str:
    return f"algorithm: {{rollout_correction: {{{block}}}}}"


YAML = [
    "\tlr: 1",
    "? lr\n? lr",
    "lr: 1\n---\nlr: 2",
    bomb(9) + "\nlr: *a8",
    "<<: {lr: 1}",
    "lr: !!python/object/apply:os.system ['true']",
    "lr: !!binary /w==\nx: 1",
    "a:\n" + "".join(" " * n + f"k{n}:\n" for n in range(1, 200)),
    "\n" * 66_000,
    "lr: \x00",
    'save: "\\x1b[2J"',
    '"\\x1b": 1',
    "rollout_batch_size: 1_000",
    "save: [a, b]",
    "eval_prompt_data: [null, x]",
    "use_tis: 1",
    "algorithm: {rollout_correction: 1}",
    verl("rollout_is: [token]"),
    verl("rollout_is: token, rollout_is_threshold: 5_0.5"),
    verl("bypass_mode: [true]"),
    verl("bypass_mode: true, loss_type: nonsense"),
    verl("rollout_is: token, rollout_is_threshold: 3") + "\ntis_clip: 2",
    "actor_rollout_ref: {rollout: {calculate_log_probs: true, n: 8}}",
]
BYTES = [
    b"\xff\xfe",
    b"lr: \xff",
    "lr: 1".encode("utf-16"),
    b"\x00" * 100,
    os.urandom(1000),
    b"lr: 1\rlr: 2",
]


def test_malformed_yaml(base: list[str]) -> None:
    """tests/cli/test_yaml.py has more, with their messages."""
    failures = {}
    for number, text in enumerate([*(text.encode("utf-8") for text in YAML), *BYTES]):
        Path("run.yaml").write_bytes(text)
        failures[f"{number}: {text!r:.80}"] = fault([*base, "--custom-config-path", "run.yaml"])
    os.mkfifo("pipe.yaml")
    Path("loop.yaml").symlink_to("loop.yaml")
    Path("cut.yaml").symlink_to("gone")
    for path in (
        "pipe.yaml",
        "loop.yaml",
        "cut.yaml",
        ".",
        "/proc/self/mem",
        "run.yaml/x",
        "\udc80",
    ):
        failures[path] = fault([*base, "--custom-config-path", path])
    check(failures, at_least=30)


ABSURD = [
    "--lr 1e-300",
    "--lr 1 --lr-decay-style cosine --min-lr 1 --lr-decay-iters 1000000000",
    "--eps-clip 0.9999999999999999 --eps-clip-high inf",
    "--policy-loss gspo --eps-clip 1e-300 --eps-clip-high 1e-300",
    "--use-kl-loss --kl-loss-coef 1000 --kl-loss-type k1",
    "--rollout-temperature 0.01",
    "--rollout-stop-token-ids 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    "--use-dynamic-batch-size --max-tokens-per-gpu 1",
    "--rollout-lookahead 1000",
    "--check-weight-sync --weight-sync-bound 1e-300",
    "--use-tis --tis-mode mask --tis-lower-bound 1e-300 --tis-upper-bound 1e-299",
    "--use-tis --tis-level sequence --tis-upper-bound 1e308 --tis-batch-normalize",
    "--use-rollout-logprobs --tis-level segment --tis-upper-bound 1e-300",
    "--use-rs --rs-lower-bound 1e300 --rs-upper-bound 1e301 --rs-level sequence",
    "--rs-veto-threshold 0.9999999999999999 --reject-before-advantage",
    "--rs-second-moment-bound 1e-300",
    "--rollout-rs seq_mean_k3,token_k1 --rollout-rs-threshold 1e-300,1e-300_1e300",
    "--nonfinite-policy raise --calculate-per-token-loss --normalize-advantages",
    "--old-logprobs interpolate --update-weights-interval 1000000 --num-rollout 2",
    (
        "--eval-prompt-data {prompts} --eval-temperature 100 --eval-top-p 1e-300"
        " --n-samples-per-eval-prompt 2"
    ),
    "--num-rollout none --num-epoch 1 --rollout-batch-size 16",
    "--save {tmp}/ckpt --save-retain 1000000 --save-interval 1000000",
    "--save-debug-rollout-data {tmp}/{{{{{{rollout_id}}}}}}.jsonl --debug-rollout-only",
    "--save /proc/x",
    "--use-tensorboard --tb-project-name 💥 --tb-experiment-name {long}",
    "--custom-rm-path nothing.here.fn --rm-type none",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 10000",
]


def test_absurd_values_that_parse_end_in_a_run_or_one_message(tmp_path: Path) -> None:
    failures = {}
    task = make_task(tmp_path / "task", prompts=16)
    for number, line in enumerate(ABSURD):
        words = line.format(
            long="x" * 300,
            prompts=task[task.index("--prompt-data") + 1],
            tmp=tmp_path / str(number),
        ).split()
        first = [] if "--num-rollout" in words else ["--num-rollout", "1"]
        output = ["--output-dir", str(tmp_path / f"run ü{number}")]
        ended = run_forked([*task, *first, *output, *words], tmp_path / f"log{number}", timeout=60)
        failures[line] = failure_of(ended)
    check(failures, at_least=25)


def failure_of(ended: Outcome) -> str | None:
    """Describes a wrong end of a run, or returns None."""
    if ended.traceback or ended.status not in (0, 1, 2):
        return f"ended with {ended.status}: {ended.error[-300:]}"
    if ended.status and len(ended.messages) != 1:
        return f"ended with {ended.status}, {len(ended.messages)} lines: {ended.error[-300:]}"
    return None
