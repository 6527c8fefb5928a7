"""Dumps of every framework are read into one table, which parquet files keep."""

import json
import math
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from slime_tis.analysis.dumps import files as own
from slime_tis.analysis.dumps.files import is_own_parquet, parquet_tables, write
from slime_tis.analysis.dumps.readers import files_of, read
from slime_tis.analysis.dumps.table import SampleParts, TokenTable, cast
from tests.dumps.tables import assert_same, full_table


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def slime_sample(**changes):
    """A sample of slime's format_version 2: two prompt tokens and three of the response."""
    return {
        "data_parallel_rank": 0,
        "sample_index": 7,
        "rollout_position": 0,
        "tokens": torch.tensor([1, 2, 5, 6, 7]),
        "total_lengths": 5,
        "response_lengths": 3,
        "loss_masks": torch.tensor([1, 0, 1], dtype=torch.int32),
        "rollout_log_probs": torch.tensor([-1.5, 0.0, -2.0]),
        "log_probs": torch.tensor([-1.0, -0.5, -2.25]),
        "advantages": torch.tensor([0.5, 0.5, 0.5]),
        "rewards": 1.0,
        "truncated": 1,
        "rollout_ids": 3,
    } | changes


def assert_slime(table):
    assert table.log_ratio.tolist() == [0.5, 0.0, -0.25]
    assert (table.token.tolist(), table.prompt[0].tolist()) == ([5, 6, 7], [1, 2])
    assert table.loss_mask.tolist() == [1, 0, 1] and table.advantage.tolist() == [0.5] * 3
    assert (table.reward.tolist(), table.step.tolist()) == ([1.0], [4])
    assert table.metadata["source"] == "slime"


def test_lists_of_samples_are_read(tmp_path):
    # gradients are allowed
    sample = slime_sample(log_probs=torch.nn.Parameter(slime_sample()["log_probs"]))
    content = {
        "format_version": 2,
        "rollout_id": 4,
        "rank": 0,
        "samples": [sample],
        "dp_shards": [{"rank": 0}],
    }
    torch.save(content, tmp_path / "4.pt")
    table = read(tmp_path / "4.pt")
    assert_slime(table)
    assert table.sample_index.tolist() == [7]
    assert table.truncated.tolist() == [1]


def test_dicts_of_lists_are_read(tmp_path):
    data = {key: [value] for key, value in slime_sample().items() if key != "data_parallel_rank"}
    data["raw_reward"] = [0.0, 1.0]  # of the complete batch
    data["num_microbatches"] = [1, 2]  # of the schedule
    for rank in (0, 1):
        content = {"rollout_id": 4, "rank": rank, "rollout_data": data, "cp_rank": 0, "cp_size": 1}
        (tmp_path / "train_data").mkdir(exist_ok=True)
        torch.save(content, tmp_path / "train_data" / f"4_{rank}.pt")
    assert len(read(tmp_path)) == 2  # --dump-details' directory, the files of both ranks
    assert_slime(read(tmp_path / "train_data" / "4_1.pt"))


BAD_SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "context-parallel slices": ({"log_probs": torch.zeros(2)}, "context-parallel ranks"),
    "no rollout log-probs": ({"rollout_log_probs": None}, "sample 0 has no rollout_log_probs"),
    "list of steps": ({"step": [[1]]}, "sample 0 has step"),
    "400 digits": ({"log_probs": [0, 10**400, 0]}, "not a number of 64 bits"),
    "matrix": ({"advantages": torch.zeros(3, 2)}, "advantage is float32 in 2 dim"),
    "sparse": ({"log_probs": torch.eye(3).to_sparse()}, "sample 0 "),
    "longer than the file": (
        {"response_lengths": 2**40, "log_probs": torch.zeros(1).expand(2**40)},
        "has 3 entries of rollout_log_probs",
    ),
    "bomb": ({"advantages": torch.zeros(1).expand(3, 2**40)}, "MiB of memory"),
}
BAD_CONTENTS = {
    name: ({"samples": [slime_sample(**changes)]}, text)
    for name, (changes, text) in BAD_SAMPLES.items()
} | {
    "a list": ([1], "holds a list, but"),
    "no samples": ({"rollout_id": 1}, "has no 'rollout_data'"),
    "no length": ({"samples": [slime_sample(), {}]}, "sample 1 has no 'response_lengths'"),
    "samples": ({"samples": 7}, "int"),
}


@pytest.mark.parametrize(("content", "message"), BAD_CONTENTS.values(), ids=BAD_CONTENTS)
def test_a_bad_pt_file_is_refused_with_the_reason(tmp_path, content, message):
    torch.save(content, tmp_path / "4.pt")
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "4.pt")


def test_a_pt_file_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"samples": [Evil()]}, tmp_path / "4.pt")
    with pytest.raises(ValueError, match="which are never loaded") as error:
        read(tmp_path / "4.pt")
    assert "weights_only" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_a_compressed_pt_file_is_refused(tmp_path):
    torch.save({"samples": [slime_sample(advantages=torch.zeros(10**6))]}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "4.pt", "w", 8) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="entries larger than the file"):
        read(tmp_path / "4.pt")


def nemo_row(index, **changes):
    """A row of NeMo-RL's log_batched_dict_as_jsonl: values in lists of one, padded to 6 tokens."""
    row = {
        "content": ["text"],
        "rewards": [1.0],
        "input_lengths": [5],
        "token_ids": [[1, 2, 5, 6, 7, 0]],
        "token_loss_mask": [[0, 0, 1, 0, 1, 0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.0, 0.0, 0.5, 0.5, 0.5, 0.0]],
        "generation_logprobs": [[0.0, 0.0, -1.5, 0.0, -2.0, 0.0]],
        "prev_logprobs": [[0.0, -9.0, -1.0, -0.5, -2.25, 0.0]],
    }
    return {**row, **{key: [value] for key, value in changes.items()}, "idx": index}


@pytest.fixture
def nemo_table(tmp_path):
    rows = [nemo_row(0), nemo_row(1, sample_loss_mask=0.0, filtered_rewards=0.25)]
    write_lines(tmp_path / "train_data_step12.jsonl", rows)
    write_lines(tmp_path / "train_data_step2.jsonl", [nemo_row(0)])
    return read(tmp_path)


def test_files_of_nemo_rl_are_read_in_the_order_of_steps(nemo_table):
    assert nemo_table.step.tolist() == [1, 11, 11]


def test_token_columns_of_nemo_rl(nemo_table):
    assert nemo_table.log_ratio.tolist() == [0.5, 0.0, -0.25, 0.5, 0.0, -0.25, 0.0, 0.0, 0.0]
    assert nemo_table.token.tolist()[:3] == [5, 6, 7]
    assert nemo_table.prompt[0].tolist() == [1, 2]
    assert nemo_table.advantage.tolist()[0] == 0.5


def test_the_sample_mask_of_nemo_rl_masks_all_tokens(nemo_table):
    assert nemo_table.loss_mask.tolist()[3:] == [1, 0, 1, 0, 0, 0]


def test_filtered_rewards_of_nemo_rl_replace_rewards(nemo_table):
    assert nemo_table.reward.tolist() == [1.0, 1.0, 0.25]


def test_metadata_of_nemo_rl(nemo_table):
    assert nemo_table.metadata == {"source": "nemo_rl", "old_policy": "recomputed"}


def prime_row(**changes):
    """A row of prime-rl's TokenExporter, schema_version 1."""
    row = {
        "schema_version": 1,
        "step": 3,
        "rank": 0,
        "micro_step": 0,
        "micro_sequence_idx": 0,
        "export_sequence_idx": 0,
        "env_name": "math",
        "token_ids": [1, 2, 5, 6, 7],
        "position_ids": [0, 1, 2, 3, 4],
        "loss_mask": [False, False, True, False, True],
        "advantages": [0.5] * 5,
        "inference_logprobs": [0.0, 0.0, -1.5, 0.0, None],
        "trainer_logprobs": [-3.0, -2.0, -1.0, -0.5, -2.25],
        "entropy": [0.1, 0.2, 0.3, 0.4, 0.5],
        "is_masked": [False, False, True, False, False],
        "mismatch_kl": [None] * 5,
        "rl_weights": [None] * 5,
    }
    return row | changes


@pytest.fixture
def prime_table(tmp_path):
    write_lines(tmp_path / "token_exports" / "step_3" / "rank_0.jsonl", [prime_row()])
    write_lines(
        tmp_path / "token_exports" / "step_10" / "rank_0.jsonl",
        [prime_row(step=10, is_masked=[None] * 5)],
    )
    (tmp_path / "token_exports" / "step_3" / "STABLE").touch()
    return read(tmp_path)


@pytest.fixture
def prime_step(prime_table):
    return prime_table.select(np.flatnonzero(prime_table.step == 3))


def test_all_steps_of_prime_rl_are_read(prime_table):
    assert sorted(prime_table.step.tolist()) == [3, 10]


def test_log_probs_of_prime_rl(prime_step):
    assert prime_step.log_ratio.tolist() == [0.5, 0.0, 0.0]
    assert math.isnan(prime_step.rollout_log_prob[2])
    assert prime_step.valid.tolist() == [True, False, False]


def test_masked_tokens_of_prime_rl_are_rejected(prime_step):
    assert prime_step.rejected.tolist() == [1, 0, 0]
    assert prime_step.metadata["criteria"] == ["is_masked"]


def test_other_columns_of_prime_rl(prime_step):
    assert prime_step.entropy.tolist() == pytest.approx([0.3, 0.4, 0.5])
    assert prime_step.prompt[0].tolist() == [1, 2]


def verl_row(**changes):
    return {"input": "p", "output": "<b>", "gts": "4", "score": 1.0, "step": 9} | changes


def test_verl_generations_with_log_probs(tmp_path):
    row = verl_row(
        old_log_probs=[-1.0, -2.25],
        rollout_log_probs=[-1.5, -2.0],
        response_mask=[1, 1],
        advantages=0.5,
    )
    write_lines(tmp_path / "9.jsonl", [row])
    table = read(tmp_path)
    assert table.log_ratio.tolist() == [0.5, -0.25] and table.advantage.tolist() == [0.5, 0.5]
    assert (table.text, table.prompt_text, table.reward.tolist(), table.step.tolist()) == (
        ("<b>",),
        ("p",),
        [1.0],
        [9],
    )


PLAIN = {"train_log_probs": [-1.0, -0.5], "rollout_log_probs": [-1.5, None], "loss_mask": [1, 1]}


def test_plain_jsonl_equals_plain_parquet(tmp_path):
    row = PLAIN | {
        "tokens": [5, 6],
        "advantages": 0.5,
        "step": 1,
        "response": "ab",
        "weight_versions": [3, 4],
    }
    write_lines(tmp_path / "a.jsonl", [row, row])
    parquet.write_table(pa.Table.from_pylist([row, row]), tmp_path / "a.parquet")
    table = read(tmp_path / "a.jsonl")
    assert table.log_ratio.tolist() == [0.5, 0.0, 0.5, 0.0] and table.token.tolist() == [5, 6, 5, 6]
    assert (table.text, table.weight_version.tolist()) == (("ab", "ab"), [3, 4, 3, 4])
    assert_same(read(tmp_path / "a.parquet"), table)


def test_parquet_bombs_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "MAX_GROUP_BYTES", 1 << 20)
    zeros = [[0.0] * 10**6]
    parquet.write_table(
        pa.table({"train_log_probs": zeros, "rollout_log_probs": zeros}), tmp_path / "a.parquet"
    )
    part = SampleParts(train_log_prob=zeros[0], rollout_log_prob=zeros[0])
    write(tmp_path / "b.parquet", TokenTable.from_parts([part]))
    text = pa.table({"train_log_probs": [[0.0]], "rollout_log_probs": [[0.0]], "response": ["a"]})
    parquet.write_table(
        text,
        tmp_path / "c.parquet",
        use_dictionary=False,
        column_encoding={"response": "DELTA_BYTE_ARRAY"},
    )
    for name, message in (
        ("a", "MiB of memory"),
        ("b", "MiB of memory"),
        ("c", "DELTA_BYTE_ARRAY"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / f"{name}.parquet")


def test_a_repeated_text_takes_memory_once(tmp_path):
    text, rows = "a" * 10**6, 40
    parts = [SampleParts(train_log_prob=[-1.0], rollout_log_prob=[-1.0], text=text)] * rows
    write(tmp_path / "a.parquet", TokenTable.from_parts(parts))
    columns = {
        "train_log_probs": [[-1.0]] * rows,
        "rollout_log_probs": [[-1.0]] * rows,
        "response": [text] * rows,
    }
    parquet.write_table(pa.table(columns), tmp_path / "b.parquet")
    for name in "ab":
        found = read(tmp_path / f"{name}.parquet").text
        assert len(found) == rows and found[0] == text and len(set(map(id, found))) == 1


BAD_LINES = {
    "no JSON": ("{", "line 2 is not JSON"),
    "deep nesting": ("[" * 100_000, "line 2 is nested too deeply"),
    "no object": ("[1]", "line 2 is JSON of type list"),
    "no text": ("\xff\xfe", "line 2 is not UTF-8"),
    "length": (json.dumps(PLAIN | {"loss_mask": [1]}), "line 2 has 1 entries of loss_mask"),
    "text": (json.dumps(PLAIN | {"train_log_probs": "abc"}), "line 2 has train_log_probs"),
    "probabilities": (json.dumps(PLAIN | {"train_log_probs": [0.5, -1]}), "log-prob of 0.5"),
    "another form": (json.dumps({"x": 1}), "line 2 has train_log_probs"),
    "huge": (
        json.dumps(PLAIN | {"tokens": [1, 1e300]}),
        "token has an entry that does not fit int32",
    ),
    "null": (
        json.dumps(PLAIN | {"tokens": [1, None]}),
        "token has an entry that does not fit int32",
    ),
    "digits": (
        json.dumps(PLAIN | {"tokens": [1, 10**400]}),
        "tokens with an entry that is not a number",
    ),
    "ragged": (
        json.dumps(PLAIN | {"tokens": [[1], 2]}),
        "tokens with an entry that is not a number",
    ),
    "reward": (
        json.dumps(PLAIN | {"reward": 10**400}),
        "reward has an entry that does not fit float32",
    ),
    "step": (json.dumps(PLAIN | {"step": 10**30}), "step has an entry that does not fit int32"),
    "prompt": (
        json.dumps(PLAIN | {"prompt": [-(10**12)]}),
        "prompt has an entry that does not fit int32",
    ),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_refused_with_its_number(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(PLAIN).encode() + b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert str(error.value).startswith(str(path))


BAD_ROWS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "unknown keys": ([{"x": 1}], "unknown form"),
    "metrics": ([{"step": 0, "eval/accuracy": 0.3}], "metrics; give the directory of the run"),
    "slime's rollouts": (
        [{"response_length": 1, "rollout_log_probs": [-1.0]}],
        "--save-debug-train-data has them",
    ),
    "verl without log-probs": ([verl_row()], "line 1 is a generation of verl"),
    "no rows": ([], "has no samples"),
}


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_files_without_log_probs_are_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        read(write_lines(tmp_path / "9.jsonl", rows))


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "has no dumps"), ("missing", "there is no file or directory")],
    ids=["empty directory", "absent path"],
)
def test_paths_without_dumps_are_refused(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_a_file_that_is_not_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as parquet"):
        read(tmp_path / "a.parquet")


def test_a_run_directory_leads_to_its_dumps(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for rollout in (2, 10):
        write(elsewhere / f"t_{rollout}_0.parquet", full_table())
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "config.yaml").write_text(
        f"num_rollout: 3\nsave_debug_train_data: {elsewhere}/t_{{rollout_id}}_{{rank}}.parquet\n"
    )
    assert [file.name for file in files_of(run)] == ["t_2_0.parquet", "t_10_0.parquet"]
    assert len(read(run)) == 6


def test_a_random_part_is_drawn_from_all_files(tmp_path):
    rows = [PLAIN | {"step": step} for step in range(100)]
    write_lines(tmp_path / "whole" / "a.jsonl", rows)
    for i in range(10):
        write_lines(tmp_path / "split" / f"{i}.jsonl", rows[10 * i : 10 * i + 10])
    whole, split = (read(tmp_path / name, max_tokens=20) for name in ("whole", "split"))
    assert_same(whole, split)
    assert split.tokens == 20 and split.metadata["sampled"] == {"samples": 100, "tokens": 200}
    assert len({step // 10 for step in split.step.tolist()}) > 3
    assert "sampled" not in read(tmp_path / "split", max_tokens=200).metadata


def test_memory_is_bounded_in_bytes(tmp_path):
    table = full_table()
    wide = replace(table, experts=np.zeros((5, 100, 8), np.int32))
    for name, content in (("narrow", table), ("wide", wide)):
        for i in range(8):
            write(tmp_path / name / f"{i}.parquet", content)
    assert table.nbytes < 500 and 16_000 < wide.nbytes < 16_500
    assert read(tmp_path / "narrow", max_bytes=40_000).tokens == 40
    part = read(tmp_path / "wide", max_bytes=40_000)
    assert 5 < part.tokens <= 12 and part.nbytes <= 40_000
    assert part.metadata["sampled"] == {"samples": 24, "tokens": 40}


def test_fractional_masks_count(tmp_path):
    row = PLAIN | {"loss_mask": [0.5, 0]}
    assert read(write_lines(tmp_path / "a.jsonl", [row])).loss_mask.tolist() == [1, 0]


@pytest.mark.parametrize("log_prob", [0.5, math.inf])
def test_a_log_prob_above_0_is_refused_with_its_line(log_prob, tmp_path):
    rows = [{"train_log_probs": [-1.0], "rollout_log_probs": [-1.0]} for _ in range(3)]
    rows[2]["rollout_log_probs"] = [log_prob]
    path = tmp_path / "dump.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=f"line 3 has a log-prob of {log_prob}; natural"):
        read(path)


def test_log_probs_beyond_float32_become_infinite(tmp_path):
    row = PLAIN | {"train_log_probs": [-1e300, -1.0]}
    table = read(write_lines(tmp_path / "a.jsonl", [row]))
    assert table.train_log_prob.tolist() == [-np.inf, -1.0]


@pytest.mark.parametrize(
    ("identity", "read_run"), [(None, "b"), ("a", "a")], ids=["newest file", "run directory"]
)
def test_a_directory_with_two_runs_gives_one_of_them(identity, read_run, tmp_path, capsys):
    for number, run in enumerate("aab"):
        path = tmp_path / f"{2 - number}_0.parquet"
        write(
            path,
            replace(
                full_table(), metadata={"source": "slime_tis", "criteria": ["x", "y"], "run": run}
            ),
        )
        os.utime(path, (number, number))
    if identity is not None:
        (tmp_path / "run.json").write_text(json.dumps({"run": identity}))
    table = read(tmp_path)
    assert table.metadata["run"] == read_run
    assert len(table) == len(full_table()) * "aab".count(read_run)
    assert "dumps of several runs" in capsys.readouterr().err


def test_a_table_survives_the_round_trip_in_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(
        own, "ROW_GROUP_BYTES", 2 * (full_table().nbytes // 5)
    )  # two of its five tokens
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


def test_rows_of_a_parquet_file(tmp_path):
    write(tmp_path / "a.parquet", full_table())
    rows = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["token"] for row in rows] == [[5, 6, 7], [], [8, 9]]
    assert rows[0]["prompt"] == [1, 2]
    assert rows[0]["experts"] == list(range(12))
    assert rows[2]["truncated"] == 1


def test_a_parquet_file_has_only_known_columns(tmp_path):
    table = TokenTable.from_parts([SampleParts(train_log_prob=[-1.0], rollout_log_prob=[-2.0])])
    write(tmp_path / "a.parquet", table)
    names = parquet.read_schema(tmp_path / "a.parquet").names
    assert names == ["train_log_prob", "old_log_prob", "rollout_log_prob", "loss_mask"]
    assert_same(TokenTable.concatenate(list(parquet_tables(tmp_path / "a.parquet"))), table)


def test_an_empty_table_is_written(tmp_path):
    write(tmp_path / "a.parquet", TokenTable.from_parts([]))
    assert TokenTable.concatenate(list(parquet_tables(tmp_path / "a.parquet"))).tokens == 0


def test_a_lone_surrogate_is_replaced(tmp_path):
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
        pytest.param(
            _with_description({"schema_version": 9}), "schema version 9", id="later version"
        ),
        pytest.param(_with_description([]), "damaged metadata", id="damaged metadata"),
        pytest.param(
            lambda table: table.drop(["train_log_prob"]),
            "no column train_log_prob",
            id="no log-probs",
        ),
        pytest.param(
            lambda table: table.append_column("token", table["token"]), "2 times", id="two columns"
        ),
        pytest.param(
            _with_description(DESCRIBED | {"experts_shape": [2**70, 1]}),
            "damaged metadata",
            id="experts",
        ),
        pytest.param(
            lambda t: t.replace_schema_metadata({own.KEY: "[" * 10**5}),
            "damaged metadata",
            id="nested",
        ),
        *(
            pytest.param(
                _with_column(name, values), "cannot be read|must be|null values", id=f"{name} {i}"
            )
            for name in ("token", "prompt", "experts", "reward", "step", "text", "rollout_log_prob")
            for i, values in enumerate(
                (["a", "b", "c"], [{"a": 1}] * 3, [[[1]]] * 3, [None] * 3, [2**62] * 3)
            )
            if (name, i) not in {("reward", 3), ("text", 0), ("text", 3), ("reward", 4)}
        ),
        pytest.param(
            lambda table: table.set_column(
                table.column_names.index("token"),
                "token",
                pa.array([[1], [], [2]], pa.large_list(pa.int32())),
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


def test_complex_log_probs_are_refused():
    with pytest.raises(ValueError, match=r"^train_log_prob has an entry that does not fit float32"):
        cast(np.array([-1 + 0.5j]), np.float32, "train_log_prob")
