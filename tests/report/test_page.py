"""The report: its data, hostile text, and the files it may overwrite."""

import base64
import io
import json
import math
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
from slime_tis.analysis.report.overview import group_points, group_runs
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


@pytest.fixture(scope="module")
def data(page):
    return Parsed(page).data


def test_a_run_has_plots_of_its_metrics(data):
    ids = [plot["id"] for plot in data["overview"]]
    assert ids == ["run-reward", "run-mismatch", "run-ess", "run-gradient"]


def test_consecutive_warnings_of_a_run_are_one(data):
    (warning,) = data["warnings"]
    assert (warning["name"], warning["step"], warning["last"]) == ("mismatch", 8, 11)
    assert "nats per token" in warning["message"]


def test_a_dump_has_plots_of_its_variables(data):
    # All responses are equally long, so there is no plot by length.
    ids = [plot["id"] for plot in data["shape"]]
    assert ids == ["density", "tail", "by-position", "by-turn", "by-age", "by-entropy"]


def test_every_plot_is_described_in_sentences(data):
    plots = data["overview"] + data["shape"] + data["what_if"]["plots"]
    assert [plot["id"] for plot in plots if not plot["says"].endswith(".")] == []


def test_a_run_shows_all_samples_of_its_dump(data):
    assert len(data["samples"]["samples"]) == SAMPLES


def test_a_run_has_a_diagnosis(data):
    assert data["diagnoses"][0]["findings"]


def test_a_run_has_a_recommendation(data):
    assert "weights up to 1 step old" in data["recommendation"]


def test_presets_are_shown_by_their_flag(data):
    flags = {row["flags"] for row in data["what_if"]["rows"]}
    assert "--rollout-correction-preset decoupled_token_is" in flags


def test_what_if_is_ordered_by_cosine(data):
    cosines = [row["cosine"] for row in data["what_if"]["rows"]]
    assert cosines == sorted(cosines, reverse=True)
    assert "closest to the exact gradient first" in data["notes"]["what_if"]


def test_one_recommendation_is_on_the_page(data):
    elsewhere = json.dumps([data["diagnoses"], data["what_if"], data["notes"], data["verdict"]])
    assert data["recommendation"]
    assert "Recommended" not in elsewhere
    flags = ("--use-opsm", "--rollout-pull-coef", "--use-rollout-logprobs", "--use-tis")
    advice = " ".join(cause.fix for cause in CAUSES.values())
    assert not any(flag in advice for flag in flags)


@pytest.fixture
def dump(tmp_path):
    write(tmp_path / "dump.parquet", make_table(4))
    return str(tmp_path / "dump.parquet")


def test_a_report_is_overwritten(page, dump, tmp_path):
    report = tmp_path / "own.html"
    report.write_text(page)
    assert main(["report", dump, "--out", str(report)]) == 0
    assert '"dump.parquet"' in report.read_text()


OUTPUTS = {
    "another page": ("notes.html", "is not a report"),
    "directory": (".", "is not a file"),
    "no directory": ("absent/page.html", "does not exist"),
    "the dump": ("dump.parquet", "is not a report"),
}


@pytest.mark.parametrize(("out", "message"), OUTPUTS.values(), ids=OUTPUTS)
def test_other_outputs_are_refused_with_one_line(out, message, dump, tmp_path, capsys):
    notes = tmp_path / "notes.html"
    notes.write_text("<html>my notes</html>")
    assert main(["report", dump, "--out", str(tmp_path / out)]) == 2
    written = capsys.readouterr().err
    assert message in written
    assert len(written.splitlines()) == 1
    assert notes.read_text() == "<html>my notes</html>"


def test_an_output_that_cannot_be_written_is_named(dump, capsys):
    # Some systems say only when the file is opened that /sys cannot be written.
    assert main(["report", dump, "--out", "/sys/page.html"]) in (1, 2)
    assert "/sys/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "mean"),
    [((1.0, 2.0), 1.5), ((1.5e308, 1.5e308), math.inf), ((math.inf, -math.inf), math.nan)],
    ids=["finite", "overflow", "opposite infinities"],
)
def test_a_group_has_the_mean_of_its_runs(values, mean):
    points = group_points([{1: value} for value in values])
    assert points.mean == pytest.approx([mean], nan_ok=True)


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


@pytest.fixture
def seed_traces(tmp_path, monkeypatch):
    """The lines of the reward after the command of the page, on two groups of two seeds."""
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
    assert data["title"] == "4 runs"
    return data["overview"][0]["traces"]


def test_runs_that_differ_in_seeds_have_a_line_each(seed_traces):
    first, second, *_ = seed_traces
    assert (first["y"], second["y"]) == ([0, 1, 2, 3], [0, 4, 8, 12])
    assert first["showlegend"] is second["showlegend"] is False
    assert len(seed_traces) == 6


def test_the_mean_over_seeds_has_the_name_of_the_group(seed_traces):
    mean = seed_traces[2]
    assert mean["name"] == "tis_level=token (2 runs): rollout reward"
    assert mean["x"] == [0, 1, 2, 3]
    assert mean["y"] == [0, 2.5, 5, 7.5]


def test_a_comparison_names_the_changed_option_and_engine(run, tmp_path, capsys):
    other = make_run(tmp_path / "other")
    table = make_table()
    changed = replace(table, rollout_log_prob=table.rollout_log_prob - 0.5)
    write(other / "dumps" / "0.parquet", changed)
    with (other / "config.yaml").open("a") as lines:
        lines.write("rollout_precision: fp8\nseed: 3\n")
    assert main(["diagnose", "--compare", str(run), str(other), "--json"]) == 0
    option, size, engine, cause = json.loads(capsys.readouterr().out)["changes"]
    assert option == "option rollout_precision: none → fp8"
    assert "mean abs(Δ): 0.0147 → 0.5" in size
    assert "training by 0 and in the rollout engine by 0.5 nats" in engine and "→" in cause


def test_a_run_compared_with_itself_differs_by_noise(run, capsys):
    assert main(["diagnose", "--compare", str(run), str(run)]) == 0
    assert "within the noise" in capsys.readouterr().out


def test_a_comparison_names_the_run_without_dumps(run, tmp_path, capsys):
    other = make_run(tmp_path / "other")
    (other / "config.yaml").write_text("lr: 0.001\n")
    assert main(["diagnose", "--compare", str(run), str(other)]) == 0
    assert "other: This run wrote no dumps" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more", [["."], ["--fail-on", "k3=1"], ["--demo"]], ids=["third run", "limit", "demo"]
)
def test_diagnose_compares_only_two_runs(more, run):
    assert main(["diagnose", *more, "--compare", str(run), str(run)]) == 2


def test_json_has_the_numbers_of_a_report(dump, capsys):
    assert main(["report", dump, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["sources"][0]["mismatch"]["samples"] == 4
    assert numbers["what_if"]
    assert numbers["diagnoses"]


def test_json_writes_no_page(dump, tmp_path):
    assert main(["report", dump, "--json"]) == 0
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


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_an_absent_path_is_refused_with_one_line(command, tmp_path, capsys):
    assert main([command, str(tmp_path / "nothing")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.fixture
def run_without_dumps(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text("lr: 0.001\n")
    return run


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_a_run_without_dumps_is_told_how_to_write_them(command, run_without_dumps, capsys):
    assert main([command, str(run_without_dumps)]) == 0
    assert "--save-debug-train-data" in capsys.readouterr().out


def test_a_run_without_dumps_shows_only_metrics(run_without_dumps):
    assert main(["report", str(run_without_dumps)]) == 0
    data = Parsed((run_without_dumps / "report.html").read_text()).data
    assert (data["samples"], data["shape"], len(data["overview"])) == (None, [], 4)


def test_the_summary_of_a_table_by_hand():
    sample = SampleParts(
        train_log_prob=[-1.0, -2.0, -3.0],
        rollout_log_prob=[-1.5, -2.0, -90.0],
        loss_mask=[1, 1, 0],
    )
    numbers = mismatch_plots.summary(TokenTable.from_parts([sample]))
    counts = [numbers[name] for name in ("tokens", "trained_tokens", "tokens_without_log_prob")]
    assert counts == [3, 2, 0]
    assert numbers["mean_abs_log_ratio"] == 0.25
    assert numbers["max_abs_log_ratio"] == 0.5
    assert numbers["k3"] == pytest.approx((np.exp(0.5) - 0.5 - 1) / 2)


INVALID = {
    "no log-prob": [SampleParts(train_log_prob=[np.nan], rollout_log_prob=[-1.0])],
    "no sample": [],
}


@pytest.mark.parametrize("parts", INVALID.values(), ids=INVALID)
def test_a_table_without_valid_tokens_has_no_plots(parts):
    page = render(page_data([source(TokenTable.from_parts(parts))]))
    assert Parsed(page).data["shape"] == []


def test_rows_with_only_an_evaluation_are_no_steps():
    rows = (
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, "train/grad_norm": 1.0},
        {"step": 2, "train/grad_norm": 1.0},
    )
    run = Source(name="run", path=Path("run"), metrics=rows, table=None, note="")
    assert page_data([run])["subtitle"] == ["run: 2 steps"]


def test_the_front_has_points_that_no_other_point_beats():
    points = [(0.0, 1.0), (1.0, 0.0), (0.5, 0.5), (0.6, 0.6), (0.5, 0.5)]
    assert _front(points) == [True, True, True, False, True]


def test_runs_that_differ_in_seeds_are_one_group():
    configurations = ((1, 1), (1, 2), (2, 1))
    runs = [replace(source(), options={1: "a", "lr": lr, "seed": s}) for lr, s in configurations]
    groups = group_runs([*runs, source(), source()])
    assert [len(group.sources) for group in groups] == [2, 1, 1, 1]


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


def plot_ids(*tables):
    return {plot["id"] for plot in page_data([source(table) for table in tables])["shape"]}


def test_single_values_are_not_plotted():
    short = make_table(4, 10)
    long = make_table(4, 20)
    assert "by-length" not in plot_ids(short) | plot_ids(long) | plot_ids(short, long)
    assert "by-length" in plot_ids(TokenTable.concatenate([short, long]))


def test_a_warning_that_returns_is_listed_again():
    rows = [{"step": i, "health/mismatch": float(held)} for i, held in enumerate([1, 1, 0, 1])]
    steps = [(warning["step"], warning["last"]) for warning in overview.warnings(rows)]
    assert steps == [(0, 1), (3, 3)]


def test_dumps_moved_with_their_run_are_found(tmp_path):
    run = make_run(tmp_path / "before")
    moved = run.rename(tmp_path / "after")
    table = open_source(str(moved)).table
    assert table is not None and len(table) == SAMPLES
