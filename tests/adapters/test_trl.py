"""Rollout correction inside TRL's GRPOTrainer: losses, gradients, metrics and dumps."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from examples.trl import sort_digits
from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.analysis.diagnosis.diagnose import diagnose
from slime_tis.analysis.dumps.readers import read
from slime_tis.analysis.dumps.what_if import what_if
from slime_tis.demo.sort_digits import Example, prepare
from slime_tis.errors import HealthAlarm
from slime_tis.policy.losses import cispo, ppo_clip, sapo
from tests.adapters.tiny import RoundedSampler, trainer

ROOT = Path(__file__).parents[2]
TIS = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1.05)
EVERYTHING = RolloutCorrectionConfig(
    use_tis=True,
    tis_level="geometric",
    tis_batch_normalize=True,
    use_rs=True,
    rs_level="token",
    rs_lower_bound=0.98,
    rs_upper_bound=1.02,
    rs_veto_threshold=1e-4,
)
PROGRESS = {
    "step_time",
    "train_runtime",
    "total_flos",
    "train_samples_per_second",
    "train_steps_per_second",
}


def first_batch(run):
    """The first batch of a run, as the loss gets it."""
    run.model.train()
    run.current_gradient_accumulation_steps = 1
    torch.manual_seed(2)
    rows = next(iter(run.get_train_dataloader()))
    batch = run._prepare_inputs(rows)
    return batch


def gradients(run, loss):
    run.model.zero_grad()
    loss.backward()
    return torch.cat(
        [
            parameter.grad.flatten()
            for parameter in run.model.parameters()
            if parameter.grad is not None
        ]
    )


def log_probs(run, batch):
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = batch["completion_ids"].shape[1]
    found = run._get_per_token_logps_and_entropies(run.model, tokens, attention, length)[0]
    return found


@pytest.mark.parametrize("tools", [False, True], ids=["", "tools"])
@pytest.mark.parametrize("config", [TIS, EVERYTHING], ids=["tis", "everything"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"])
def test_loss_and_gradient_equal_the_library(loss_type, config, tools, tmp_path):
    options = {
        "loss_type": loss_type,
        "sampler": RoundedSampler(tools=tools),
        "dtype": torch.float64,
    }
    if loss_type == "luspo":
        options["importance_sampling_level"] = "sequence"
    run, plain = trainer(tmp_path, config, **options), trainer(tmp_path, cls=GRPOTrainer, **options)
    batch, advantages = first_batch(run), first_batch(plain)["advantages"][:, None]
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    assert not tools or mask.sum() < batch["completion_mask"].sum()
    current = log_probs(run, batch)
    old = current.detach()
    found = correct(config, old, batch["sampling_per_token_logps"], mask)
    advantages = advantages.expand_as(old)
    if loss_type == "cispo":
        loss, _ = cispo(current, old, advantages, clip_low=1.0, clip_high=run.epsilon_high - 1)
    elif loss_type == "sapo":
        loss = sapo(current, old, advantages, tau_positive=1.0, tau_negative=1.05)
    elif loss_type == "luspo":  # the ratio of the sequence at every token
        ratio = (((current - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp()
        loss = -ratio * advantages
    else:
        loss, _ = ppo_clip(
            current, old, advantages, clip_low=run.epsilon_low, clip_high=run.epsilon_high
        )
    weighted = loss * found.weights * found.mask
    rows = weighted.sum(1) / mask.sum(1).clamp_min(1)
    totals = {
        "grpo": rows.mean(),
        "sapo": rows.mean(),
        "luspo": weighted.sum(1).mean(),
        "dr_grpo": weighted.sum() / (len(rows) * run.max_completion_length),
    }
    expected = totals.get(loss_type, weighted.sum() / mask.sum())
    gradient = gradients(run, expected)
    loss_of_trl = run._compute_loss(run.model, batch)
    torch.testing.assert_close(loss_of_trl, expected, rtol=1e-6, atol=1e-7)
    difference = gradients(run, loss_of_trl) - gradient
    assert difference.norm() <= 1e-6 * gradient.norm() and gradient.norm() > 0
    assert found.mask.sum() > 0 and (config is TIS or found.mask.sum() < mask.sum())


def history(run):
    torch.manual_seed(2)
    run.train()
    return [{k: v for k, v in row.items() if k not in PROGRESS} for row in run.state.log_history]


@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.1}, {"num_iterations": 2}, {"gradient_accumulation_steps": 2}],
    ids=str,
)
def test_metrics_alone_leave_the_run_bitwise_unchanged(options, tmp_path):
    plain = trainer(tmp_path, cls=GRPOTrainer, **options)
    measured = trainer(tmp_path, None, **options)
    expected, found = history(plain), history(measured)
    for row, other in zip(expected, found, strict=True):
        assert row == {name: value for name, value in other.items() if name in row}
    assert found[0]["correction/mismatch_k3_kl"] > 0
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, measured.model.state_dict()[name])


def test_the_kl_term_is_not_weighted(tmp_path):
    nothing = RolloutCorrectionConfig(
        use_rs=True, rs_level="token", rs_lower_bound=3.0, rs_upper_bound=4.0
    )
    run = trainer(tmp_path, nothing, beta=0.5)
    batch = first_batch(run)
    assert not batch["advantages"].any()
    batch["ref_per_token_logps"] = batch["ref_per_token_logps"] - 0.5
    assert run._compute_loss(run.model, batch).item() == pytest.approx(
        0.5 * (math.exp(-0.5) + 0.5 - 1), rel=1e-4
    )


def test_a_batch_with_everything_rejected_or_masked_is_ordinary(tmp_path):
    nothing = RolloutCorrectionConfig(
        use_rs=True,
        rs_level="token",
        rs_lower_bound=3.0,
        rs_upper_bound=4.0,
        rejection_normalizer="kept",
    )
    for run in (
        trainer(tmp_path, nothing),
        trainer(tmp_path, TIS, mask_truncated_completions=True),
    ):
        before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        rows = history(run)
        assert all(
            math.isfinite(value)
            for row in rows
            for value in row.values()
            if isinstance(value, float)
        )
        assert nothing is not run.rollout_correction or all(
            torch.equal(x, before[n]) for n, x in run.model.state_dict().items()
        )


def test_log_probs_that_are_not_finite_are_counted_and_not_trained(tmp_path):
    def broken(log_probs):
        for row in log_probs:
            row[0] = math.nan

    run = trainer(tmp_path, TIS, sampler=RoundedSampler(broken))
    batch = first_batch(run)
    assert not batch["advantages"][:, 0].any() and batch["advantages"].isfinite().all()
    metrics = run._metrics["train"]
    assert metrics["correction/nonfinite_token_fraction"][0] == pytest.approx(
        4 / batch["completion_mask"].sum().item()
    )


def test_accepted_tokens_are_the_divisor_if_asked(tmp_path):
    config = RolloutCorrectionConfig(
        use_rs=True,
        rs_level="token",
        rs_lower_bound=0.98,
        rs_upper_bound=1.02,
        rejection_normalizer="kept",
    )
    run = trainer(tmp_path, config, loss_type="dapo")
    batch = first_batch(run)
    assert batch["num_items_in_batch"] == batch["tool_mask"].sum() < batch["completion_mask"].sum()


def test_bypass_takes_the_rollout_policy_as_old_policy(tmp_path):
    run = trainer(tmp_path, RolloutCorrectionConfig(use_rollout_logprobs=True))
    assert run.vllm_importance_sampling_correction is False  # nothing is corrected twice
    batch = first_batch(run)
    mask = batch["completion_mask"].bool()
    assert torch.equal(batch["old_per_token_logps"][mask], batch["sampling_per_token_logps"][mask])


def test_dumps_are_read_by_report_diagnosis_and_what_if(tmp_path):
    run = trainer(tmp_path, TIS, extra={"dump_dir": tmp_path / "dump"}, max_steps=12)
    rows = history(run)
    table = read(str(tmp_path / "dump"))
    assert table.metadata["source"] == "trl" and len(table) == 48 and table.entropy is not None
    first = table.select([i for i in range(len(table)) if table.step[i] == 0])
    assert abs(first.log_ratio[first.valid]).mean() == pytest.approx(
        rows[0]["correction/train_rollout_logprob_abs_diff"], rel=1e-5
    )
    assert "rounding" in [finding.cause for finding in diagnose(table).findings]
    assert {row.name for row in what_if(table, {"tis": TIS})} == {"tis"}
    assert set(table.reward.tolist()) <= {i / 8 for i in range(9)}


def test_dumps_name_the_precision_of_the_sampler(tmp_path):
    extra = {"dump_dir": tmp_path / "dump", "rollout_precision": "bf16"}
    history(trainer(tmp_path, TIS, extra=extra))
    assert read(str(tmp_path / "dump")).metadata["rollout_precision"] == "bf16"


def test_dumps_of_an_unknown_sampler_name_no_precision(tmp_path):
    history(trainer(tmp_path, TIS, extra={"dump_dir": tmp_path / "dump"}))
    assert "rollout_precision" not in read(str(tmp_path / "dump")).metadata


class StaleSampler(RoundedSampler):
    """Reports that its samples are `age` steps old."""

    def __init__(self, age, *, per_token=False):
        super().__init__()
        self.age = age
        self.per_token = per_token

    def __call__(self, prompts, trainer):
        result = super().__call__(prompts, trainer)
        version = max(trainer.state.global_step - self.age, 0)
        versions = [version] * len(prompts)
        if self.per_token:
            versions = [[version] * len(ids) for ids in result["completion_ids"]]
        return {**result, "weight_versions": versions}


def dumped(tmp_path, **options):
    """The table of a run of four steps."""
    run = trainer(tmp_path, TIS, extra={"dump_dir": tmp_path / "dump"}, max_steps=4, **options)
    history(run)
    return read(str(tmp_path / "dump"))


@pytest.mark.parametrize("per_token", [False, True], ids=["per sample", "per token"])
def test_dumps_have_the_weight_versions_of_a_rollout_func(per_token, tmp_path):
    table = dumped(tmp_path, sampler=StaleSampler(2, per_token=per_token))
    version = table.weight_version[table.offsets[:-1]]
    assert version.tolist() == [max(step - 2, 0) for step in table.step]


@pytest.mark.parametrize("scalar", [np.int64, torch.tensor], ids=["numpy", "torch"])
def test_a_weight_version_may_be_a_scalar_of_a_library(scalar, tmp_path):
    run = trainer(tmp_path, TIS)
    batch = first_batch(run)
    versions = run._weight_versions([{"weight_versions": scalar(3)} for _ in run._lengths], batch)
    assert sorted((versions == 3).sum(1).tolist()) == sorted(run._lengths)


def test_dumps_of_unknown_weights_have_no_versions(tmp_path):
    assert dumped(tmp_path).weight_version is None


def test_with_vllm_the_version_is_the_step_of_the_last_load(tmp_path):
    run = trainer(tmp_path, TIS)
    batch = first_batch(run)
    run.use_vllm = True
    run._last_loaded_step = 3
    versions = run._weight_versions([{} for _ in run._lengths], batch)
    # TRL has shuffled the batch, so only the set of lengths is known.
    assert sorted((versions == 3).sum(1).tolist()) == sorted(run._lengths)


def test_a_wrong_number_of_weight_versions_is_refused(tmp_path):
    class Wrong(RoundedSampler):
        def __call__(self, prompts, trainer):
            return {**super().__call__(prompts, trainer), "weight_versions": [[0]] * len(prompts)}

    with pytest.raises(ValueError, match="weight_versions of sample 0 from rollout_func has 1"):
        first_batch(trainer(tmp_path, TIS, sampler=Wrong()))


def no_end(log_probs):
    for row in log_probs:
        row[-1] = 0.0


def test_an_alarm_is_a_metric_of_the_log(tmp_path):
    rows = history(trainer(tmp_path, TIS, sampler=RoundedSampler(no_end)))
    assert [row.get("health/placeholder_log_probs") for row in rows[:2]] == [1.0, 1.0]


def test_an_alarm_stops_the_run_if_asked(tmp_path):
    run = trainer(tmp_path, TIS, sampler=RoundedSampler(no_end), extra={"on_alarm": "stop"})
    with pytest.raises(HealthAlarm, match="health/placeholder_log_probs since step 0"):
        run.train()
    assert run.state.global_step == 0


def test_a_learning_rate_of_0_raises_an_alarm(tmp_path):
    rows = history(trainer(tmp_path, TIS, learning_rate=0.0, max_steps=4))
    marks = [row.get("health/unchanged_policy") for row in rows[:4]]
    assert marks == [None, None, 1.0, 1.0]


def test_a_gradient_that_is_nan_raises_an_alarm(tmp_path):
    run = trainer(tmp_path, TIS)
    logs = {"grad_norm": math.nan}
    run.model.train()
    run.log(logs)
    assert logs["health/nonfinite_gradient"] == 1.0


@pytest.mark.parametrize(
    ("options", "number"), [({}, 10), ({"log_all_metrics": True}, 48)], ids=["default", "all"]
)
def test_number_of_logged_metrics(options, number, tmp_path):
    rows = history(trainer(tmp_path, TIS, extra=options))
    assert len([name for name in rows[0] if name.startswith("correction/")]) == number


def test_every_generation_batch_has_its_own_dump(tmp_path):
    options = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 2}
    run = trainer(tmp_path, TIS, extra={"dump_dir": tmp_path / "dump"}, **options)
    history(run)
    assert len([*(tmp_path / "dump").iterdir()]) == 4 and len(read(str(tmp_path / "dump"))) == 4 * 8


def test_with_vllm_the_importance_sampling_of_trl_is_off(tmp_path):
    """`use_vllm` is set afterwards, because vLLM needs a GPU; the sampler's log-probs come in the
    same field."""
    run = trainer(tmp_path, TIS)
    run.use_vllm, run._last_loaded_step = True, 0  # its weights count as loaded
    batch = first_batch(run)
    assert "importance_sampling_ratio" not in batch and batch["sampling_per_token_logps"].any()
    with_vllm = run._compute_loss(run.model, batch)
    run.use_vllm = False
    assert torch.equal(with_vllm, run._compute_loss(run.model, batch))


def test_a_trainer_that_unsloth_has_replaced_is_the_base():
    """unsloth sets trl.GRPOTrainer to a subclass when it is imported."""
    code = (
        "import trl; trl.GRPOTrainer = type('UnslothGRPOTrainer', (trl.GRPOTrainer,), {}); from"
        " slime_tis.integrations.trl import CorrectedGRPOTrainer as C; assert issubclass(C,"
        " trl.GRPOTrainer)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        pytest.param(TIS, {"loss_type": "vespo"}, "vespo", id="vespo"),
        pytest.param(
            TIS, {"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold", id="OPSM"
        ),
        pytest.param(
            RolloutCorrectionConfig(old_logprobs="interpolate"), {}, "interpolate", id="interpolate"
        ),
        pytest.param(
            RolloutCorrectionConfig(divergence_mask="binary_tv"),
            {"num_iterations": 2},
            "num_iterations=1",
            id="mask",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(config, options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, config, **options)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    path = tmp_path_factory.mktemp("example") / "sort_digits"
    prepare(
        path,
        example=Example(
            train_prompts=64, eval_prompts=16, accuracy=(0.0, 1.0), sampled_accuracy=0.0
        ),
    )
    return path


def test_the_example_runs(example, tmp_path, capsys):
    sort_digits.run(example, tmp_path / "run", steps=1)
    assert "held-out accuracy: " in capsys.readouterr().out
    assert len(read(str(tmp_path / "run" / "dump"))) == 128


def test_two_processes_equal_one(tmp_path):
    """The second-moment bound and the batch's mean weight depend on the tokens of both
    processes."""
    script = Path(__file__).with_name("two_processes.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    ended = subprocess.run(
        [*command, str(script), str(tmp_path)], timeout=300, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["metrics"] == second["metrics"]
    config = RolloutCorrectionConfig(**first["config"])
    columns = [torch.tensor([*first[name], *second[name]]) for name in ("old", "rollout", "mask")]
    found = correct(config, *columns)
    expected = found.statistics.metrics()
    correction_metrics = {name: first["metrics"][name] for name in expected}
    assert correction_metrics == pytest.approx(expected, rel=1e-6)
    advantages = torch.tensor([*first["advantages"], *second["advantages"]])
    torch.testing.assert_close(
        advantages, torch.tensor(first["raw"])[:, None] * found.weights * found.mask
    )
