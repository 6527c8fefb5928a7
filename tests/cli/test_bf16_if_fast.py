"""Which precision --bf16-if-fast chooses, by processor and by what the user gives."""

from pathlib import Path

import pytest
import torch

from slime_tis.trainer import setup
from slime_tis.trainer.cli.train_arguments import describe
from tests.cli.conftest import configured, refusal

FLAG = " --bf16-if-fast"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def amx(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})


@pytest.fixture
def old_x86(monkeypatch):
    capabilities = {"amx_bf16": False, "avx512_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)


@pytest.fixture
def arm(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "aarch64"})


def precisions(line):
    arguments = configured(line)
    return arguments.megatron.precision, arguments.rollout.rollout_precision


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param("", ("fp32", "fp32"), id="without the flag"),
        pytest.param(FLAG, ("bf16", "bf16"), id="detected"),
        pytest.param(f"{FLAG} --rollout-precision fp8", ("bf16", "fp8"), id="fp8 rollouts"),
        pytest.param(f"{FLAG} --rollout-precision fp32", ("bf16", "fp32"), id="fp32 rollouts"),
        pytest.param(f"{FLAG} --no-bf16", ("fp32", "fp32"), id="turned off"),
        pytest.param(f"{FLAG} --bf16", ("bf16", "fp32"), id="given"),
        pytest.param(f"{FLAG} --no-fp16", ("bf16", "bf16"), id="fp16 turned off"),
        pytest.param(f"{FLAG} --no-bf16-if-fast", ("fp32", "fp32"), id="withdrawn"),
    ],
)
def test_precision_with_amx(base, amx, flags, expected):
    assert precisions(base + flags) == expected


@pytest.mark.parametrize("processor", ["old_x86", "arm"])
def test_precision_without_bf16_instructions(base, request, processor):
    request.getfixturevalue(processor)
    assert precisions(base + FLAG) == ("fp32", "fp32")


def test_the_run_prints_instructions_without_amx(base, monkeypatch):
    capabilities = {"amx_bf16": False, "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    text = describe(configured(base + FLAG))
    assert "precision: bf16, because this processor has AVX512_BF16" in text


def test_servers_keep_their_own_precision(base, amx):
    server = f"{FLAG} --rollout-engine sglang --sglang-url http://127.0.0.1:1"
    assert precisions(base + server) == ("bf16", "fp32")


ROUNDED = (
    f"{FLAG} --rollout-engine sglang --sglang-url http://127.0.0.1:1"
    " --weight-update-rounding stochastic"
)


def test_stochastic_rounding_stays_for_processors_without_bf16(base, old_x86):
    arguments = configured(base + ROUNDED)
    assert arguments.megatron.precision == "fp32"
    assert arguments.rollout.weight_update_rounding == "stochastic"


def test_the_run_prints_that_weights_in_bf16_are_not_rounded(base, amx):
    text = describe(configured(base + ROUNDED))
    assert "; --weight-update-rounding stochastic is for float32 and unused" in text


def test_the_run_prints_that_weights_in_a_given_bf16_are_not_rounded(base, old_x86):
    lines = describe(configured(f"{base}{ROUNDED} --bf16")).splitlines()
    assert "--weight-update-rounding stochastic is for float32 and unused" in lines


def test_stochastic_rounding_is_refused_with_bf16_alone(base, amx):
    message = refusal(base + ROUNDED.replace(FLAG, " --bf16"))
    assert message.startswith("--weight-update-rounding stochastic has no effect with --bf16")


def test_command_line_overrides_yaml(base, amx):
    Path("run.yaml").write_text("bf16_if_fast: true\n")
    assert precisions(base + " --custom-config-path run.yaml --no-bf16") == ("fp32", "fp32")


def test_fp16_excludes_the_flag(base, amx):
    message = refusal(base + f"{FLAG} --fp16")
    assert message == "--bf16-if-fast and --fp16 exclude each other; remove one."


def test_the_run_prints_why_it_computes_in_bf16(base, amx):
    text = describe(configured(base + FLAG))
    line = "precision: bf16, because this processor has AMX (--no-bf16 trains in float32)"
    assert line in text.splitlines()


def test_the_run_prints_why_it_computes_in_float32(base, old_x86):
    text = describe(configured(base + FLAG))
    line = "precision: float32, because nothing here is faster in bf16 (--bf16 trains in bf16)"
    assert line in text.splitlines()


def test_nothing_is_printed_about_a_given_precision(base, amx):
    assert "because" not in describe(configured(base + f"{FLAG} --no-bf16"))


def test_the_saved_configuration_keeps_the_precision(base, amx, monkeypatch):
    values = configured(base + FLAG).namespace
    saved = f"bf16_if_fast: true\nbf16: {values.bf16}\n"
    Path("run.yaml").write_text(saved + f"rollout_precision: {values.rollout_precision}\n")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert precisions(base + " --custom-config-path run.yaml") == ("bf16", "bf16")


def test_ranks_on_different_processors_are_refused(base, amx, monkeypatch):
    # What `on_every_rank` returns if the other rank's processor has no AMX.
    monkeypatch.setattr(setup, "on_every_rank", lambda function: [function(), "fp32"])
    with pytest.raises(ValueError, match=r"--bf16-if-fast chose bf16 on some ranks"):
        setup.check_equal_precision(configured(base + FLAG))
