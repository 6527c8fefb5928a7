"""slime-tis port: options of LoRA adapters of verl, TRL and PEFT."""

import pytest

from slime_tis.trainer.port.port_command import port_script
from tests.cli.test_port import COMPLETE, ported
from tests.cli.test_port_verl_trl import TRL, VERL

MODEL = "actor_rollout_ref.model"
ALL = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
PROGRAM = """
args = GRPOConfig(use_vllm=True, num_generations=4)
trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", args=args, peft_config={source})
"""

# (words after VERL, flags of the printed command)
VERL_ADAPTERS = {
    "FSDP": (
        f"{MODEL}.lora_rank=32 {MODEL}.lora_alpha=64 {MODEL}.target_modules=[q_proj,v_proj]",
        "--lora-rank 32 --lora-alpha 64 --lora-target-modules q_proj v_proj",
    ),
    "defaults of FSDP": (
        f"{MODEL}.lora_rank=8",
        "--lora-rank 8 --lora-alpha 16 --lora-target-modules all-linear",
    ),
    "excluded layers": (
        f"{MODEL}.lora_rank=8 {MODEL}.exclude_modules=[gate_proj,up_proj,down_proj]",
        "--lora-target-modules q_proj k_proj v_proj o_proj",
    ),
    "excluded output layer": (
        f"{MODEL}.lora_rank=8 {MODEL}.exclude_modules=lm_head",
        "--lora-rank 8 --lora-alpha 16 --lora-target-modules all-linear",
    ),
    "an adapter": (
        f"{MODEL}.lora_rank=8 {MODEL}.lora_adapter_path=adapter",
        "--lora-adapter-path adapter",
    ),
    "Megatron": (
        f"{MODEL}.lora.rank=16 {MODEL}.lora.target_modules=\"['linear_qkv','linear_fc2']\"",
        "--lora-rank 16 --lora-alpha 32 --lora-target-modules q_proj k_proj v_proj down_proj",
    ),
    "Megatron's separate layers": (
        f"{MODEL}.lora.rank=16 {MODEL}.lora.type=canonical_lora"
        f" {MODEL}.lora.target_modules=[linear_q,linear_fc1_up]",
        "--lora-rank 16 --lora-alpha 32 --lora-target-modules q_proj up_proj",
    ),
}


@pytest.mark.parametrize(("words", "flags"), VERL_ADAPTERS.values(), ids=VERL_ADAPTERS)
def test_adapters_of_verl_are_converted(words, flags, tmp_path):
    assert flags in ported(tmp_path, f"{VERL} {words}")[0]


def test_a_rank_of_the_running_script_keeps_the_other_flags(tmp_path):
    command, _ = ported(tmp_path, f"{VERL} {MODEL}.lora_rank=$RANK {MODEL}.lora_alpha=64")
    assert '--lora-rank "${RANK}" --lora-alpha 64 --lora-target-modules all-linear' in command


def test_rank_0_trains_all_weights(tmp_path):
    command, comments = ported(tmp_path, f"{VERL} {MODEL}.lora_rank=0 {MODEL}.lora_alpha=64")
    assert "--lora" not in command
    assert f"{MODEL}.lora_rank=0" in comments


# (words after TRL, flags of the printed command)
TRL_ADAPTERS = {
    "defaults": (
        "--use_peft",
        "--lora-rank 16 --lora-alpha 32 --lora-target-modules q_proj v_proj --lora-dropout 0.05",
    ),
    "all options": (
        "--use_peft --lora_r 8 --lora_alpha 16 --lora_dropout 0 --lora_target_modules all-linear",
        "--lora-rank 8 --lora-alpha 16 --lora-target-modules all-linear --lora-dropout 0",
    ),
    "rank-stabilized": (
        "--use_peft --lora_r 16 --lora_alpha 8 --use_rslora true",
        "--lora-rank 16 --lora-alpha 32 ",
    ),
}


@pytest.mark.parametrize(("words", "flags"), TRL_ADAPTERS.values(), ids=TRL_ADAPTERS)
def test_adapters_of_trl_are_converted(words, flags, tmp_path):
    assert flags in ported(tmp_path, f"{TRL} {words}")[0]


# (source of the adapter in a program, flags of the printed command)
PROGRAMS = {
    "defaults of PEFT": (
        "LoraConfig()",
        "--lora-rank 8 --lora-alpha 8 --lora-target-modules q_proj v_proj --lora-dropout 0.0",
    ),
    "all options": (
        'LoraConfig(r=4, lora_alpha=8, target_modules=["o_proj"], task_type="CAUSAL_LM")',
        "--lora-rank 4 --lora-alpha 8 --lora-target-modules o_proj --lora-dropout 0.0",
    ),
    "an enumeration": (
        'peft.LoraConfig(r=4, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)',
        "--lora-rank 4 --lora-alpha 8 --lora-target-modules all-linear",
    ),
    "a function": (
        "get_peft_config(model_args)",
        '--lora-rank "${LORA_RANK}" --lora-alpha "${LORA_ALPHA}"',
    ),
}


@pytest.mark.parametrize(("source", "flags"), PROGRAMS.values(), ids=PROGRAMS)
def test_adapters_of_a_program_are_converted(source, flags, tmp_path):
    path = tmp_path / "grpo.py"
    path.write_text(PROGRAM.format(source=source))
    assert flags in port_script(str(path)).command.replace(" \\\n  ", "")


def ported_program(folder, source, beginning):
    """The converted program with the source of its adapter, after other statements."""
    path = folder / "grpo.py"
    path.write_text(beginning + PROGRAM.format(source=source))
    return port_script(str(path))


@pytest.mark.parametrize("name", ["PeftModel", "peft.PeftModel"])
def test_an_adapter_that_a_program_loads_is_converted(name, tmp_path):
    script = ported_program(tmp_path, "None", f'm = {name}.from_pretrained(base, "adapter")')
    assert "--lora-adapter-path adapter" in script.command


# (source of the adapter, statements before it, the unread source in the comments)
UNREAD = {
    "renamed class": ("LC(r=8)", "from peft import LoraConfig as LC", "peft_config=LC(r=8)"),
    "adapted model": ("None", "import peft as p\nmodel = p.wrap(m)", "the adapter of grpo.py"),
    "Unsloth": ("None", "m = Fast.get_peft_model(m, r=8)", "the adapter of grpo.py"),
    "another class": (
        "None",
        'm = AutoPeftModelForCausalLM.from_pretrained("a")',
        "the adapter of grpo.py",
    ),
    "mapping": ("LoraConfig(**more)", "", "LoraConfig(**more)"),
    "two configurations": ("LoraConfig(r=8)", "LoraConfig(r=4)", "one of several LoraConfig"),
    "loaded beside a new one": (
        "LoraConfig(r=8)",
        'm = PeftModel.from_pretrained(base, "a").merge_and_unload()',
        "LoraConfig beside PeftModel.from_pretrained",
    ),
}


@pytest.mark.parametrize(("source", "beginning", "unread"), UNREAD.values(), ids=UNREAD)
def test_an_adapter_that_is_not_read_needs_variables(source, beginning, unread, tmp_path):
    script = ported_program(tmp_path, source, beginning)
    assert '--lora-rank "${LORA_RANK}"' in script.command
    assert f"{unread} is not read" in " ".join(script.text.replace("#", " ").split())


def test_an_adapter_at_its_position_is_not_forgotten(tmp_path):
    path = tmp_path / "grpo.py"
    trainer = "GRPOTrainer(m, f, GRPOConfig(use_vllm=True), d, None, None, None, None, o, make())"
    path.write_text(trainer)
    assert '--lora-rank "${LORA_RANK}"' in port_script(str(path)).command


@pytest.mark.parametrize("source", ["LoraConfig(r=8)", "make()"])
def test_an_adapter_of_a_quantized_model_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match="load_in_4bit=True: only plain LoRA adapters"):
        ported_program(tmp_path, source, "bits = BitsAndBytesConfig(load_in_4bit=True)")


def test_an_adapter_of_the_launched_program_is_not_forgotten(tmp_path):
    (tmp_path / "grpo.py").write_text("config = LoraConfig(r=8)")
    command, comments = ported(tmp_path, TRL)
    assert '--lora-rank "${LORA_RANK}"' in command
    assert "the adapter of grpo.py is not read" in comments


def test_a_computed_rank_stays_in_the_command(tmp_path):
    command, _ = ported(tmp_path, f"python train.py {COMPLETE} --lora-rank $((2**4))")
    assert '--lora-rank "${LORA_RANK}"' in command


# Scripts whose adapter is not read.
UNREAD_WORDS = {
    "other branch": f'if [ $FULL ]; then A=""; else A=--use_peft; fi\n{TRL} $A',
    "conditional expansion": f"R=8\npython train.py {COMPLETE} ${{R:+--lora-rank $R}}",
    "missing sourced file": f"source lora.sh\n{TRL}",
}


@pytest.mark.parametrize("script", UNREAD_WORDS.values(), ids=UNREAD_WORDS)
def test_an_adapter_in_unread_words_is_named(script, tmp_path):
    assert "but this command trains all weights" in ported(tmp_path, script)[1]


@pytest.mark.parametrize("words", ["# exploration", "--lora-rank 0"])
def test_a_script_without_adapters_has_no_note(words, tmp_path):
    comments = ported(tmp_path, f"python train.py {COMPLETE} {words}")[1]
    assert "but this command trains all weights" not in comments


# (command, refused option)
REFUSED = {
    "DoRA of verl": (f"{VERL} {MODEL}.lora.rank=8 {MODEL}.lora.type=dora", "lora.type=dora"),
    "unknown option of verl": (f"{VERL} {MODEL}.lora.rank=8 +{MODEL}.lora.x=1", "lora.x=1"),
    "parameters of verl": (
        f"{VERL} {MODEL}.lora_rank=8 {MODEL}.target_parameters=[mlp.experts.down_proj]",
        "target_parameters=[mlp.experts.down_proj]",
    ),
    "wildcards": (
        f"{VERL} {MODEL}.lora.rank=8 {MODEL}.lora.target_modules=[*.layers.0.*.linear_qkv]",
        "lora.target_modules=[*.layers.0.*.linear_qkv]",
    ),
    "excluded by a pattern": (
        f"{VERL} {MODEL}.lora_rank=8 {MODEL}.exclude_modules='.*mlp.*'",
        "target_modules=all-linear without .*mlp.*",
    ),
    "excluded by the running script": (
        f"{VERL} {MODEL}.lora_rank=8 {MODEL}.exclude_modules=$X",
        "target_modules=all-linear without ${X}",
    ),
    "block of verl": (
        f"{VERL} '{MODEL}={{lora_rank: 8, lora_alpha: 16}}'",
        f"{MODEL}={{lora_rank: 8, lora_alpha: 16}}",
    ),
    "both of verl": (f"{VERL} {MODEL}.lora.rank=8 {MODEL}.lora_rank=8", "lora_rank and rank"),
    "quantized model": (f"{TRL} --use_peft --load_in_4bit", "load_in_4bit=True"),
    "DoRA of TRL": (f"{TRL} --use_peft --use_dora", "use_dora=True"),
    "trained output layer": (
        f"{TRL} --use_peft --lora_modules_to_save lm_head",
        "lora_modules_to_save=lm_head",
    ),
}


@pytest.mark.parametrize(("command", "option"), REFUSED.values(), ids=REFUSED)
def test_other_adapters_are_refused(command, option, tmp_path):
    with pytest.raises(ValueError, match="only plain LoRA adapters of q_proj") as error:
        ported(tmp_path, command)
    assert option in str(error.value)
