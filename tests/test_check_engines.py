"""The comparison of both engines before the first step, and after the first weight update."""

import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO

import pytest
import torch

from slime_tis.main import _parser, train
from slime_tis.parity.parity_command import sides
from slime_tis.trainer import check_engines, setup
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.runs import make_task, run_here

generate = LocalEngine.generate


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A task whose runs compare the engines, which `run_here` does only on request."""
    return [*make_task(tmp_path_factory.mktemp("task")), "--check-engines", "warn"]


def plant(monkeypatch, fault):
    monkeypatch.setattr(LocalEngine, "generate", fault)


def hotter(engine, prompts, sampling, seed):
    hot = replace(sampling, temperature=1.5 * sampling.temperature)
    return generate(engine, prompts, hot, seed)


def numbers(rows):
    """The metrics that do not depend on the clock."""
    return [
        {name: row[name] for name in row if not name.startswith("perf/") and name != "time"}
        for row in rows
    ]


@dataclass
class CheckedRuns:
    """A run with the check, its output, and the same run without the check."""

    checked: list[dict[str, float]]
    unchecked: list[dict[str, float]]
    stdout: str
    stderr: str


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp8", "int8", "int4"])
def healthy(
    request: pytest.FixtureRequest, task: list[str], tmp_path_factory: pytest.TempPathFactory
) -> CheckedRuns:
    directory = tmp_path_factory.mktemp("healthy")
    flags = [*task, "--num-rollout", "2", "--rollout-precision", request.param]
    stdout = StringIO()
    stderr = StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        checked = run_here(flags, directory / "checked")
        unchecked = run_here([*flags, "--check-engines", "off"], directory / "unchecked")
    return CheckedRuns(checked, unchecked, stdout.getvalue(), stderr.getvalue())


def test_engines_that_agree_raise_no_alarm(healthy):
    assert healthy.stdout.count("engines agree") == 1
    assert "disagree" not in healthy.stderr


def test_the_check_changes_no_number(healthy):
    assert numbers(healthy.checked) == numbers(healthy.unchecked)


def test_a_check_without_short_prompts_does_not_end_the_run(run, monkeypatch, capsys):
    monkeypatch.setattr(check_engines, "MAX_PROMPT_TOKENS", 1)
    assert len(run("--num-rollout", "1")) == 1
    assert "the engines are not compared" in capsys.readouterr().out


def test_a_check_without_answers_does_not_end_the_run(run, monkeypatch, capsys):
    def silent(engine, prompts, sampling, seed):
        groups = generate(engine, prompts, sampling, seed)
        if len(prompts) == check_engines.PROMPTS:
            return [[] for _ in groups]
        return groups

    plant(monkeypatch, silent)
    assert len(run("--num-rollout", "1")) == 1
    assert "gave no answer" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_another_temperature_is_a_warning(run, precision, monkeypatch, capsys):
    plant(monkeypatch, hotter)
    assert len(run("--num-rollout", "1", "--rollout-precision", precision)) == 1
    assert "samples at 1.5 times" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_another_temperature_can_stop_the_run(task, tmp_path, precision, monkeypatch, capsys):
    plant(monkeypatch, hotter)
    flags = [*task, "--num-rollout", "1", "--rollout-precision", precision]
    stopped = tmp_path / "stopped"
    assert train([*flags, "--check-engines", "stop", "--output-dir", str(stopped)]) == 1
    assert "samples at 1.5 times" in capsys.readouterr().err
    assert not (stopped / "metrics.jsonl").exists()
    assert (stopped / "engine_check.pt").exists()


PARITY = {
    "fp32": "--precision fp32 --reference training --other local",
    "bf16": "--precision fp32 --reference training --other local --other-precision bf16",
    "int8": "--precision fp32 --reference full --other training",
}


@pytest.mark.parametrize("precision", PARITY)
def test_message_has_a_command_that_compares_operations(run, precision, monkeypatch, capsys):
    plant(monkeypatch, hotter)
    run("--num-rollout", "1", "--rollout-precision", precision)
    (command,) = re.findall("`slime-tis parity (.*?)`", capsys.readouterr().err)
    assert command.endswith(PARITY[precision])
    chosen = _parser().parse_args(["parity", *shlex.split(command)])
    assert sides(chosen)[0].checkpoint.endswith("model")


LOGITS = {
    "temperature": (
        lambda logits: logits / 1.3,
        "samples at 1.3 times the training temperature, or scales",
    ),
    "bias": (
        lambda logits: logits + 2 * torch.nn.functional.one_hot(torch.tensor(5), logits.shape[-1]),
        "ids [5]",
    ),
}


@pytest.mark.parametrize("fault", LOGITS)
def test_a_sampler_setting_is_named_without_scoring_again(
    task, tmp_path, fault, monkeypatch, capsys
):
    change, words = LOGITS[fault]
    build = LocalEngine.__init__

    def changed(engine, *arguments, **options):
        build(engine, *arguments, **options)
        engine._model.get_output_embeddings().register_forward_hook(
            lambda _, __, logits: change(logits)
        )

    monkeypatch.setattr(LocalEngine, "__init__", changed)
    monkeypatch.setattr(check_engines, "MAX_PROVEN_BYTES", 0)  # as of a large model
    flags = [*task, "--num-rollout", "1", "--rollout-precision", "fp32"]
    flags += ["--check-engines", "stop", "--output-dir", str(tmp_path / "stopped")]
    assert train(flags) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert words in message
    assert "the 8 likeliest tokens at 16 positions" in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(
            "embedding.word_embeddings.weight",
            "embedding: transformers and training",
            id="embedding",
        ),
        pytest.param(
            "decoder.layers.1.mlp.linear_fc1.weight",
            "The largest own difference is that of up projection of layer 1",
            id="layer",
        ),
        pytest.param(
            "decoder.final_layernorm.weight",
            "The largest own difference is that of final norm",
            id="final norm",
        ),
    ],
)
def test_the_operation_of_training_that_differs_is_named(run, name, words, monkeypatch, capsys):
    load = TrainingEngine._load_weights

    def wrong(engine, keep_reference):
        reference = load(engine, keep_reference)
        with torch.no_grad():
            engine.model.module.get_parameter(name).flatten()[::2].mul_(0.3)
        return reference

    monkeypatch.setattr(TrainingEngine, "_load_weights", wrong)
    run("--num-rollout", "1", "--rollout-precision", "fp32", name="wrong")
    message = capsys.readouterr().err
    assert words in " ".join(message.split())


def test_the_wrong_one_of_four_servers_is_named(run, monkeypatch, capsys):
    def one_is_hotter(engine, prompts, sampling, seed):
        engines = [hotter if server == 2 else generate for server in range(4)]
        answers = [answer(engine, prompts, sampling, seed) for answer in engines]
        groups = [answers[index % 4][index] for index in range(len(prompts))]
        for index, group in enumerate(groups):
            for sample in group:
                sample.rollout_workers = [index % 4] * sample.response_length
        return groups

    plant(monkeypatch, one_is_hotter)
    monkeypatch.setattr(LocalEngine, "workers", ("http://a", "http://b", "http://c", "http://d"))
    rows = run("--num-rollout", "1", "--rollout-precision", "int8", name="warned")
    assert "differs from the others (http://c)" in " ".join(capsys.readouterr().err.split())
    assert rows[0]["train/worst_worker"] == 2
    assert rows[0]["train/worst_worker_ratio"] > 1.5


@pytest.fixture
def repeated_check(monkeypatch):
    """Repeats the check after the first update, as for an engine with a prefix cache."""
    build = setup.EngineCheck
    monkeypatch.setattr(setup, "EngineCheck", lambda **values: build(**{**values, "repeats": True}))


UPDATED = ("--num-rollout", "2", "--rollout-precision", "fp32", "--lr", "1e-2")


@pytest.mark.usefixtures("repeated_check")
def test_updated_weights_raise_no_alarm(run, capsys):
    run(*UPDATED)
    assert "prefix cache" not in capsys.readouterr().err


@pytest.mark.usefixtures("repeated_check")
def test_older_weights_after_the_first_update_are_found(run, monkeypatch, capsys):
    update = LocalEngine.update_weights

    def first_only(engine, source, version):
        if version == 0:
            update(engine, source, version)
        engine.weight_version = version

    monkeypatch.setattr(LocalEngine, "update_weights", first_only)
    run(*UPDATED)
    assert capsys.readouterr().err.count("stale prefix cache") == 1
