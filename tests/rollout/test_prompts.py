"""Prompt files: what they become, what is refused, and the order they are visited in."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.prompts import PromptDataset, load_prompts
from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.evaluation import load_evaluation_prompts
from tests.checkpoints import CHAT_TEMPLATE, make_tokenizer

TOKENIZER = make_tokenizer()
BOS = 1


def write(path: Path, rows: list[Any]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(**options: Any) -> RolloutConfig:
    required: dict[str, Any] = {
        "prompt_data": "p",
        "rollout_batch_size": 2,
        "rollout_max_response_len": 4,
        "rm_type": "f1",
        "input_key": "prompt",
    }
    return RolloutConfig(**{**required, **options})


def load(path: Path | str, **options: Any) -> list[Prompt]:
    return load_prompts(path, TOKENIZER, **{"input_key": "prompt", "label_key": "label", **options})


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


ROWS = {
    "text": ({"prompt": "31>", "label": "13", "metadata": {"level": 2}}, "13", {"level": 2}),
    "number": ({"prompt": "31>", "label": 7}, 7, {}),
    "list": ({"prompt": "31>", "label": ["a"], "metadata": '{"n": []}'}, ["a"], {"n": []}),
}


@pytest.mark.parametrize(("row", "label", "metadata"), ROWS.values(), ids=ROWS)
def test_a_row_becomes_a_prompt(row, label, metadata, tmp_path):
    (prompt,) = load(write(tmp_path / "p.jsonl", [row]))
    assert prompt.text == "31>"
    assert prompt.label == label
    assert prompt.metadata == metadata


def test_prompts_are_numbered_in_the_order_of_the_file(tmp_path):
    rows = [{"prompt": "31>"}, {"prompt": "7>"}]
    prompts = load(write(tmp_path / "p.jsonl", rows), label_key=None)
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "31>"), (1, "7>")]


def test_without_a_label_key_prompts_have_no_label(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": "31>", "label": "13"}])
    assert load(path, label_key=None)[0].label is None


MESSAGES = [{"role": "system", "content": "sort"}, {"role": "user", "content": "31"}]


def test_the_chat_template_renders_texts_or_messages(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": "31"}, {"prompt": MESSAGES}])
    string, chat = load(path, label_key=None, apply_chat_template=True)
    assert string.text == "user:31.assistant:"
    assert chat.text == "system:sort.user:31.assistant:"
    assert string.token_ids == encode("user:31.assistant:")


@pytest.mark.parametrize(
    "adds_bos", [False, True], ids=["plain tokenizer", "tokenizer that adds BOS"]
)
@pytest.mark.parametrize("apply_chat_template", [False, True], ids=["text", "chat template"])
def test_no_special_token_is_added(tmp_path, adds_bos, apply_chat_template):
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    path = write(tmp_path / "p.jsonl", [{"prompt": "31>"}, {"prompt": "<bos>7>"}])
    prompts = load_prompts(
        path, tokenizer, input_key="prompt", apply_chat_template=apply_chat_template
    )
    # the line of slime's sglang_rollout.py, and of generate functions that were written for slime
    assert [prompt.token_ids for prompt in prompts] == [encode(prompt.text) for prompt in prompts]
    assert [prompt.token_ids.count(BOS) for prompt in prompts] == [0, 1]


CALLS = "{{ bos_token }}" + CHAT_TEMPLATE
BOS_WARNINGS = {
    "two in a text": (["<bos><bos>1"], {}, "contain the start token '<bos>' twice"),
    "one in a text": (["<bos>1"], {}, None),
    "template and file": (
        ["<bos>1"],
        {"chat_template": CALLS},
        "the chat template renders it, and so does the file",
    ),
    "template and later message": (
        [[{"role": "user", "content": "1"}, {"role": "user", "content": "<bos>2"}]],
        {"chat_template": CALLS},
        "twice",
    ),
    "template": (["1"], {"chat_template": CALLS}, None),
    "file under a template without BOS": (["<bos>1"], {"chat_template": CHAT_TEMPLATE}, None),
    "missing": (["1", "<bos>2"], {"adds_bos": True}, "1 of 2 prompts of"),
    "not missing": (["<bos>1"], {"adds_bos": True}, None),
}


@pytest.mark.parametrize(("values", "options", "message"), BOS_WARNINGS.values(), ids=BOS_WARNINGS)
def test_a_doubled_or_missing_bos_warns(tmp_path, caplog, values, options, message):
    tokenizer = make_tokenizer(adds_bos=options.get("adds_bos", False))
    tokenizer.chat_template = options.get("chat_template")
    path = write(tmp_path / "p.jsonl", [{"prompt": value} for value in values])
    is_rendered = "chat_template" in options
    load_prompts(path, tokenizer, input_key="prompt", apply_chat_template=is_rendered)
    assert len(caplog.messages) == (message is not None)
    assert message is None or message in caplog.messages[0]


def test_evaluation_prompts_warn_too(tmp_path, caplog):
    train = write(tmp_path / "train.jsonl", [{"prompt": "<bos>1"}])
    held_out = write(tmp_path / "eval.jsonl", [{"prompt": "<bos><bos>1"}])
    load_evaluation_prompts(
        make_config(prompt_data=str(train), eval_prompt_data=(str(held_out),)), TOKENIZER
    )
    assert f"1 of 1 prompts of {held_out} contain the start token '<bos>' twice" in caplog.text


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}" + CHAT_TEMPLATE
)


def load_with_tools(tmp_path: Path, row: dict[str, Any], **options: Any) -> Prompt:
    """The prompt of a row, with a chat template that renders the names of tools."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = WITH_TOOLS
    path = write(tmp_path / "p.jsonl", [{"prompt": "1", **row}])
    options = {"input_key": "prompt", "apply_chat_template": True, **options}
    return load_prompts(path, tokenizer, **options)[0]


TOOL_COLUMNS = {
    "a list": ({"tools": [TOOL]}, {}, "[add]"),
    "JSON text": ({"tools": json.dumps([TOOL])}, {}, "[add]"),
    "another key": ({"functions": [TOOL]}, {"tool_key": "functions"}, "[add]"),
    "null": ({"tools": None}, {}, ""),
    "no column": ({}, {}, ""),
    "an empty list": ({"tools": []}, {}, ""),
    "no key": ({"tools": [TOOL]}, {"tool_key": None}, ""),
}


@pytest.mark.parametrize(("row", "options", "text"), TOOL_COLUMNS.values(), ids=TOOL_COLUMNS)
def test_tools_reach_the_chat_template(tmp_path, row, options, text):
    assert load_with_tools(tmp_path, row, **options).text == f"{text}user:1.assistant:"


@pytest.mark.parametrize("column", [[TOOL], json.dumps([TOOL])], ids=["a list", "JSON text"])
@pytest.mark.parametrize("apply_chat_template", [True, False], ids=["template", "text"])
def test_metadata_has_the_tools_as_slime_gives_them(tmp_path, column, apply_chat_template):
    prompt = load_with_tools(tmp_path, {"tools": column}, apply_chat_template=apply_chat_template)
    assert prompt.metadata == {"tools": [TOOL]}


BAD_TOOLS = {
    "no JSON": "[{",
    "a word": "add",
    "an object": TOOL,
    "a list of words": ["add"],
    "a number": 3,
}


@pytest.mark.parametrize("column", BAD_TOOLS.values(), ids=BAD_TOOLS)
def test_malformed_tools_are_refused(tmp_path, column):
    message = r"p\.jsonl, line 1 has 'tools' that is not a list of tools"
    with pytest.raises(ValueError, match=message):
        load_with_tools(tmp_path, {"tools": column})


def test_the_first_bad_row_of_a_file_is_reported(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = WITH_TOOLS
    path = write(tmp_path / "p.jsonl", [{"label": "no prompt"}, {"prompt": "1", "tools": 3}])
    with pytest.raises(ValueError, match=r"p\.jsonl, line 1 has no key 'prompt'"):
        load_prompts(path, tokenizer, input_key="prompt", apply_chat_template=True)


@pytest.mark.parametrize("column", BAD_TOOLS.values(), ids=BAD_TOOLS)
def test_without_a_template_tools_are_metadata(tmp_path, column):
    prompt = load_with_tools(tmp_path, {"tools": column}, apply_chat_template=False)
    assert prompt.metadata == {"tools": column}


def test_evaluation_prompts_have_their_own_tool_key(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = WITH_TOOLS
    path = write(tmp_path / "eval.jsonl", [{"prompt": "1", "functions": [TOOL]}])
    config = make_config(
        apply_chat_template=True, eval_prompt_data=(str(path),), eval_tool_key="functions"
    )
    assert load_evaluation_prompts(config, tokenizer)["accuracy"][0].text.startswith("[add]")


@pytest.mark.parametrize(
    ("variables", "text"),
    [('{"enable_thinking": true}', "user:1.assistant:"), (None, "user:1.assistant:no")],
    ids=["given", "none"],
)
def test_variables_reach_the_chat_template(tmp_path, variables, text):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE + "{% if not enable_thinking %}no{% endif %}"
    path = write(tmp_path / "p.jsonl", [{"prompt": "1"}])
    config = make_config(apply_chat_template=True, apply_chat_template_kwargs=variables)
    assert PromptDataset(path, tokenizer, config).prompts[0].text == text


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "1", '{"tokenize": true}', '{"tools": []}', "{'a': 1}"]
)
def test_wrong_variables_are_refused(text):
    with pytest.raises(ValueError, match=r"--apply-chat-template-kwargs (is .* but must be|sets)"):
        make_config(apply_chat_template=True, apply_chat_template_kwargs=text)


SLICES = {
    "[0:2]": "01",
    "[:2]": "01",
    "[3:]": "34",
    "[-2:]": "34",
    "[:-4]": "0",
    "[1:-1]": "123",
    "[:]": "01234",
    "[2:99]": "234",
}


@pytest.mark.parametrize(("rows", "expected"), SLICES.items(), ids=SLICES)
def test_rows_of_a_file_are_chosen_as_in_slime(digits, rows, expected):
    assert "".join(prompt.text for prompt in load(f"{digits}@{rows}", label_key=None)) == expected


@pytest.mark.parametrize("rows", ["[9:]", "[2:2]", "[3:1]"])
def test_a_slice_without_rows_is_refused(digits, rows):
    with pytest.raises(ValueError, match="has no such rows"):
        load(f"{digits}@{rows}", label_key=None)


CHAT = {"apply_chat_template": True, "label_key": None}


BAD = {
    "blank lines": ("\n\n", {}, "is empty"),
    "cut JSON": (
        '{"prompt": "1", "label": "1"}\n{"prompt": }\n',
        {},
        "line 2 is not JSON: Expecting value",
    ),
    "no prompt": ('{"input": "1"}\n', {}, "line 1 has no key 'prompt'; its keys are 'input'"),
    "no label": ('{"prompt": "1"}\n', {}, "line 1 has no key 'label'"),
    "messages without a template": (
        '{"prompt": [], "label": "1"}\n',
        {},
        "line 1 has a prompt of type list",
    ),
    "all too long": (
        '{"prompt": "12345", "label": "1"}\n',
        {"max_prompt_len": 3},
        "are longer; raise it",
    ),
    "another template": (
        '{"prompt": "1"}\n{"prompt": [{"role": "user"}]}\n',
        CHAT,
        "line 2 does not fit the chat",
    ),
}


@pytest.mark.parametrize(("content", "options", "message"), BAD.values(), ids=BAD)
def test_bad_files_are_refused_in_one_message(tmp_path, content, options, message):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ValueError) as refusal:
        load(tmp_path / "p.jsonl", **options)
    assert message in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl' does not exist"):
        load(tmp_path / "none.jsonl")


def test_a_missing_template_is_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    path = write(tmp_path / "p.jsonl", [{"prompt": "1"}])
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        load_prompts(path, tokenizer, input_key="prompt", apply_chat_template=True)


@pytest.fixture
def long_prompts(tmp_path: Path) -> Path:
    """Three prompts of 6, 3 and 5 tokens."""
    rows = [{"prompt": "123456"}, {"prompt": "123"}, {"prompt": "12345"}]
    return write(tmp_path / "p.jsonl", rows)


def test_long_prompts_are_omitted(long_prompts):
    prompts = load(long_prompts, label_key=None, max_prompt_len=4)
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(1, "123")]


def test_omitted_prompts_are_counted(long_prompts, caplog):
    with caplog.at_level(logging.WARNING):
        load(long_prompts, label_key=None, max_prompt_len=4)
    assert caplog.messages == [
        f"2 of 3 prompts of {long_prompts} are longer than --rollout-max-prompt-len 4 and are"
        " omitted."
    ]


def test_parquet_rows_become_prompts(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "p.parquet"
    rows = [{"prompt": "31>", "label": "13"}, {"prompt": "7>", "label": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [(p.text, p.label) for p in load(path)] == [("31>", "13"), ("7>", None)]


def test_parquet_without_pyarrow_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "p.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError) as refusal:
        load(path)
    assert (
        str(refusal.value)
        == f"'{path}' is parquet, which needs pyarrow; install it with: pip install"
        " 'slime_tis[parquet]'."
    )


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Prompts 0 to 4."""
    return write(tmp_path / "digits.jsonl", [{"prompt": str(digit)} for digit in range(5)])


def texts(dataset: PromptDataset, *sizes: int) -> list[str]:
    """The prompts of batches of these sizes, joined."""
    return ["".join(prompt.text for prompt in dataset.next_batch(size)) for size in sizes]


def shuffled(path: Path, seed: int) -> PromptDataset:
    config = make_config(rollout_shuffle=True, rollout_seed=seed)
    return PromptDataset(path, TOKENIZER, config)


def test_batches_follow_the_file(digits):
    dataset = PromptDataset(digits, TOKENIZER, make_config())
    assert texts(dataset, 2, 2, 2, 5, 12) == ["01", "23", "40", "12340", "123401234012"]


def test_the_state_has_the_position_in_the_epoch(digits):
    dataset = PromptDataset(digits, TOKENIZER, make_config())
    dataset.next_batch(23)
    state = dataset.state_dict()
    assert (state["epoch"], state["position"]) == (4, 3)
    assert len(state["prompts"]) == 64  # hexadecimal digits of a SHA-256


def test_each_epoch_has_another_order(digits):
    epochs = texts(shuffled(digits, seed=1), 5, 5, 5, 5)
    assert all(sorted(epoch) == list("01234") for epoch in epochs)
    assert len(set(epochs)) > 1


def test_the_order_does_not_depend_on_the_batch_size(digits):
    orders = ["".join(texts(shuffled(digits, seed=1), *sizes)) for sizes in ([20], [3, 7, 10])]
    assert orders[0] == orders[1]


def test_the_order_depends_on_the_seed(digits):
    assert texts(shuffled(digits, seed=2), 20) != texts(shuffled(digits, seed=1), 20)


def test_a_resumed_dataset_continues_at_its_position(digits):
    dataset = shuffled(digits, seed=0)
    dataset.next_batch(8)
    resumed = shuffled(digits, seed=0)
    resumed.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert texts(dataset, 4, 4) == texts(resumed, 4, 4)


def test_a_position_beyond_the_prompts_is_refused(digits):
    dataset = shuffled(digits, seed=0)
    state = {**dataset.state_dict(), "position": 9}
    with pytest.raises(ValueError, match="which is not a place in --prompt-data"):
        dataset.load_state_dict(state)


@pytest.mark.parametrize("order", ["10234", "012340"], ids=["swapped", "longer"])
def test_changed_prompts_are_refused(digits, order, tmp_path):
    state = PromptDataset(digits, TOKENIZER, make_config()).state_dict()
    changed = write(tmp_path / "changed.jsonl", [{"prompt": digit} for digit in order])
    dataset = PromptDataset(changed, TOKENIZER, make_config())
    with pytest.raises(ValueError, match="have changed since the start of the run"):
        dataset.load_state_dict(state)


def test_the_same_prompts_in_another_file_are_accepted(digits, tmp_path):
    dataset = PromptDataset(digits, TOKENIZER, make_config())
    dataset.next_batch(2)
    (tmp_path / "moved.jsonl").write_text(digits.read_text())
    moved = PromptDataset(tmp_path / "moved.jsonl", TOKENIZER, make_config())
    moved.load_state_dict(dataset.state_dict())
    assert texts(moved, 3) == ["234"]
