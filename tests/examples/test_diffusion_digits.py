"""The example of flow models, at a size that runs in seconds."""

import contextlib
import dataclasses
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from examples.diffusion_digits import train
from examples.diffusion_digits.config import COMMAND_LINE, DigitsConfig, configure
from examples.diffusion_digits.data import load_halves
from examples.diffusion_digits.model import VelocityModel, rollout_copy
from examples.diffusion_digits.picture import SAMPLES, draw
from examples.diffusion_digits.sampling import (
    Trajectories,
    sample_trajectories,
    trajectory_log_probs,
)
from tests.runs import ROOT, read_metrics

SMALL = DigitsConfig(
    hidden_size=32,
    layers=1,
    pretrain_steps=20,
    judge_steps=30,
    num_rollout=4,
    rollout_batch_size=3,
    n_samples_per_prompt=4,
    sde_steps=4,
    update_weights_interval=2,
    rollout_precision="fp8",
    eval_interval=3,
    eval_samples=4,
)
FLAGS = [
    word
    for name, value in vars(SMALL).items()
    if value is not None
    for word in (f"--{name.replace('_', '-')}", str(value))
]


CORRECTION = [
    "--use-tis",
    "--use-rs",
    "--rs-upper-bound",
    "1.5",
    "--rs-veto-threshold",
    "1e-4",
]


def run(directory: Path, *flags: str) -> list[dict[str, Any]]:
    """Trains the small model and returns the rows of its metrics."""
    assert train.main([*FLAGS, "--no-progress", "--output-dir", str(directory), *flags]) == 0
    return read_metrics(directory)


def training_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without times and memory, which differ from run to run."""
    return [
        {name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows
    ]


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run that several tests look at."""

    directory: Path
    rows: list[dict[str, Any]]
    printed: list[str]


@pytest.fixture(scope="module")
def corrected(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run with token weights, rejection and a veto."""
    directory = tmp_path_factory.mktemp("digits") / "corrected"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        rows = run(directory, *CORRECTION)
    return FinishedRun(directory, rows, output.getvalue().splitlines())


def test_every_step_has_a_row(corrected):
    assert [row["step"] for row in corrected.rows] == [0, 1, 2, 3, 4]


def test_evaluation_follows_its_interval(corrected):
    evaluated = ["eval/reward" in row for row in corrected.rows]
    assert evaluated == [True, False, False, True, True]


def test_the_last_line_compares_the_evaluations(corrected):
    first = corrected.rows[0]["eval/reward"]
    last = corrected.rows[-1]["eval/reward"]
    assert corrected.printed[-1] == f"eval reward: {first:.2f} -> {last:.2f}"


def test_a_line_per_step_has_the_main_metrics(corrected):
    line = r"step 1/4  reward 0\.\d+  loss .*  k3 .*  weight .*  rejected .*%  time .*"
    assert re.fullmatch(line, corrected.printed[1])


def test_staleness_follows_the_update_interval(corrected):
    assert [row["rollout/weight_staleness"] for row in corrected.rows[1:]] == [0, 1, 0, 1]


def test_the_mismatch_is_reported_per_time_step(corrected):
    names = {f"rollout_corr/logprob_abs_diff/ts_{time}" for time in (1000, 750, 500, 250)}
    assert names <= set(corrected.rows[1])


def test_correction_metrics_are_in_their_ranges(corrected):
    for row in corrected.rows[1:]:
        mean = row["rollout_corr/logprob_abs_diff_mean"]
        assert 0 < mean <= row["rollout_corr/logprob_abs_diff_max"]
        assert 0 <= row["rollout_corr/gradient_kept_fraction"] <= 1
        assert row["rollout_corr/mis_weight_max"] <= 2


def test_the_same_seed_repeats_the_run(corrected, tmp_path):
    again = run(tmp_path / "again", *CORRECTION)
    assert training_rows(corrected.rows) == training_rows(again)
    policy = torch.load(corrected.directory / train.POLICY, weights_only=True)
    repeated = torch.load(tmp_path / "again" / train.POLICY, weights_only=True)
    assert all(torch.equal(value, repeated[name]) for name, value in policy.items())


def test_a_run_writes_the_options_that_are_set(corrected):
    config = yaml.safe_load((corrected.directory / "config.yaml").read_text())
    assert config["use_tis"] is True
    assert config["sde_steps"] == 4


def test_the_written_configuration_can_be_loaded(corrected):
    file = str(corrected.directory / "config.yaml")
    assert configure(["--custom-config-path", file]).correction.rs_bounds[1] == 1.5


def test_images_from_before_and_after_differ(corrected):
    samples = torch.load(corrected.directory / SAMPLES, weights_only=True)
    assert samples["before"].shape == samples["after"].shape == (4, 10, 64)
    assert not torch.equal(samples["before"], samples["after"])


def test_no_partial_file_is_left(corrected):
    assert not list(corrected.directory.glob("*.partial"))


def test_two_runs_are_drawn_side_by_side(corrected, tmp_path):
    one_run = draw(corrected.directory).stat().st_size
    run(tmp_path / "uncorrected", "--get-mismatch-metrics")
    two_runs = draw(corrected.directory, tmp_path / "uncorrected").stat().st_size
    assert two_runs > one_run > 20_000


def test_a_missing_run_is_not_drawn(corrected):
    with pytest.raises(ValueError, match=r"nowhere/metrics\.jsonl does not exist"):
        draw(corrected.directory, Path("nowhere"))


def test_a_run_is_not_compared_with_itself(corrected):
    with pytest.raises(ValueError, match="both runs are named"):
        draw(corrected.directory, corrected.directory)


def test_an_unfinished_run_is_not_drawn(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="has no samples"):
        draw(tmp_path)


@pytest.mark.parametrize(
    ("flags", "prefix"),
    [
        (["--get-mismatch-metrics"], "rollout_corr/"),
        (["--use-rollout-logprobs", "--use-rs", "--rs-level", "geometric"], "actor/rollout_corr/"),
        (
            ["--use-rollout-logprobs", "--policy-loss", "reinforce", "--use-tis"],
            "actor/rollout_corr/",
        ),
        (["--use-tis", "--tis-batch-normalize", "--num-steps-per-rollout", "3"], "rollout_corr/"),
    ],
    ids=["metrics", "bypass, rejection", "policy gradient", "normalised, three steps"],
)
def test_every_way_of_correcting_trains(tmp_path, flags, prefix):
    rows = run(tmp_path, *flags)
    assert all(abs(row["train/loss"]) < 10 and row["train/skipped_steps"] == 0 for row in rows[1:])
    names = {name for row in rows for name in row if "rollout_corr/" in name}
    assert names and all(name.startswith(prefix) for name in names)


def test_measuring_does_not_change_the_run(tmp_path):
    plain = training_rows(run(tmp_path / "plain"))
    measuring = training_rows(run(tmp_path / "measuring", "--get-mismatch-metrics"))
    for row, measured in zip(plain, measuring, strict=True):
        trained = {name: value for name, value in measured.items() if "rollout_corr/" not in name}
        assert row == trained


MODEL = VelocityModel(32, 2)


def trajectories(precision: str) -> tuple[VelocityModel, Trajectories]:
    """A copy of the model in a precision, and six of its trajectories."""
    copied = rollout_copy(MODEL, precision)
    generator = torch.Generator().manual_seed(0)
    return copied, sample_trajectories(copied, torch.arange(6), SMALL, generator)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_latents_have_the_dtype_of_training(precision):
    _, sampled = trajectories(precision)
    assert sampled.latents_BTP.dtype == sampled.rollout_log_probs_BT.dtype == torch.float32


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 1e-2), ("fp8", 1e-2)], ids=str
)
def test_all_steps_at_once_equal_step_by_step(precision, tolerance):
    copied, sampled = trajectories(precision)
    again = trajectory_log_probs(copied, sampled, SMALL).detach()
    torch.testing.assert_close(again, sampled.rollout_log_probs_BT, rtol=0, atol=tolerance)


def test_only_low_precision_differs_from_the_model():
    gaps = {}
    for precision in ("fp32", "bf16", "fp8"):
        _, sampled = trajectories(precision)
        log_probs = trajectory_log_probs(MODEL, sampled, SMALL)
        gaps[precision] = (log_probs - sampled.rollout_log_probs_BT).abs().mean().item()
    assert gaps["fp32"] < 1e-5
    assert min(gaps["bf16"], gaps["fp8"]) > 1e-4


def test_a_selection_of_trajectories():
    _, sampled = trajectories("fp32")
    selected = sampled.of(torch.tensor([4, 1]))
    assert torch.equal(selected.digits_B, torch.tensor([4, 1]))
    assert torch.equal(selected.images_BP, sampled.latents_BTP[[4, 1], -1])


def test_halves_have_all_images_once():
    seen, unseen = load_halves(0)
    assert (len(seen.digits_B), len(unseen.digits_B)) == (899, 898)
    images = torch.cat([seen.pixels_BP, unseen.pixels_BP])
    assert len(images.unique(dim=0)) == 1797


def test_halves_together_have_all_digits():
    seen, unseen = load_halves(0)
    counts = torch.bincount(torch.cat([seen.digits_B, unseen.digits_B]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_pixels_lie_between_minus_one_and_one():
    seen, _ = load_halves(0)
    assert seen.pixels_BP.shape == (899, 64)
    assert seen.pixels_BP.aminmax() == (-1, 1)


def test_the_seed_decides_the_halves():
    assert not torch.equal(load_halves(1)[0].digits_B, load_halves(0)[0].digits_B)


def test_a_gradient_that_is_not_finite_is_left_out(tmp_path):
    arguments = configure([*FLAGS, "--output-dir", str(tmp_path)])
    loop = train.Run(arguments)
    before = loop.model.last.weight.clone()
    loop.teacher = torch.nn.Sequential(torch.nn.Linear(64, 10).requires_grad_(False))
    with torch.no_grad():
        loop.model.last.bias.fill_(torch.inf)
    row = loop.train_rollout(0)
    assert row["train/skipped_steps"] == 1 and torch.equal(loop.model.last.weight, before)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--n-samples-per-prompt 1",
            "--n-samples-per-prompt is 1 but the images of a digit are compared",
        ),
        (
            "--num-steps-per-rollout 3",
            "--num-steps-per-rollout is 3 but a rollout has 256 trajectories; choose",
        ),
        (
            "--policy-loss gspo",
            "--policy-loss is gspo but SDE steps have ppo and reinforce; choose one.",
        ),
        (
            "--old-logprobs interpolate",
            "--old-logprobs is interpolate but SDE steps have no version per token",
        ),
        (
            "--rollout-precision int4",
            "--rollout-precision is 'int4' but must be one of fp32, bf16, fp8.",
        ),
    ],
    ids=[
        "one sample per prompt",
        "steps that do not divide",
        "policy-loss",
        "old-logprobs",
        "precision",
    ],
)
def test_refusals(flags, message, capsys):
    assert train.main(flags.split()) == 2
    assert capsys.readouterr().err.startswith(message)


EXAMPLE_PAGE = (ROOT / "examples" / "diffusion_digits" / "README.md").read_text()


def makefile_commands() -> list[str]:
    """The arguments of python in `make train-diffusion`, with the variables replaced."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^(\w+) := (.*)$", makefile, re.M))
    recipe = re.findall(r"^\t\$\(BIN\)/python (\$\(DIFFUSION\) .*)$", makefile, re.M)
    return [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], line) for line in recipe]


def page_commands() -> list[str]:
    """The arguments of python in the page's commands."""
    commands = []
    for block in re.findall(r"```\n(.*?)```", EXAMPLE_PAGE, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if "-m examples.diffusion_digits.train" in line:
                commands.append(line.removeprefix("python "))
    return commands


def test_the_makefile_trains_without_correction_first(monkeypatch):
    monkeypatch.chdir(ROOT)
    configured = [configure(shlex.split(command)[2:]) for command in makefile_commands()]
    assert [arguments.correction.corrects for arguments in configured] == [False, True]
    assert configured[0].digits.num_rollout == 100


def test_the_commands_on_the_page_are_accepted(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = page_commands()
    assert len(commands) >= 3
    for command in commands:
        configure(shlex.split(command)[2:])


@pytest.mark.parametrize("field", dataclasses.fields(DigitsConfig), ids=lambda field: field.name)
def test_the_page_explains_every_option(field):
    option = COMMAND_LINE.options[field.name]
    default = option.default_text.removeprefix("default: ")
    flag = "--" + field.name.replace("_", "-")
    assert f"| `{flag}` | {default} | {option.help} |" in EXAMPLE_PAGE
