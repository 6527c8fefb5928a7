"""docs/dumps.md: its columns are those of the table, its commands are accepted and its examples run."""

import json
import re

import pytest

from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.json_rows import format_of
from slime_tis.analysis.dumps.table import SAMPLE_COLUMNS, TEXT_COLUMNS, TOKEN_COLUMNS
from slime_tis.trainer.cli.arguments import LoopConfig
from tests.dumps.tables import full_table
from tests.test_docs import DOCS, blocks


def test_the_page_lists_the_columns_and_their_types():
    rows = re.findall(r"^\| `(\w+)` \| (token|sample) \| ([\w ]+) \|", (DOCS / "dumps.md").read_text(), re.M)
    tokens = {name: kind for name, per, kind in rows if per == "token"}
    assert tokens == {name: dtype.__name__ for name, dtype in TOKEN_COLUMNS.items()}
    samples = {name: kind for name, per, kind in rows if per == "sample"}
    numbers = {name: dtype.__name__ for name, dtype in SAMPLE_COLUMNS.items()}
    assert samples == numbers | {"prompt": "list of int32"} | dict.fromkeys(TEXT_COLUMNS, "string")


@pytest.mark.parametrize("index", [0, 1], ids=["reading", "what if"])
def test_the_examples_run(tmp_path, monkeypatch, capsys, index):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs/a/dump/train_data/0_0.parquet", full_table())
    exec(compile(blocks("dumps.md", "python")[index], "docs/dumps.md", "exec"), {})
    printed = capsys.readouterr().out
    assert ("3 samples, 5 tokens" if index == 0 else "--rollout-correction-preset pg_is") in printed


def test_the_row_of_ones_own_is_recognised():
    (row,) = blocks("dumps.md", "json")
    assert format_of(json.loads(row)).source == "plain"


def test_dump_details_means_the_patterns_of_the_page():
    loop = LoopConfig(num_rollout=2, dump_details="DIR").with_dump_patterns()
    page = (DOCS / "dumps.md").read_text()
    assert f"`{loop.save_debug_train_data}`" in page
    assert f"`--save-debug-rollout-data {loop.save_debug_rollout_data}`" in page
    assert loop.with_dump_patterns() == loop
    replayed = LoopConfig(num_rollout=2, dump_details="D", load_debug_rollout_data="x").with_dump_patterns()
    assert replayed.save_debug_rollout_data is None and replayed.save_debug_train_data is not None
    braces = LoopConfig(num_rollout=1, dump_details="a{b}").with_dump_patterns()
    assert braces.save_debug_train_data.format(rollout_id=0, rank=0) == "a{b}/train_data/0_0.parquet"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"save_debug_train_data": "d/{x}"}, "no field besides {rollout_id} and {rank}", id="field"),
        pytest.param({"save_debug_train_data": "d/{rank}"}, "one file for all rollouts", id="one file"),
        pytest.param(
            {"save_debug_train_data": "{rollout_id}", "save_debug_rollout_data": "{rollout_id}"},
            "are both '{rollout_id}'; give each a file of its own",
            id="same file",
        ),
        pytest.param(
            {"save_debug_train_data": "{rollout_id}", "debug_rollout_only": True}, "does not train", id="no training"
        ),
        pytest.param(
            {"dump_details": "d", "save_debug_train_data": "a{rollout_id}", "save_debug_rollout_data": "b{rollout_id}"},
            "--dump-details is 'd' but --save-debug-rollout-data and --save-debug-train-data say",
            id="no effect",
        ),
    ],
)
def test_patterns_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LoopConfig(num_rollout=2, **options).with_dump_patterns()
