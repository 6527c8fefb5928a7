"""docs/dumps.md, and the table of tokens: columns, parts of it, and random parts."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.readers import read
from slime_tis.analysis.dumps.table import (
    SAMPLE_COLUMNS,
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
    SampleParts,
    TokenTable,
)
from slime_tis.analysis.report.report_inputs import open_source
from slime_tis.main import main
from slime_tis.trainer.configs.loop import LoopConfig
from tests.dumps.tables import assert_same, full_table
from tests.test_docs import DOCS, blocks


def test_the_page_lists_the_columns_with_their_types():
    rows = re.findall(
        r"^\| `(\w+)` \| (token|sample) \| ([\w ]+) \|", (DOCS / "dumps.md").read_text(), re.M
    )
    tokens = {name: kind for name, per, kind in rows if per == "token"}
    assert tokens == {name: dtype.__name__ for name, dtype in TOKEN_COLUMNS.items()}
    samples = {name: kind for name, per, kind in rows if per == "sample"}
    numbers = {name: dtype.__name__ for name, dtype in SAMPLE_COLUMNS.items()}
    assert samples == numbers | {"prompt": "list of int32"} | dict.fromkeys(TEXT_COLUMNS, "string")


@pytest.mark.parametrize("index", [0, -1], ids=["reading", "what if"])
def test_the_examples_run(tmp_path, monkeypatch, capsys, index):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs/a/dump/train_data/0_0.parquet", full_table())
    exec(compile(blocks("dumps.md", "python")[index], "docs/dumps.md", "exec"), {})
    printed = capsys.readouterr().out
    assert ("3 samples, 5 tokens" if index == 0 else "--rollout-correction-preset pg_is") in printed


def test_the_verl_patch_writes_readable_generations(tmp_path):
    """verl 0.9.1's call: reward lists and a padded batch become a row per sample."""

    class Trainer:
        def _log_rollout_data(self, batch, reward_extra_infos_dict, timing_raw, rollout_data_dir):
            lists = {
                "input": ["p", "q"],
                "output": ["a", "b"],
                "gts": [None] * 2,
                "score": [1.0, 0.0],
                "step": [9] * 2,
            }
            columns = lists | {
                name: values for name, values in reward_extra_infos_dict.items() if len(values) == 2
            }
            rows = [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
            (rollout_data_dir / "9.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )

    names = {}
    (code,) = [
        block for block in blocks("dumps.md", "python") if block.startswith("# verl_dumps.py")
    ]
    exec(compile(code, "verl_dumps.py", "exec"), names)
    names["patch"](Trainer)
    batch = SimpleNamespace(
        batch={
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
            "responses": torch.tensor([[5, 6, 0], [7, 8, 9]]),
            "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1]]),
            "old_log_probs": torch.tensor([[-1.0, -0.5, 0.0], [-1.0, 0.0, -2.0]]),
            "rollout_log_probs": torch.tensor(
                [[-1.5, -0.5, 0.0], [-1.0, 0.0, -2.5]], dtype=torch.bfloat16
            ),
        }
    )
    Trainer()._log_rollout_data(batch, {"acc": [1, 0]}, {}, tmp_path)
    table = read(tmp_path)
    assert table.response_length.tolist() == [2, 3] and table.token.tolist() == [5, 6, 7, 8, 9]
    assert table.log_ratio.tolist() == [0.5, 0.0, 0.0, 0.0, 0.5] and table.loss_mask.tolist() == [
        1,
        1,
        1,
        0,
        1,
    ]


def test_the_documented_writer_writes_a_readable_dump(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in blocks("dumps.md", "python") if "import write" in block]
    exec(compile(code, "docs/dumps.md", "exec"), {})
    source = open_source("my_step_7.parquet")
    assert source.table.reward.tolist() == [1.0]
    assert source.table.metadata["old_policy"] == "recomputed"
    assert source.note == ""


def test_a_dump_without_weight_versions_gets_a_note(tmp_path, capsys):
    (row,) = blocks("dumps.md", "json")
    (tmp_path / "own.jsonl").write_text(row)
    assert main(["diagnose", str(tmp_path / "own.jsonl")]) == 0
    assert "staleness cannot be seen" in capsys.readouterr().out


def test_dump_details_expands_to_the_documented_patterns():
    loop = LoopConfig(num_rollout=2, dump_details="DIR").with_dump_patterns()
    page = (DOCS / "dumps.md").read_text()
    assert f"`{loop.save_debug_train_data}`" in page
    assert f"`--save-debug-rollout-data {loop.save_debug_rollout_data}`" in page
    assert loop.with_dump_patterns() == loop


def test_replayed_rollouts_are_not_dumped_again():
    loop = LoopConfig(num_rollout=2, dump_details="D", load_debug_rollout_data="x")
    replayed = loop.with_dump_patterns()
    assert replayed.save_debug_rollout_data is None
    assert replayed.save_debug_train_data is not None


def test_braces_in_the_directory_of_dumps_are_kept():
    loop = LoopConfig(num_rollout=1, dump_details="a{b}").with_dump_patterns()
    path = loop.save_debug_train_data.format(rollout_id=0, rank=0)
    assert path == "a{b}/train_data/0_0.parquet"


BAD_PATTERNS = {
    "field": ({"save_debug_train_data": "d/{x}"}, "no field besides {rollout_id} and {rank}"),
    "one file": ({"save_debug_train_data": "d/{rank}"}, "one file for all rollouts"),
    "same file": (
        {"save_debug_train_data": "{rollout_id}", "save_debug_rollout_data": "{rollout_id}"},
        "are both",
    ),
    "no training": (
        {"save_debug_train_data": "{rollout_id}", "debug_rollout_only": True},
        "does not train",
    ),
    "no effect": (
        {
            "dump_details": "d",
            "save_debug_train_data": "a{rollout_id}",
            "save_debug_rollout_data": "b{rollout_id}",
        },
        "--dump-details has no effect",
    ),
}


@pytest.mark.parametrize(("options", "message"), BAD_PATTERNS.values(), ids=BAD_PATTERNS)
def test_bad_patterns_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LoopConfig(num_rollout=2, **options).with_dump_patterns()


DERIVED = {
    "offsets": [0, 3, 3, 5],
    "response_length": [3, 0, 2],
    "sample": [0, 0, 0, 2, 2],
    "position": [0, 1, 2, 0, 1],
    "valid": [True, False, True, True, True],
}


@pytest.mark.parametrize(("name", "values"), DERIVED.items(), ids=DERIVED)
def test_derived_columns(name, values):
    assert getattr(full_table(), name).tolist() == values


def test_the_size_of_a_table():
    table = full_table()
    assert (len(table), table.tokens) == (3, 5)


def test_prompts_are_token_ids_of_each_sample():
    assert [prompt.tolist() for prompt in full_table().prompt] == [[1, 2], [], [3]]


def test_log_ratios_use_the_old_policy_of_the_metadata():
    table = full_table()
    # of the recomputed old log-probs
    assert table.log_ratio.tolist() == [0.5, 0.0, -0.25, 0.0, 0.25]
    bypass = replace(table, metadata={"old_policy": "rollout"})
    # of the current policy
    assert bypass.log_ratio.tolist() == [0.5, 0.0, -0.5, 0.0, 0.25]


def test_required_columns_of_a_sample_without_them():
    table = full_table()
    assert table.old_log_prob.tolist()[3:] == [-0.5, -0.25]  # the training log-probs
    assert table.loss_mask.tolist() == [1, 0, 1, 1, 1]


def test_optional_columns_of_a_sample_without_them():
    table = full_table()
    assert table.rejected.tolist() == [0, 0, 2, 0, 0]
    assert table.weight_version.tolist() == [4, 4, 5, -1, -1]
    assert np.isnan([*table.entropy[3:], table.reward[2]]).all()
    assert table.experts[3:].tolist() == [[[-1, -1], [-1, -1]]] * 2


def test_a_sample_without_text_has_an_empty_one():
    assert full_table().text == ("<b>é", "", "two")


def test_selected_samples_join_to_the_same_table():
    table = full_table()
    assert_same(TokenTable.concatenate([table.select([i]) for i in range(3)]), table)


def test_samples_are_selected_in_any_order():
    turned = full_table().select([2, 0])
    assert turned.sample_index.tolist() == [2, 0]
    assert turned.token.tolist() == [8, 9, 5, 6, 7]
    assert [prompt.tolist() for prompt in turned.prompt] == [[3], [1, 2]]
    assert turned.text == ("two", "<b>é")


def test_selected_prompts_do_not_keep_the_others_in_memory():
    table = full_table()
    (prompt,) = table.select([2]).prompt
    assert not any(np.shares_memory(prompt, other) for other in table.prompt)


def test_different_metadata_is_dropped():
    table = full_table()
    other = replace(table, metadata={**table.metadata, "temperature": 0.5})
    assert "temperature" not in TokenTable.concatenate([table, other]).metadata


def test_tables_with_different_criteria_are_not_joined():
    table = full_table()
    other = replace(table, metadata={"criteria": ["geometric"]})
    with pytest.raises(ValueError, match="different rejection criteria"):
        TokenTable.concatenate([table, other])


def test_columns_of_a_sample_have_one_length():
    parts = [SampleParts(train_log_prob=[-1.0, -1.0], rollout_log_prob=[-1.0])]
    with pytest.raises(ValueError, match="sample 0 has 2 entries of train_log_prob"):
        TokenTable.from_parts(parts)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 40))
def test_a_random_part_has_complete_samples_in_order(lengths, max_tokens):
    parts = [
        SampleParts(train_log_prob=[-1.0] * n, rollout_log_prob=[-1.0] * n, sample_index=i)
        for i, n in enumerate(lengths)
    ]
    table = TokenTable.from_parts(parts)
    part = table.sampled(max_tokens)
    if table.tokens <= max_tokens:
        assert part is table
        return
    assert part.tokens <= max_tokens
    assert part.metadata["sampled"] == {"samples": len(lengths), "tokens": sum(lengths)}
    indices = [] if part.sample_index is None else part.sample_index.tolist()
    assert indices == sorted(indices)
    assert part.response_length.tolist() == [lengths[i] for i in indices]
