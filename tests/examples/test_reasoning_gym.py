"""reasoning-gym as prompts and reward: its own scores, disjoint rows, levels, and nothing run as code."""

import ast
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest

from tests.runs import ROOT, run_here

reasoning_gym = pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")


from examples.reasoning_gym import prompts, reward  # noqa: E402
from tests.checkpoints import make_checkpoint  # noqa: E402

SUM = "chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
PRODUCT = "products?min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("reader", "response", "expected"),
    [
        ("number", "The answer is 6 + 2 = 8.", "8"),
        ("number", "0 - 9 = -9", "-9"),
        ("number", "9-5", "5"),
        ("number", "about 1,234.50!", "1234.50"),
        ("number", "none", None),
        ("tag", "<answer>no</answer> or <answer> yes </answer>", "yes"),
        ("tag", "yes", None),
        ("word", "\n Yes, since …", "Yes"),
        ("word", "…", None),
        ("text", " a b \n", "a b"),
    ],
    ids=lambda value: repr(value),
)
def test_answers_are_read(reader, response, expected):
    assert reward.read_answer(response, reader) == expected


def test_scores_are_those_of_the_dataset():
    metadata = {
        "dataset": "chain_sum",
        "config": {"max_terms": 2},
        "entry": {"question": "4 + 3 =", "answer": "7", "metadata": {}},
        "answer": "text",
    }
    scores = [
        reward.entry_score(metadata, response) for response in ("7", "+7.0", "it is 7", "8", "")
    ]
    assert scores == [
        1.0,
        1.0,
        pytest.approx(1 / 7),
        0.0,
        0.0,
    ]  # one character of seven is the answer
    sample = type("Sample", (), {"metadata": metadata, "response": "it is 7"})()
    assert (reward.score(None, sample), reward.correct(None, sample)) == (pytest.approx(1 / 7), 0.0)
    metadata["answer"] = "number"
    assert (reward.score(None, sample), reward.correct(None, sample)) == (1.0, 1.0)


def test_what_a_dataset_cannot_score_counts_as_0(caplog):
    spec = prompts.parse_spec("prime_factorization?answer=text")
    (entry,) = prompts.questions(spec, 1, set(), 0)
    metadata = prompts.row(spec, entry, None)["metadata"]
    assert reward.entry_score(metadata, entry["answer"]) == 1.0
    assert reward.entry_score(metadata, "[[") == 0.0
    assert "prime_factorization cannot score '[[': ValueError; it counts as 0." in caplog.text
    spec = prompts.parse_spec("coin_flip?answer=text")
    (entry,) = prompts.questions(spec, 1, set(), 0)
    assert reward.entry_score(prompts.row(spec, entry, None)["metadata"], "1e999999999") == 0.0


def test_datasets_that_run_text_as_code_are_refused():
    """Every call in the package that runs text is in a dataset that is refused, or runs what the package generated."""
    found = set()
    for file in Path(inspect.getfile(reasoning_gym)).parent.rglob("*.py"):
        calls = [
            node.func
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call)
        ]
        names = {
            call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls
        }
        if names & {"eval", "exec", "parse_expr", "sympify"} or any(
            isinstance(call, ast.Name) and call.id == "compile" for call in calls
        ):
            found.add(file.stem)
    generated = {"basic_arithmetic", "generators_00_49", "generators_50_99", "propositional_logic"}
    assert found - generated == reward.EXECUTES.keys()
    for name in reward.EXECUTES:
        with pytest.raises(ValueError, match=f"{name} is scored by .* it is not offered"):
            prompts.parse_spec(name)
        with pytest.raises(ValueError, match="not offered"):
            reward.entry_score({"dataset": name, "config": {}, "entry": {}, "answer": "text"}, "1")


def test_no_question_is_trained_on_and_held_out(tmp_path):
    specs = [prompts.parse_spec(text, answer="number") for text in (SUM, f"{PRODUCT}&weight=3")]
    said = prompts.write(tmp_path / "gym", specs, 400, 60)
    assert said.splitlines()[1:] == [
        "  chain_sum: 100 training rows of 100 questions, 15 held out",
        # there are 100: one of five is held out
        "  products: 300 training rows of 80 questions, 20 held out",
    ]
    train, held_out = (rows(tmp_path / "gym" / f"{name}.jsonl") for name in ("train", "eval"))
    questions = [
        {row["metadata"]["entry"]["question"] for row in each} for each in (train, held_out)
    ]
    assert (len(train), len(held_out), len(questions[0]), len(questions[1])) == (400, 35, 180, 35)
    assert not questions[0] & questions[1]
    for row in train + held_out:
        system, user = row["prompt"]
        assert system == {"role": "system", "content": "Reply with the answer only."}
        assert user["content"] == row["metadata"]["entry"]["question"]
        assert reward.entry_score(row["metadata"], f"It is {row['label']}.") == 1.0
        assert reward.entry_score(row["metadata"], f"It is {row['label']}7.") < 1.0


def test_the_same_arguments_write_the_same_rows(tmp_path, capsys):
    command = ["--train", "6", "--held-out", "2", SUM]
    for name in ("a", "b"):
        assert prompts.main(["--out", str(tmp_path / name), *command]) == 0
    assert (tmp_path / "a/train.jsonl").read_bytes() == (tmp_path / "b/train.jsonl").read_bytes()
    assert prompts.main(["--out", str(tmp_path / "a"), *command]) == 0
    assert "is complete already" in capsys.readouterr().out
    assert prompts.main(["--out", str(tmp_path / "a"), *command, "--seed", "5"]) == 2
    assert "was written with other arguments" in capsys.readouterr().err
    assert (
        prompts.main(["--out", str(tmp_path / "b"), *command[:-1], f"{SUM}&allow_negation=true"])
        == 2
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert prompts.main(["--out", str(tmp_path / "mine"), *command]) == 2
    assert "is not prompts of ours" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "mine"]


def test_a_level_sets_the_fields_of_the_curriculum():
    assert prompts.parse_spec("chain_sum", level=2).config == {"max_terms": 4, "max_digits": 3}
    assert prompts.parse_spec("chain_sum?level=0&max_digits=2", level=2).config == {
        "max_terms": 2,
        "max_digits": 2,
    }
    assert prompts.parse_spec("chain_sum").config == {}
    operators = prompts.parse_spec('basic_arithmetic?operators=["+"]&weight=2&answer=word')
    assert (operators.config, operators.weight, operators.answer) == (
        {"operators": ["+"]},
        2.0,
        "word",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chainsum", "reasoning-gym has no dataset 'chainsum'; near is ['chain_sum'"),
        ("chain_sum?terms=2", "chain_sum has no field 'terms'; it has min_terms, max_terms"),
        (
            "chain_sum?max_terms=1",
            'chain_sum refuses {"max_terms": 1}: max_terms must be >= min_terms.',
        ),
        ("chain_sum?weight=0", "has weight 0, but must be a number above 0"),
    ],
    ids=["misspelt dataset", "unknown field", "value out of range", "weight 0"],
)
def test_specifications_that_are_refused(text, message):
    with pytest.raises(ValueError) as error:
        prompts.parse_spec(text)
    assert message in str(error.value)


def test_train_py_takes_the_prompts_and_the_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    make_checkpoint(tmp_path / "model", "llama", max_position_embeddings=512)
    assert (
        prompts.main(
            [
                "--out",
                str(tmp_path / "gym"),
                "--train",
                "4",
                "--held-out",
                "2",
                "--answer",
                "number",
                SUM,
            ]
        )
        == 0
    )
    flags = [
        *(
            "--hf-checkpoint",
            str(tmp_path / "model"),
            "--prompt-data",
            str(tmp_path / "gym/train.jsonl"),
        ),
        *(
            "--input-key",
            "prompt",
            "--label-key",
            "label",
            "--apply-chat-template",
            "--num-threads",
            "1",
        ),
        *("--custom-rm-path", "examples/reasoning_gym/reward.py:correct"),
        *("--eval-prompt-data", str(tmp_path / "gym/eval.jsonl")),
        *("--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4"),
        *("--rollout-max-response-len", "4", "--no-progress"),
    ]
    first, last = run_here(flags, tmp_path / "run")
    assert first["eval/accuracy"] in (0.0, 0.5, 1.0) and 0.0 <= last["rollout/raw_reward"] <= 1.0


def test_commands_that_the_pages_show_are_accepted(tmp_path, monkeypatch):
    page = (ROOT / "examples/reasoning_gym/README.md").read_text() + str(prompts.__doc__)
    commands = re.findall(
        r"^ *python -m examples\.reasoning_gym\.prompts (--out(?:.*\\\n)*.*)", page, re.M
    )
    assert len(commands) >= 2
    for number, command in enumerate(commands):
        monkeypatch.chdir(tmp_path)
        words = shlex.split(command.replace("\\\n", " "))
        assert prompts.main([*words, "--train", "8", "--held-out", "4", "--out", f"{number}"]) == 0
