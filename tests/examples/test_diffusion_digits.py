"""The example of flow models, at a size that runs in seconds."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from examples.diffusion_digits import train
from examples.diffusion_digits.config import COMMAND_LINE, DigitsConfig, configure
from examples.diffusion_digits.data import load_halves
from examples.diffusion_digits.model import VelocityModel, rollout_copy
from examples.diffusion_digits.picture import SAMPLES, draw
from examples.diffusion_digits.sampling import sample_trajectories, trajectory_log_probs
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


def run(directory, *flags):
    assert train.main([*FLAGS, "--no-progress", "--output-dir", str(directory), *flags]) == 0
    return read_metrics(directory)


def training_rows(rows):
    return [
        {name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows
    ]


@pytest.fixture(scope="module")
def corrected(tmp_path_factory):
    directory = tmp_path_factory.mktemp("digits") / "corrected"
    correction = ("--use-tis", "--use-rs", "--rs-upper-bound", "1.5", "--rs-veto-threshold", "1e-4")
    return directory, run(directory, *correction)


def test_a_run_reports_every_step_and_ends_with_the_reward(corrected, capsys, tmp_path):
    run(
        tmp_path / "again",
        "--use-tis",
        "--use-rs",
        "--rs-upper-bound",
        "1.5",
        "--rs-veto-threshold",
        "1e-4",
    )
    printed = capsys.readouterr().out.splitlines()
    directory, rows = corrected
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert ["eval/reward" in row for row in rows] == [True, False, False, True, True]
    assert (
        printed[-1] == f"eval reward: {rows[0]['eval/reward']:.2f} -> {rows[-1]['eval/reward']:.2f}"
    )
    assert re.fullmatch(
        r"step 1/4  reward 0\.\d+  loss .*  k3 .*  weight .*  rejected .*%  time .*", printed[1]
    )
    assert [row["rollout/weight_staleness"] for row in rows[1:]] == [0, 1, 0, 1]
    assert {f"rollout_corr/logprob_abs_diff/ts_{t}" for t in (1000, 750, 500, 250)} <= set(rows[1])
    for row in rows[1:]:
        assert (
            0
            < row["rollout_corr/logprob_abs_diff_mean"]
            <= row["rollout_corr/logprob_abs_diff_max"]
        )
        assert (
            0 <= row["rollout_corr/gradient_kept_fraction"] <= 1
            and row["rollout_corr/mis_weight_max"] <= 2
        )
    assert training_rows(rows) == training_rows(read_metrics(tmp_path / "again")), (
        "the same seed, the same run"
    )
    policies = [
        torch.load(path / train.POLICY, weights_only=True)
        for path in (directory, tmp_path / "again")
    ]
    assert all(torch.equal(value, policies[1][name]) for name, value in policies[0].items())


def test_a_run_leaves_its_configuration_and_images(corrected, tmp_path):
    directory, _ = corrected
    config = yaml.safe_load((directory / "config.yaml").read_text())
    (tmp_path / "again.yaml").write_text((directory / "config.yaml").read_text())
    assert (
        configure(["--custom-config-path", str(tmp_path / "again.yaml")]).correction.rs_bounds[1]
        == 1.5
    )
    assert config["use_tis"] is True and config["sde_steps"] == 4
    samples = torch.load(directory / SAMPLES, weights_only=True)
    assert samples["before"].shape == samples["after"].shape == (4, 10, 64)
    assert not torch.equal(samples["before"], samples["after"])
    assert not [path for path in directory.iterdir() if path.name.endswith(".partial")]


def test_two_runs_are_drawn_side_by_side(corrected, tmp_path):
    alone = draw(corrected[0]).stat().st_size
    run(tmp_path / "uncorrected", "--get-mismatch-metrics")
    assert draw(corrected[0], tmp_path / "uncorrected").stat().st_size > alone > 20_000
    with pytest.raises(ValueError, match=r"nowhere/metrics\.jsonl does not exist"):
        draw(corrected[0], Path("nowhere"))
    with pytest.raises(ValueError, match="both runs are named"):
        draw(corrected[0], corrected[0])
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="has no samples"):
        draw(tmp_path / "unfinished")


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


def test_metrics_alone_leave_the_run_as_it_is(tmp_path):
    plain, measuring = (
        run(tmp_path / "plain"),
        run(tmp_path / "measuring", "--get-mismatch-metrics"),
    )
    for row, other in zip(training_rows(plain), training_rows(measuring), strict=True):
        assert row == {name: value for name, value in other.items() if "rollout_corr/" not in name}


def test_log_probs_of_the_same_weights_are_those_of_the_sampler():
    """Step by step and all steps at once; the low-precision copies differ from them."""
    model = VelocityModel(32, 2)
    digits = torch.arange(6)
    gaps = {}
    for precision in ("fp32", "bf16", "fp8"):
        copied = rollout_copy(model, precision)
        found = sample_trajectories(copied, digits, SMALL, torch.Generator().manual_seed(0))
        assert found.latents_BTP.dtype == found.rollout_log_probs_BT.dtype == torch.float32
        again = trajectory_log_probs(copied, found, SMALL).detach()
        torch.testing.assert_close(
            again, found.rollout_log_probs_BT, rtol=0, atol=2e-5 if precision == "fp32" else 1e-2
        )
        gaps[precision] = (
            (trajectory_log_probs(model, found, SMALL) - found.rollout_log_probs_BT)
            .abs()
            .mean()
            .item()
        )
        part = found.of(torch.tensor([4, 1]))
        assert torch.equal(part.digits_B, torch.tensor([4, 1]))
        assert torch.equal(part.images_BP, found.latents_BTP[[4, 1], -1])
    assert gaps["fp32"] < 1e-5 < 1e-4 < min(gaps["bf16"], gaps["fp8"])


def test_nothing_that_is_judged_by_was_trained_on():
    seen, unseen = load_halves(0)
    assert (len(seen.digits_B), len(unseen.digits_B)) == (899, 898)
    assert seen.pixels_BP.shape == (899, 64) and seen.pixels_BP.aminmax() == (-1, 1)
    together = torch.cat([seen.pixels_BP, unseen.pixels_BP])
    assert len(together.unique(dim=0)) == 1797, "no image is there twice"
    assert torch.bincount(torch.cat([seen.digits_B, unseen.digits_B])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180
    ]  # fmt: skip
    assert not torch.equal(load_halves(1)[0].digits_B, seen.digits_B)


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


def test_commands_of_the_makefile_and_the_readme_are_accepted(monkeypatch):
    monkeypatch.chdir(ROOT)
    readme = (ROOT / "examples" / "diffusion_digits" / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^(\w+) := (.*)$", makefile, re.M))
    recipe = re.findall(r"^\t\$\(BIN\)/python (\$\(DIFFUSION\) .*)$", makefile, re.M)
    made = [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], line) for line in recipe]
    shown = [
        line
        for block in re.findall(r"```\n(.*?)```", readme, re.S)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    commands = [
        line.removeprefix("python ")
        for line in [*made, *shown]
        if "-m examples.diffusion_digits.train" in line
    ]
    found = [configure(shlex.split(command)[2:]) for command in commands]
    assert len(made) == 2 and len(commands) >= 5
    assert [arguments.correction.corrects for arguments in found[:2]] == [False, True]
    assert found[0].digits.num_rollout == 100


def test_options_on_the_page_of_the_example_are_those_there_are():
    readme = (ROOT / "examples" / "diffusion_digits" / "README.md").read_text()
    for field in dataclasses.fields(DigitsConfig):
        option = COMMAND_LINE.options[field.name]
        default = option.default_text.removeprefix("default: ")
        assert f"| `--{field.name.replace('_', '-')}` | {default} | {option.help} |" in readme
