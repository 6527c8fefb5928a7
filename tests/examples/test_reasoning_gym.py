"""reasoning-gym as prompts and reward: scores, disjoint rows, levels, and no code run."""

import ast
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, run_here

reasoning_gym = pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")


from examples.reasoning_gym import prompts, reward  # noqa: E402
from tests.checkpoints import make_checkpoint  # noqa: E402

SUM = "chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
PRODUCT = "products?min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def read_rows(path: Path) -> list[dict[str, Any]]:
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
    """Calls that run text are in refused datasets, or run text that the package generated."""
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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory of 400 training rows and at most 60 held-out ones, and the report."""
    directory = tmp_path_factory.mktemp("prompts") / "gym"
    specs = [prompts.parse_spec(text, answer="number") for text in (SUM, f"{PRODUCT}&weight=3")]
    return directory, prompts.write(directory, specs, 400, 60)


@pytest.fixture(scope="module")
def training_rows(written: tuple[Path, str]) -> list[dict[str, Any]]:
    return read_rows(written[0] / "train.jsonl")


@pytest.fixture(scope="module")
def held_out_rows(written: tuple[Path, str]) -> list[dict[str, Any]]:
    return read_rows(written[0] / "eval.jsonl")


def question(row: dict[str, Any]) -> str:
    """The question that a row asks."""
    return str(row["metadata"]["entry"]["question"])


def test_one_of_five_questions_is_held_out(written):
    assert written[1].splitlines()[1:] == [
        "  chain_sum: 100 training rows of 100 questions, 15 held out",
        # there are only 100 products
        "  products: 300 training rows of 80 questions, 20 held out",
    ]


def test_the_files_have_the_reported_rows(training_rows, held_out_rows):
    assert len(training_rows) == 400
    assert len({question(row) for row in training_rows}) == 180
    assert len(held_out_rows) == len({question(row) for row in held_out_rows}) == 35


def test_no_training_question_is_held_out(training_rows, held_out_rows):
    trained = {question(row) for row in training_rows}
    assert not trained & {question(row) for row in held_out_rows}


def test_a_row_asks_for_the_answer_only(training_rows, held_out_rows):
    for row in training_rows + held_out_rows:
        system, user = row["prompt"]
        assert system == {"role": "system", "content": "Reply with the answer only."}
        assert user["content"] == question(row)


def test_the_label_of_a_row_scores_1(training_rows, held_out_rows):
    for row in training_rows + held_out_rows:
        assert reward.entry_score(row["metadata"], f"It is {row['label']}.") == 1.0
        assert reward.entry_score(row["metadata"], f"It is {row['label']}7.") < 1.0


COMMAND = ["--train", "6", "--held-out", "2", SUM]


def test_the_same_arguments_write_the_same_rows(tmp_path):
    for name in ("a", "b"):
        assert prompts.main(["--out", str(tmp_path / name), *COMMAND]) == 0
    assert (tmp_path / "a/train.jsonl").read_bytes() == (tmp_path / "b/train.jsonl").read_bytes()


def test_prompts_are_not_written_twice(tmp_path, capsys):
    command = ["--out", str(tmp_path / "a"), *COMMAND]
    assert prompts.main(command) == 0
    assert prompts.main(command) == 0
    assert "is complete already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [[*COMMAND, "--seed", "5"], [*COMMAND[:-1], f"{SUM}&allow_negation=true"]],
    ids=["seed", "specification"],
)
def test_other_arguments_do_not_replace_prompts(tmp_path, capsys, change):
    assert prompts.main(["--out", str(tmp_path / "a"), *COMMAND]) == 0
    assert prompts.main(["--out", str(tmp_path / "a"), *change]) == 2
    assert "was written with other arguments" in capsys.readouterr().err


def test_a_directory_of_the_user_is_not_replaced(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert prompts.main(["--out", str(tmp_path / "mine"), *COMMAND]) == 2
    assert "is not prompts of ours" in capsys.readouterr().err
    assert list(tmp_path.rglob("*.*")) == [tmp_path / "mine" / "notes.txt"]


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


@pytest.fixture
def rows_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The metrics of a run of train.py on the prompts, with the reward of the example."""
    monkeypatch.chdir(ROOT)
    make_checkpoint(tmp_path / "model", "llama", max_position_embeddings=512)
    options = f"--out {tmp_path}/gym --train 4 --held-out 2 --answer number"
    assert prompts.main([*options.split(), SUM]) == 0
    flags = f"""
        --hf-checkpoint {tmp_path}/model
        --prompt-data {tmp_path}/gym/train.jsonl
        --input-key prompt
        --label-key label
        --apply-chat-template
        --num-threads 1
        --custom-rm-path examples/reasoning_gym/reward.py:correct
        --eval-prompt-data {tmp_path}/gym/eval.jsonl
        --num-rollout 1
        --rollout-batch-size 2
        --n-samples-per-prompt 4
        --rollout-max-response-len 4
        --no-progress
    """
    return run_here(flags.split(), tmp_path / "run")


def test_a_run_is_scored_by_the_example(rows_of_a_run):
    first, last = rows_of_a_run
    # two held-out questions
    assert first["eval/accuracy"] in (0.0, 0.5, 1.0)
    assert 0.0 <= last["rollout/raw_reward"] <= 1.0


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
