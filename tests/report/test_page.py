"""The report: its data, hostile text, and the files it may overwrite."""

import base64
import io
import json
import re
import shlex
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from slime_tis.analysis.diagnosis import CAUSES
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.analysis.report import mismatch_plots, overview, page_samples
from slime_tis.analysis.report.overview import group_runs
from slime_tis.analysis.report.page import _front, page_data, render
from slime_tis.analysis.report.report_inputs import Source, open_source
from slime_tis.main import main
from tests.report.dumps import HOSTILE, SAMPLES, make_run, make_table
from tests.test_docs import blocks


class Parsed(HTMLParser):
    """Elements of a page, and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.scripts = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += data

    @property
    def data(self):
        packed = self.scripts[2].strip()
        return {
            **json.loads(self.scripts[0]),
            "samples": unpacked(inflated(packed))[0] if packed else None,
        }


def inflated(packed):
    return zlib.decompress(base64.b64decode(packed))


def unpacked(raw):
    """The JSON and the columns of `page_samples.packed`, read as page_samples.js does."""
    (length,) = struct.unpack_from("<I", raw)
    head = json.loads(raw[4 : 4 + length])
    types = {"Float32Array": "<f4", "Int32Array": "<i4", "Int16Array": "<i2", "Uint8Array": "u1"}
    assert length % 4 == 0 and all(start % 4 == 0 for _, start, _ in head["columns"].values())
    columns = {
        name: np.frombuffer(raw, types[kind], count, 4 + length + start)
        for name, (kind, start, count) in head["columns"].items()
    }
    return head, columns


def source(table=None):
    table = make_table() if table is None else table
    return Source(name="dump", path=Path("dump.parquet"), metrics=(), table=table, note="")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def page(run):
    assert main(["report", str(run)]) == 0
    return (run / "report.html").read_text()


def test_the_page_is_self_contained(page):
    parsed = Parsed(page)
    types = [attributes.get("type") for tag, attributes in parsed.elements if tag == "script"]
    assert types == [
        "application/json",
        None,
        *["application/octet-stream", None] * 2,
    ]  # data, samples, plotly
    assert b"plotly.js v" in inflated(parsed.scripts[4])[:99] and "MIT license" in page
    assert not [
        1
        for tag, attributes in parsed.elements
        if "src" in attributes or tag in ("link", "img", "iframe")
    ]
    assert all(
        attributes["href"].startswith("#") for tag, attributes in parsed.elements if tag == "a"
    )
    assert "default-src 'none'" in page and len(page) < 3_000_000


def test_hostile_text_stays_data(page):
    assert HOSTILE not in page and "<img src=x" not in page
    data = Parsed(page).data
    assert re.fullmatch("[A-Za-z0-9+/=]+", Parsed(page).scripts[2].strip())
    shown = [sample["text"] for sample in data["samples"]["samples"]]
    assert HOSTILE in shown and any(
        HOSTILE in sample["prompt"] for sample in data["samples"]["samples"]
    )


def test_a_run_shows_its_metrics_its_warning_and_its_tokens(page):
    data = Parsed(page).data
    assert [plot["id"] for plot in data["overview"]] == [
        "run-reward",
        "run-mismatch",
        "run-ess",
        "run-gradient",
    ]
    (warning,) = data["warnings"]
    assert (warning["name"], warning["step"], warning["last"]) == ("mismatch", 8, 11)
    assert "nats per token" in warning["message"]
    assert [plot["id"] for plot in data["shape"]] == [
        *(
            "density",
            "tail",
            "by-position",
            "by-turn",
            "by-age",
            "by-entropy",
        )
    ]  # all responses are equally long
    assert all(
        plot["says"].endswith(".")
        for plot in data["overview"] + data["shape"] + data["what_if"]["plots"]
    )
    assert len(data["samples"]["samples"]) == SAMPLES and data["diagnoses"][0]["findings"]
    assert data["recommendation"].startswith("No correction")
    assert {row["flags"] for row in data["what_if"]["rows"]} >= {
        "--rollout-correction-preset decoupled_token_is"
    }


def test_what_if_is_ordered_by_cosine(page):
    data = Parsed(page).data
    cosines = [row["cosine"] for row in data["what_if"]["rows"]]
    assert cosines == sorted(cosines, reverse=True)
    assert "closest to the exact gradient first" in data["notes"]["what_if"]


def test_one_recommendation_is_on_the_page(page):
    data = Parsed(page).data
    elsewhere = json.dumps([data["diagnoses"], data["what_if"], data["notes"], data["verdict"]])
    assert data["recommendation"]
    assert "Recommended" not in elsewhere
    flags = ("--use-opsm", "--rollout-pull-coef", "--use-rollout-logprobs", "--use-tis")
    advice = " ".join(fix for _, fix in CAUSES.values())
    assert not any(flag in advice for flag in flags)


def test_only_reports_are_overwritten(run, page, tmp_path, capsys):
    own, foreign = tmp_path / "own.html", tmp_path / "notes.html"
    own.write_text(page)
    foreign.write_text("<html>my notes</html>")
    dump = tmp_path / "dump.parquet"
    write(dump, make_table(4))
    assert main(["report", str(dump), "--out", str(own)]) == 0
    assert '"dump.parquet"' in own.read_text()
    for path, message in [
        (foreign, "is not a report"),
        (tmp_path, "is not a file"),
        (tmp_path / "absent" / "page.html", "does not exist"),
        (dump, "is not a report"),
    ]:
        capsys.readouterr()
        assert main(["report", str(dump), "--out", str(path)]) == 2
        written = capsys.readouterr().err
        assert message in written and len(written.splitlines()) == 1
    assert main(["report", str(dump), "--out", "/sys/page.html"]) == 1
    assert "/sys/" in capsys.readouterr().err
    assert foreign.read_text() == "<html>my notes</html>"


def test_two_runs_in_one_page(run, tmp_path, capsys):
    other = make_run(tmp_path / "other", steps=5)
    out = tmp_path / "both.html"
    assert main(["report", "--compare", str(run), str(other), "--out", str(out)]) == 0
    data = Parsed(out.read_text()).data
    assert [one["name"] for one in data["diagnoses"]] == ["run", "other"]
    names = [trace["name"] for trace in data["overview"][0]["traces"]]
    assert names == ["run: rollout reward", "other: rollout reward"]
    assert len(data["shape"][1]["traces"]) == 4
    for wrong in ([str(run), "--compare", str(run), str(other)], [], ["--compare", str(run)]):
        assert main(["report", *wrong]) == 2


def test_runs_that_differ_in_seeds_are_drawn_as_median_and_range(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (command,) = [block for block in blocks("report.md", "") if "seeds.html" in block]
    argv = shlex.split(command)[1:]
    for run in map(Path, argv[2:6]):
        level, seed = run.name.split("_")
        run.mkdir(parents=True)
        options = {"tis_level": level, "seed": int(seed), "output_dir": str(run)}
        (run / "config.yaml").write_text(json.dumps(options))
        rows = [
            {"step": i, "rollout/raw_reward": int(seed) ** 2 * i}
            for i in range(4 if seed == "2" else 5)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(argv) == 0
    data = Parsed(Path("seeds.html").read_text()).data
    low, high, median, *others = data["overview"][0]["traces"]
    assert median["name"] == "tis_level=token (2 runs): rollout reward" and median["x"] == [
        0,
        1,
        2,
        3,
    ]
    assert (low["y"], median["y"], high["y"]) == ([0, 1, 2, 3], [0, 2.5, 5, 7.5], [0, 4, 8, 12])
    assert high["fill"] == "tonexty" and len(others) == 3 and data["title"] == "4 runs"


def test_two_runs_differ_in_the_changed_option_and_engine(run, tmp_path, capsys):
    other = make_run(tmp_path / "other")
    table = make_table()
    write(
        other / "dumps" / "0.parquet", replace(table, rollout_log_prob=table.rollout_log_prob - 0.5)
    )
    with (other / "config.yaml").open("a") as lines:
        lines.write("rollout_precision: fp8\nseed: 3\n")
    assert main(["diagnose", "--compare", str(run), str(other), "--json"]) == 0
    option, size, engine, cause = json.loads(capsys.readouterr().out)["changes"]
    assert option == "option rollout_precision: none → fp8" and "mean abs(Δ): 0.0147 → 0.5" in size
    assert "training by 0 and in the rollout engine by 0.5 nats" in engine and "→" in cause
    assert main(["diagnose", "--compare", str(run), str(run)]) == 0
    assert "within the noise" in capsys.readouterr().out
    (other / "config.yaml").write_text("lr: 0.001\n")
    assert main(["diagnose", "--compare", str(run), str(other)]) == 0
    assert "other: This run wrote no dumps" in capsys.readouterr().out
    pair = ["--compare", str(run), str(other)]
    for wrong in ([str(run), *pair], [*pair, "--fail-on", "k3=1"], [*pair, "--demo"]):
        assert main(["diagnose", *wrong]) == 2


def test_json_has_the_numbers_and_no_page(run, tmp_path, capsys):
    dump = tmp_path / "dump.parquet"
    write(dump, make_table(8))
    assert main(["report", str(dump), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (
        numbers["sources"][0]["mismatch"]["samples"] == 8
        and numbers["what_if"]
        and numbers["diagnoses"]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["dump.parquet"]


@pytest.mark.parametrize(
    "text",
    [
        *(
            '{"step": 0, "train/loss": "<b>"}\n',
            "[]\n",
            '{"step": 0}\n{"st\n{"step": 2}\n',
            '{"step": 0, "a": [1]}\n',
        ),
        '{"step": 0, "train/grad_norm": 1' + "0" * 400 + "}\n",
    ],
    ids=["text", "list", "cut", "nested", "400 digits"],
)
def test_damaged_metrics_are_refused_with_one_line(tmp_path, capsys, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    message = capsys.readouterr().err.strip()
    assert "metrics.jsonl" in message and len(message.splitlines()) == 1


def test_custom_tokenizer_code_never_runs(tmp_path, capsys, monkeypatch):
    maps = {
        "tokenizer_class": "T",
        "auto_map": {"AutoTokenizer": [None, "evil.T"], "AutoConfig": "evil.C"},
    }
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: pass\nclass C: pass\n"
    )
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(maps))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    write(tmp_path / "a.parquet", replace(make_table(), metadata={"tokenizer": str(tmp_path)}))
    assert main(["report", str(tmp_path / "a.parquet"), "--out", str(tmp_path / "a.html")]) == 0
    assert main(["report", str(tmp_path / "a.parquet"), "--hf-checkpoint", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "custom code" not in captured.out and len(captured.err.strip().splitlines()) == 1
    assert not (tmp_path / "ran").exists()


def test_an_absent_path_and_a_run_without_dumps_are_one_line(tmp_path, capsys):
    for command in ("report", "diagnose"):
        assert main([command, str(tmp_path / "nothing")]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text("lr: 0.001\n")
    assert main(["report", str(run)]) == 0
    assert "--save-debug-train-data" in capsys.readouterr().out
    data = Parsed((run / "report.html").read_text()).data
    assert data["samples"] is None and data["shape"] == [] and len(data["overview"]) == 4
    assert main(["diagnose", str(run)]) == 0
    assert "--save-debug-train-data" in capsys.readouterr().out


def test_numbers_and_steps_of_a_table_by_hand():
    table = TokenTable.from_parts(
        [
            SampleParts(
                train_log_prob=[-1.0, -2.0, -3.0],
                rollout_log_prob=[-1.5, -2.0, -90.0],
                loss_mask=[1, 1, 0],
            )
        ]
    )
    numbers = mismatch_plots.summary(table)
    assert (numbers["tokens"], numbers["trained_tokens"], numbers["tokens_without_log_prob"]) == (
        3,
        2,
        0,
    )
    assert numbers["mean_abs_log_ratio"] == 0.25 and numbers["max_abs_log_ratio"] == 0.5
    assert numbers["k3"] == pytest.approx((np.exp(0.5) - 0.5 - 1) / 2)
    table = TokenTable.from_parts([SampleParts(train_log_prob=[np.nan], rollout_log_prob=[-1.0])])
    empty = TokenTable.from_parts([])
    for each in (table, empty):
        assert Parsed(render(page_data([source(each)]))).data["shape"] == []
    rows = (
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, "train/grad_norm": 1.0},
        {"step": 2, "train/grad_norm": 1.0},
    )
    run = Source(name="run", path=Path("run"), metrics=rows, table=None, note="")
    assert page_data([run])["subtitle"] == ["run: 2 steps"]
    assert _front([(0.0, 1.0), (1.0, 0.0), (0.5, 0.5), (0.6, 0.6), (0.5, 0.5)]) == [
        True,
        True,
        True,
        False,
        True,
    ]
    runs = [
        replace(source(), options={1: "a", "lr": lr, "seed": seed})
        for lr, seed in ((1, 1), (1, 2), (2, 1))
    ]
    assert [len(group.sources) for group in group_runs([*runs, source(), source()])] == [2, 1, 1, 1]


def test_the_worst_samples_come_first_with_their_groups():
    table = make_table(40, 20)
    shown = page_samples.chosen_samples(table, 400)
    assert shown.tokens <= 400
    size = page_samples.mean_size(shown)
    assert (np.diff(size) <= 0).all()
    assert size[0] == page_samples.mean_size(table).max()
    assert shown.step is not None and shown.group is not None
    worst = (shown.step == shown.step[0]) & (shown.group == shown.group[0])
    assert worst.sum() == 4


def test_the_size_of_a_page_is_bounded(tmp_path):
    def size(payload):
        return len(zlib.compress(page_samples.packed(payload)))

    long = page_samples.payload(page_samples.chosen_samples(repeated(make_table(24, 500), 10)))
    assert long["offsets"][-1] <= 100_000 and size(long) < 7_000_000
    assert page_samples.payload(repeated(make_table(24, 500), 8))["experts"]["layers"] == 3
    wide = replace(make_table(24, 500), experts=np.zeros((12_000, 300, 8), np.int32))
    assert (
        page_samples.payload(wide)["experts"]["layers"] == 10
    )  # of 300: a million numbers at most
    many = repeated(
        replace(make_table(24, 1), text=("x" * 9_000,) * 24, prompt_text=("y" * 9_000,) * 24), 300
    )
    shown = page_samples.chosen_samples(many)
    assert (
        len(many) == 7_200 and len(shown) == 5_000 and size(page_samples.payload(shown)) < 8_300_000
    )
    rows = [
        {"step": i, "train/grad_norm": 50.0 if i == 12_345 else 1.0, "health/mismatch": i % 2}
        for i in range(20_000)
    ]
    (plot,) = overview.plots(
        group_runs([Source(name="run", path=tmp_path, metrics=tuple(rows), table=None, note="")])
    )
    assert len(plot.traces[0]["x"]) <= 2_000 and max(plot.traces[0]["y"]) == 50.0
    assert len(overview.warnings(rows)) == 200 and len(plot.layout["shapes"]) == 200


def repeated(table, times):
    return TokenTable.concatenate([table] * times)


def test_columns_survive_the_round_trip_through_the_page():
    table = make_table(3, 7)  # 21 values: a column of bytes is not aligned
    head, columns = unpacked(page_samples.packed(page_samples.payload(table)))
    np.testing.assert_array_equal(columns["train"], table.train_log_prob)
    np.testing.assert_array_equal(columns["weight_version"], table.weight_version)
    np.testing.assert_array_equal(columns["mask"], table.loss_mask)
    np.testing.assert_array_equal(np.array(head["ids"])[columns["token"]], table.token)
    np.testing.assert_array_equal(columns["experts"].reshape(21, 3, 2), table.experts)
    assert np.abs(columns["ratio"]).max() < 1  # masked tokens are 30 nats apart
    assert head["experts"] == {"layers": 3, "of": 3, "k": 2} and head["offsets"] == [0, 7, 14, 21]


def test_single_values_are_not_plotted_and_recurring_warnings_listed_again():
    def drawn(*tables):
        return {plot["id"] for plot in page_data([source(table) for table in tables])["shape"]}

    short, long = make_table(4, 10), make_table(4, 20)
    assert "by-length" not in drawn(short) | drawn(long) | drawn(short, long)
    assert "by-length" in drawn(TokenTable.concatenate([short, long]))
    rows = [{"step": i, "health/mismatch": float(held)} for i, held in enumerate([1, 1, 0, 1])]
    found = overview.warnings(rows)
    assert [(warning["step"], warning["last"]) for warning in found] == [(0, 1), (3, 3)]


def test_dumps_moved_with_their_run_are_found(tmp_path):
    run = make_run(tmp_path / "before")
    moved = run.rename(tmp_path / "after")
    table = open_source(str(moved)).table
    assert table is not None and len(table) == SAMPLES
