"""The flag --bf16-if-fast: adds --bf16 and --rollout-precision bf16 where bf16 is faster."""

from collections.abc import Mapping

from slime_tis.options.values import Given, Source
from slime_tis.trainer.cli.option_checks import is_rounding_unused
from slime_tis.trainer.cli.train_options import Arguments

BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16"}
"""Instructions that multiply bf16 matrices fast, by torch's names of the processor's features."""


def bf16_unit() -> str | None:
    """Returns what multiplies bf16 matrices faster than float32 here; None if nothing does.

    On a CPU this is AMX, whose bf16 products are 3 to 6 times as fast, or AVX512_BF16: on an AMD
    EPYC (Zen 5), the products of SmolLM2 in training took half the time of oneDNN's in float32.
    """
    # Imported only for the option, because it takes seconds.
    import torch

    if torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "this GPU has bf16 instructions"
        return None
    # Other architectures than x86 have other keys.
    capabilities = torch.cpu.get_capabilities()
    for capability, name in BF16_UNITS.items():
        if capabilities.get(capability, False):
            return f"this processor has {name}"
    return None


def with_detected_precision(given: Mapping[str, Given]) -> dict[str, Given]:
    """Returns the given options, and those that --bf16-if-fast adds on this machine."""
    options = dict(given)
    switch = options.get("bf16_if_fast")
    if switch is None or not switch.value:
        return options
    fp16 = options.get("fp16")
    # MegatronConfig refuses both flags together; `fp16: false` decides nothing.
    is_fp16 = fp16 is not None and bool(fp16.value)
    if is_fp16 or "bf16" in options or bf16_unit() is None:
        return options
    detected: dict[str, bool | str] = {"bf16": True}
    engine = options.get("rollout_engine")
    if engine is None or engine.value == "local":
        detected["rollout_precision"] = "bf16"
    for name, value in detected.items():
        entry = Given(value=value, label=f"{name} of {switch.label}", source=Source.PRESET)
        options.setdefault(name, entry)
    return options


def detection_note(arguments: Arguments) -> str | None:
    """Returns a line about what --bf16-if-fast chose; None without the flag."""
    megatron = arguments.megatron
    if not megatron.bf16_if_fast:
        return None
    unit = bf16_unit()
    notes = []
    # No note if the user chose the other precision.
    if megatron.bf16 and unit is not None:
        notes.append(f"precision: bf16, because {unit} (--no-bf16 trains in float32)")
    if not megatron.bf16 and unit is None:
        notes.append(
            "precision: float32, because nothing here is faster in bf16 (--bf16 trains in bf16)"
        )
    if is_rounding_unused(arguments):
        rounding = arguments.rollout.weight_update_rounding
        notes.append(f"--weight-update-rounding {rounding} is for float32 and unused")
    return "; ".join(notes) or None
