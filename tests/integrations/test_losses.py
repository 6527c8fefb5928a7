"""Losses of other frameworks with our correction, and the parts of slime that user functions import."""

import importlib
import math
import pickle
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slime_tis import RolloutCorrectionConfig, context_parallel_slices, correct
from slime_tis.correction import within_bound
from slime_tis.integrations import losses, slime_modules
from slime_tis.policy.losses import ppo_clip
from slime_tis.user_functions import load_function
from tests.golden.methods import cases
from tests.integrations import peer_losses as peers
from tests.runs import free_port, spawn

LENGTHS = (5, 3, 6)
METRICS = RolloutCorrectionConfig(get_mismatch_metrics=True)
NOTHING = RolloutCorrectionConfig(use_rs=True, rs_lower_bound=90.0, rs_upper_bound=99.0)
CONFIGS = {
    "tis": RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1.1),
    "geometric": RolloutCorrectionConfig(
        use_tis=True, use_rs=True, rs_level="geometric", rs_upper_bound=1.1
    ),
    "veto": RolloutCorrectionConfig(
        use_tis=True,
        tis_level="prefix",
        rs_veto_threshold=0.75,
        rollout_rs="token_k3",
        rollout_rs_threshold=0.02,
    ),
}


@dataclass
class Batch:
    """[B, T] in float64."""

    log_probs: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor


def batch(broken=None, mask=1.0):
    """`broken` replaces the sampler's second log-prob of each row."""
    generator = torch.Generator().manual_seed(0)
    shape = len(LENGTHS), max(LENGTHS)

    def noise(scale):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    valid = (torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]).double() * mask
    rollout = -2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    old = rollout + noise(0.2)
    current = (old + noise(0.2)).requires_grad_()
    if broken is not None:
        rollout[:, 1] = broken
    return Batch(current, old, rollout, noise(1.0)[:, :1] * valid, valid)


def skyrl(config, x):
    loss = peers.skyrl if config is None else losses.skyrl(peers.skyrl, config)
    options = peers.skyrl_options()
    options.policy_loss_type = "regular" if config is None else "slime_tis"
    advantages = x.advantages / x.mask.sum().clamp(min=1)  # as SkyRL forms the mean
    return loss(
        x.log_probs, x.old, advantages, config=options, loss_mask=x.mask, rollout_logprobs=x.rollout
    )


def openrlhf(config, x):
    loss = peers.openrlhf() if config is None else losses.openrlhf(peers.openrlhf(), config)
    total, _, _, kl, rejected = loss(
        x.log_probs, x.old, x.advantages, action_mask=x.mask, rollout_log_probs=x.rollout
    )
    return total, {"kl": kl, "rejected_fraction": rejected}


def nemo(config, x):
    loss = peers.nemo() if config is None else losses.NemoLoss(peers.nemo(), config)
    columns = {"prev_logprobs": x.old, "generation_logprobs": x.rollout, "advantages": x.advantages}
    data = {
        name: torch.nn.functional.pad(y, (1, 0))
        for name, y in {**columns, "token_mask": x.mask}.items()
    }
    data["sample_mask"] = x.mask.any(1).double()
    return loss(x.log_probs, data, x.mask.any(1).sum(), x.mask.sum().clamp(min=1))


def areal(config, x, packed=False):
    metrics = {}
    loss = peers.areal if config is None else losses.areal(peers.areal, config, metrics.update)
    columns = {
        "prox_logp": x.old,
        "logprobs": x.rollout,
        "advantages": x.advantages,
        "loss_mask": x.mask,
    }
    current = x.log_probs
    if packed:
        rows = [slice(0, length) for length in LENGTHS]
        columns = {
            name: torch.cat([y[i, row] for i, row in enumerate(rows)])
            for name, y in columns.items()
        }
        columns["cu_seqlens"] = torch.tensor([0, *LENGTHS]).cumsum(0)
        current = torch.cat([current[i, row] for i, row in enumerate(rows)])
    options = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None, "rejection_sampling": None}
    return loss(current, torch.zeros_like(current), columns, **options), metrics


def prime_rl(config, x):
    loss = peers.prime_rl if config is None else losses.prime_rl(peers.prime_rl, config)
    columns = x.log_probs, x.rollout, x.advantages, x.mask.bool()
    rows = [
        loss(peers.LossInputs(p[:n], q[:n], None, a[:n], m[:n]))
        for n, p, q, a, m in zip(LENGTHS, *columns, strict=True)
    ]
    return sum(row.loss for row in rows) / x.mask.sum().clamp(min=1), rows[0].metrics


def ms_swift(config, x):
    trainer = SimpleNamespace(
        rollout_importance_sampling_mode="token_mask", disable_rollout_importance_sampling=False
    )
    weights = None
    if config is not None:
        log_ratio, weights = losses.ms_swift(config)(trainer, x.old, x.rollout, x.mask.bool())
        assert config is METRICS or log_ratio.isfinite().all()
    return weighted_ppo(x, weights), {}


def open_instruct(config, x):
    rho = None
    if config is not None:
        rollout = x.rollout.nan_to_num(nan=1.0)  # what open-instruct's mask_logprobs does
        mask = x.mask.bool()
        rho = losses.open_instruct(peers.RhoCorrection, config)(
            x.old, rollout, mask, x.advantages, None
        )
    return weighted_ppo(x, None if rho is None else rho.weights), {} if rho is None else rho.metrics


def weighted_ppo(x, weights):
    loss, _ = ppo_clip(x.log_probs, x.old, x.advantages)
    loss = loss if weights is None else loss * weights
    return (loss * x.mask).sum() / x.mask.sum().clamp(min=1)


FRAMEWORKS = {
    "skyrl": skyrl,
    "openrlhf": openrlhf,
    "nemo": nemo,
    "areal": areal,
    "areal packed": lambda config, x: areal(config, x, packed=True),
    "prime_rl": prime_rl,
    "ms_swift": ms_swift,
    "open_instruct": open_instruct,
}


def gradient(loss, x):
    found = torch.autograd.grad(loss, x.log_probs)[0]
    return found


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_loss_and_gradient_equal_the_library(framework, name):
    x, config = batch(), CONFIGS[name]
    total = x.mask.sum()
    if framework == "prime_rl":
        config = replace(config, use_tis=False, use_rollout_logprobs=True, rs_upper_bound=1.05)
        found = correct(config, x.log_probs, x.rollout, x.mask)
        log_ratio = x.log_probs - x.rollout
        terms = -x.advantages * log_ratio.exp() * found.mask + 1e-3 * x.mask * log_ratio.square()
        expected = terms.sum() / total
    else:
        found = correct(config, x.old, x.rollout, x.mask)
        expected = found.mean(ppo_clip(x.log_probs, x.old, x.advantages)[0])
    assert found.mask.sum() > 0 and (name == "tis" or found.mask.sum() < total)
    loss, metrics = FRAMEWORKS[framework](config, x)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient(loss, x), gradient(expected, x), rtol=1e-6, atol=1e-12)
    rejected = [value for key, value in metrics.items() if key.endswith("rejected_fraction")]
    assert rejected in ([], [pytest.approx(1 - (found.mask.sum() / total).item())])


def test_bypass_compares_with_the_sampler():
    config = RolloutCorrectionConfig(
        use_rollout_logprobs=True,
        divergence_mask="binary_tv",
        divergence_mask_bound=0.05,
        rs_veto_threshold=0.5,
    )
    for framework in ("skyrl", "openrlhf", "nemo", "areal"):
        x = batch()
        found = correct(
            config,
            x.log_probs,
            x.rollout,
            x.mask,
            current_log_probs=x.log_probs.detach(),
            advantages=x.advantages,
        )
        expected = found.mean(ppo_clip(x.log_probs, x.rollout, x.advantages)[0])
        loss, _ = FRAMEWORKS[framework](config, x)
        assert 0 < found.mask.sum() < x.mask.sum()
        torch.testing.assert_close(gradient(loss, x), gradient(expected, x), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_metrics_alone_leave_the_loss_as_it_is(framework):
    x = batch()
    plain, _ = FRAMEWORKS[framework](None, x)
    loss, metrics = FRAMEWORKS[framework](METRICS, x)
    assert torch.equal(loss, plain) and torch.equal(gradient(loss, x), gradient(plain, x))
    if framework in ("skyrl", "areal", "prime_rl"):
        assert metrics["correction/mismatch_k3_kl"] > 0


BYPASS_FRAMEWORKS = sorted(FRAMEWORKS.keys() - {"ms_swift", "open_instruct"})


@pytest.mark.parametrize("broken", [math.nan, -math.inf, -9999.0, -1e6, -500.0], ids=str)
@pytest.mark.parametrize("policy", ["reject", "neutral"])
@pytest.mark.parametrize("framework", BYPASS_FRAMEWORKS)
def test_bypass_is_finite_at_any_rollout_log_prob(framework, policy, broken):
    """The frameworks take exp of log π_θ − log π_rollout without a bound."""
    x = batch(broken=broken)
    config = RolloutCorrectionConfig(use_rollout_logprobs=True, nonfinite_policy=policy)
    loss, _ = FRAMEWORKS[framework](config, x)
    assert loss.isfinite()
    assert gradient(loss, x).isfinite().all()


def test_log_probs_within_the_bound_keep_their_bits():
    other = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    log_probs = torch.tensor([-1.3, -20.9, -101.0, -9999.0, math.nan])
    assert within_bound(log_probs, other).tolist() == [*log_probs[:2].tolist(), -21.0, -1.0, -1.0]


@pytest.mark.parametrize("broken", [math.nan, -math.inf, -500.0], ids=str)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_log_probs_that_are_not_finite_are_counted_and_not_trained(framework, broken):
    x = batch(broken=broken)
    config = RolloutCorrectionConfig(use_rs=True, rs_upper_bound=1e4)
    loss, metrics = FRAMEWORKS[framework](config, x)
    found = gradient(loss, x)
    assert loss.isfinite() and found.isfinite().all() and found.any() and not found[:, 1].any()
    name = {"nemo": "correction/nonfinite_fraction"}.get(
        framework, "correction/nonfinite_token_fraction"
    )
    if name in metrics and not math.isfinite(broken):
        share = 1 / LENGTHS[0] if framework == "prime_rl" else len(LENGTHS) / sum(LENGTHS)
        assert float(metrics[name]) == pytest.approx(share)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_batch_with_everything_rejected_or_masked_is_ordinary(framework):
    for x, config in ((batch(), NOTHING), (batch(mask=0.0), CONFIGS["geometric"])):
        if framework == "prime_rl":
            config = replace(config, use_tis=False)
        if framework == "openrlhf" and not x.mask.any():
            continue  # OpenRLHF's own mean divides by 0
        loss, _ = FRAMEWORKS[framework](config, x)
        found = gradient(loss, x)
        assert loss.isfinite() and found.isfinite().all()
        assert framework == "prime_rl" or not found.any()  # its pull to the sampler stays


GEOMETRIC = {"use_tis": True, "tis_upper_bound": math.inf, "use_rs": True, "rs_level": "geometric"}
SKYRL = {
    "geometric": {
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.99,
        "rs_upper_bound": 1.01,
    },
    "product": {
        "use_rs": True,
        "rs_level": "sequence",
        "rs_lower_bound": 0.5,
        "rs_upper_bound": 2.0,
    },
    "token": {"use_tis": True},
    "sequence": {"use_tis": True, "tis_level": "sequence", "tis_upper_bound": 5.0},
}


def bounded(mode, low, high):
    return {"use_tis": True, "tis_mode": mode, "tis_lower_bound": low, "tis_upper_bound": high}


def openrlhf_options(params):
    low, high = params["is_correction_threshold"]
    if params["is_correction_level"] == "seq":
        return GEOMETRIC | {"rs_lower_bound": low, "rs_upper_bound": high}
    return bounded(params["is_correction_mode"], low, high)


def nemo_options(params):
    high, low = (params.get(f"truncated_importance_sampling_ratio{end}") for end in ("", "_min"))
    return {
        "seq-mask-tis": GEOMETRIC | {"rs_lower_bound": low, "rs_upper_bound": high},
        "icepop": bounded("mask", low, high),
        "tis": {"use_tis": True, "tis_upper_bound": high},
    }[params["truncated_importance_sampling_type"]]


def skyrl_options(params):
    return SKYRL[next(iter(params.values()))]


def golden(method, options, framework, keep):
    """Cases of a peer, but for the batch on which the clamped PPO ratios of the peers differ from PPO."""
    entries = [
        entry
        for entry in cases(method, without="token_level_loss")
        if entry.values[0].batch != "tiny"
    ]
    chosen = [entry for entry in entries if keep(entry.values[0].params)]
    return [pytest.param(*entry.values, options, framework, id=entry.id) for entry in chosen]


@pytest.mark.parametrize(
    ("case", "options", "framework"),
    [
        *golden(
            "openrlhf.policy_loss",
            openrlhf_options,
            "openrlhf",
            lambda p: p["is_correction_gating"] == "ratio",
        ),
        *golden("nemo_rl.clipped_pg", nemo_options, "nemo", bool),
        *golden(
            "skyrl.off_policy_correction",
            skyrl_options,
            "skyrl",
            lambda p: next(iter(p.values())) in SKYRL and len(p) == 1,
        ),
    ],
)
def test_the_peers_own_corrections(case, options, framework):
    """A peer's loss without its correction, wrapped, equals the peer's corrected loss, in float64."""
    columns = [
        case.input(name).double() for name in ("logp", "old", "sampler", "advantages", "mask")
    ]
    x = Batch(columns[0].requires_grad_(), *columns[1:])
    loss, _ = FRAMEWORKS[framework](RolloutCorrectionConfig(**options(case.params)), x)
    assert loss.item() == pytest.approx(case.outputs["loss_float64"], rel=1e-6, abs=1e-9)
    if "differs_from_float64" not in case.outputs:
        torch.testing.assert_close(
            gradient(loss, x).float(), case.output("grad"), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rs_z_score", {"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0}),
        ("tis_batch_normalize", {"use_tis": True, "tis_batch_normalize": True}),
        ("kept", {"rs_veto_threshold": 1e-4, "rejection_normalizer": "kept"}),
    ],
    ids=["z score", "normalized", "kept"],
)
def test_options_on_the_global_batch_are_refused(name, options):
    with pytest.raises(ValueError, match=name):
        skyrl(RolloutCorrectionConfig(**options), batch())


def test_what_would_be_wrong_is_refused():
    own = peers.openrlhf()
    own.is_correction_level = "token"
    with pytest.raises(ValueError, match="is_correction_level"):
        losses.openrlhf(own, METRICS)
    on_policy = peers.nemo()
    on_policy.force_on_policy_ratio = True
    with pytest.raises(ValueError, match="force_on_policy_ratio"):
        losses.NemoLoss(on_policy, RolloutCorrectionConfig(use_rollout_logprobs=True))
    options = peers.skyrl_options()
    options.off_policy_correction.token_mask_is_threshold_low = 0.5
    with pytest.raises(ValueError, match="off_policy_correction"):
        losses.skyrl(peers.skyrl, METRICS)(*[batch().log_probs] * 3, options)
    with pytest.raises(ValueError, match="advantages"):
        losses.ms_swift(RolloutCorrectionConfig(divergence_mask="binary_tv"))
    with pytest.raises(ValueError, match="twice"):
        losses.prime_rl(peers.prime_rl, CONFIGS["tis"])
    with pytest.raises(ValueError, match="log-probs of the sampler"):
        losses.corrected(
            METRICS, losses.Tokens(batch().log_probs, None, None, batch().advantages, batch().mask)
        )
    with pytest.raises(ImportError, match="prime-rl"):
        losses.prime_rl_loss(None, rs_veto_threshold=1e-4)


def test_the_loss_of_nemo_travels_to_workers():
    loss = pickle.loads(pickle.dumps(losses.NemoLoss(peers.nemo(), METRICS)))
    assert loss.loss_type == peers.nemo().loss_type and loss.correction == METRICS
    _, metrics = nemo(METRICS, batch())
    added = {
        key: value
        for key, value in loss.metric_normalizations.items()
        if key.startswith(losses.PREFIX)
    }
    assert added.keys() == {key for key in metrics if key.startswith(losses.PREFIX)}
    assert set(added.values()) == {peers.nemo().metric_normalizations["probs_ratio"]}


TOTAL, RESPONSE = 23, 20
WHOLE = torch.arange(1.0, RESPONSE + 1)


def test_the_helpers_are_found_and_nothing_else_is():
    slime_modules.provide()
    slime_modules.provide()
    helpers = importlib.import_module("slime.backends.megatron_utils.cp_utils")
    assert helpers.all_gather_with_cp(WHOLE, TOTAL, RESPONSE) is WHOLE
    assert helpers.slice_log_prob_with_cp([0.5] * RESPONSE, TOTAL, RESPONSE) == [0.5] * RESPONSE
    with pytest.raises(ValueError, match="log_prob has 3 values but response_length is 20"):
        helpers.slice_log_prob_with_cp([0.0] * 3, TOTAL, RESPONSE)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("slime.ray")
    assert sum(isinstance(finder, slime_modules.Finder) for finder in sys.meta_path) == 1


def test_an_installed_slime_provides_the_other_names(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "slime" / "backends" / "megatron_utils"
    package.mkdir(parents=True)
    for folder in (tmp_path / "slime", tmp_path / "slime" / "backends", package):
        (folder / "__init__.py").touch()
    (package / "cp_utils.py").write_text("all_gather_with_cp = 'theirs'\nother = 'theirs'")
    (package / "model.py").write_text("name = 'theirs'")
    file = tmp_path / "mine.py"
    file.write_text(
        "from slime.backends.megatron_utils import cp_utils, model\ndef f():\n    return"
        " cp_utils.all_gather_with_cp, cp_utils.other, model.name, hasattr(cp_utils, 'neither')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function(f"{file}:f")() == (
        slime_modules.all_gather_with_cp,
        "theirs",
        "theirs",
        False,
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)


def _rank(rank, port, folder):
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    local = slime_modules.slice_log_prob_with_cp(WHOLE, TOTAL, RESPONSE).clone().requires_grad_()
    as_list = slime_modules.slice_log_prob_with_cp(WHOLE.tolist(), TOTAL, RESPONSE)
    gathered = slime_modules.all_gather_with_cp(local, TOTAL, RESPONSE)
    (gathered * WHOLE * (rank + 1)).sum().backward()
    # one-token responses that one rank holds nothing of
    lonely = [slime_modules.slice_log_prob_with_cp(WHOLE[:1] * n, 3 + n, 1) for n in range(1, 6)]
    joined = [slime_modules.all_gather_with_cp(part, 3 + n, 1) for n, part in enumerate(lonely, 1)]
    found = {
        "local": local.tolist(),
        "list": as_list,
        "gathered": gathered.tolist(),
        "gradient": local.grad.tolist(),
        "lonely": [part.tolist() for part in lonely],
        "joined": [part.tolist() for part in joined],
        "matrix": (
            slime_modules.all_gather_with_cp(
                torch.stack([local, -local], 1), TOTAL, RESPONSE
            ).tolist()
        ),
    }
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def test_slices_of_two_ranks_are_joined_and_their_gradients_added(tmp_path):
    spawn(_rank, (free_port(), str(tmp_path)), 2)
    found = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    for rank in range(2):
        first, second = context_parallel_slices(TOTAL, RESPONSE, rank, 2)
        own = torch.cat([WHOLE[first], WHOLE[second]])
        assert found[rank]["local"] == found[rank]["list"] == own.tolist()
        assert found[rank]["gathered"] == WHOLE.tolist()
        assert found[rank]["matrix"] == torch.stack([WHOLE, -WHOLE], 1).tolist()
        assert (
            found[rank]["gradient"] == (3 * own).tolist()
        )  # of both ranks, whose losses are WHOLE and 2 · WHOLE
        assert found[rank]["joined"] == [[float(n)] for n in range(1, 6)]
    for one, other in zip(found[0]["lonely"], found[1]["lonely"], strict=True):
        assert len(one) + len(other) == 1


def test_openrlhf_without_its_correction_options_names_the_version():
    class PolicyLoss:
        """OpenRLHF's main 3c3be62 has no is_correction_level."""

    with pytest.raises(
        ValueError, match=r"PolicyLoss has no is_correction_level.* install openrlhf==0\.11\.2"
    ):
        losses.openrlhf(PolicyLoss(), METRICS)
