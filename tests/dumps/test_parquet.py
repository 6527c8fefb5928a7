"""Tables in parquet files."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from slime_tis.analysis.dumps import files as own
from slime_tis.analysis.dumps.files import is_own_parquet, parquet_tables, write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from tests.dumps.tables import assert_same, full_table


def test_a_table_survives_the_round_trip_in_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "ROW_GROUP_BYTES", 2 * (full_table().nbytes // 5))  # two of its five tokens
    path = tmp_path / "new" / "dump.parquet"
    write(path, full_table())
    monkeypatch.undo()
    tables = list(parquet_tables(path))
    assert len(tables) == 2 and is_own_parquet(path)
    assert_same(TokenTable.concatenate(tables), full_table())
    assert [file.name for file in path.parent.iterdir()] == ["dump.parquet"]


def test_a_large_row_group_is_read_in_parts(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", full_table())
    assert parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    monkeypatch.setattr(own, "ROW_GROUP_BYTES", 100)
    tables = list(parquet_tables(tmp_path / "a.parquet"))
    assert [len(table) for table in tables] == [1, 1, 1]
    assert_same(TokenTable.concatenate(tables), full_table())


def test_one_row_per_sample_with_lists_of_its_tokens(tmp_path):
    write(tmp_path / "a.parquet", full_table())
    rows = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["token"] for row in rows] == [[5, 6, 7], [], [8, 9]]
    assert rows[0]["prompt"] == [1, 2] and rows[0]["experts"] == list(range(12)) and rows[2]["truncated"] == 1


def test_columns_without_values_are_skipped(tmp_path):
    table = TokenTable.from_parts([SampleParts(train_log_prob=[-1.0], rollout_log_prob=[-2.0])])
    write(tmp_path / "a.parquet", table)
    names = parquet.read_schema(tmp_path / "a.parquet").names
    assert names == ["train_log_prob", "old_log_prob", "rollout_log_prob", "loss_mask"]
    assert_same(TokenTable.concatenate(list(parquet_tables(tmp_path / "a.parquet"))), table)


def test_a_table_without_samples_is_a_file(tmp_path):
    write(tmp_path / "a.parquet", TokenTable.from_parts([]))
    assert TokenTable.concatenate(list(parquet_tables(tmp_path / "a.parquet"))).tokens == 0


def test_text_that_is_not_unicode_is_written(tmp_path):
    part = SampleParts(train_log_prob=[-1.0], rollout_log_prob=[-2.0], text="a\ud800b")
    write(tmp_path / "a.parquet", TokenTable.from_parts([part]))
    assert next(parquet_tables(tmp_path / "a.parquet")).text == ("a?b",)


def _with_description(described):
    return lambda table: table.replace_schema_metadata({own.KEY: json.dumps(described)})


def _with_column(name, values):
    return lambda table: table.set_column(table.column_names.index(name), name, pa.array(values))


DESCRIBED = {"schema_version": 1, "metadata": {}, "experts_shape": [2, 2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(_with_description({"schema_version": 9}), "schema version 9", id="later version"),
        pytest.param(_with_description([]), "damaged metadata", id="damaged metadata"),
        pytest.param(lambda table: table.drop(["train_log_prob"]), "no column train_log_prob", id="no log-probs"),
        pytest.param(lambda table: table.append_column("token", table["token"]), "2 times", id="two columns"),
        pytest.param(_with_description(DESCRIBED | {"experts_shape": [2**70, 1]}), "damaged metadata", id="experts"),
        pytest.param(lambda t: t.replace_schema_metadata({own.KEY: "[" * 10**5}), "damaged metadata", id="nested"),
        *(
            pytest.param(_with_column(name, values), "cannot be read|must be|null values", id=f"{name} {i}")
            for name in ("token", "prompt", "experts", "reward", "step", "text", "rollout_log_prob")
            for i, values in enumerate((["a", "b", "c"], [{"a": 1}] * 3, [[[1]]] * 3, [None] * 3, [2**62] * 3))
            if (name, i) not in {("reward", 3), ("text", 0), ("text", 3), ("reward", 4)}
        ),
        pytest.param(
            lambda table: table.set_column(
                table.column_names.index("token"), "token", pa.array([[1], [], [2]], pa.large_list(pa.int32()))
            ),
            "token and rollout_log_prob differ in length",
            id="lengths",
        ),
    ],
)
def test_a_damaged_schema_is_refused(tmp_path, change, message):
    path = tmp_path / "a.parquet"
    write(path, full_table())
    parquet.write_table(change(parquet.read_table(path)), path)
    with pytest.raises(ValueError, match=message):
        list(parquet_tables(path))
