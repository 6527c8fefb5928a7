"""slime-tis port: options of the vLLM engine in commands of verl and TRL."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from slime_tis.trainer.port.port_command import port_script
from tests.cli.test_port import ported

VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm"
TRL = "accelerate launch --num_processes 4 grpo.py --use_vllm"
ROLLOUT = "actor_rollout_ref.rollout"

# (words after VERL, part of the printed command)
VERL_COMMANDS = {
    "memory": (f"{ROLLOUT}.gpu_memory_utilization=0.6", "--vllm-gpu-memory-utilization 0.6"),
    "eager": (f"{ROLLOUT}.enforce_eager=True", "--vllm-enforce-eager"),
    "no chunks": (
        f"{ROLLOUT}.enable_chunked_prefill=False",
        "--vllm-no-enable-chunked-prefill",
    ),
    "limits": (
        f"{ROLLOUT}.max_num_batched_tokens=8192 {ROLLOUT}.max_num_seqs=64",
        "--vllm-max-num-batched-tokens 8192 --vllm-max-num-seqs 64",
    ),
    "sampling": (
        f"{ROLLOUT}.n=5 {ROLLOUT}.temperature=0.7 {ROLLOUT}.top_p=0.9 {ROLLOUT}.top_k=-1",
        "--n-samples-per-prompt 5 --rollout-temperature 0.7 --rollout-top-p 0.9 --rollout-top-k -1",
    ),
    "metrics": (f"{ROLLOUT}.calculate_log_probs=True", "--get-mismatch-metrics"),
    "correction": (
        "algorithm.rollout_correction.rollout_is=token",
        "train.py algorithm.rollout_correction.rollout_is=token",
    ),
    "policy loss": (
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "train.py actor_rollout_ref.actor.clip_ratio_high=0.28",
    ),
    "vLLM's own option": (
        f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8",
        "--vllm-kv-cache-dtype fp8",
    ),
    "vLLM's own switch": (
        f"+{ROLLOUT}.engine_kwargs.vllm.async_scheduling=False",
        "--vllm-no-async-scheduling",
    ),
    "defaults": ("trainer.nnodes=1", "--vllm-dtype bfloat16"),
    "shared GPUs": (
        f"trainer.n_gpus_per_node=8 {ROLLOUT}.tensor_model_parallel_size=4",
        "--vllm-launch 1 --vllm-tensor-parallel-size 4 --vllm-base-gpu-id 4",
    ),
    "quotes": (f"'{ROLLOUT}.dtype=\"float16\"'", "--vllm-dtype float16"),
    "the later of two": (f"{ROLLOUT}.n=2 {ROLLOUT}.n=3", "--n-samples-per-prompt 3"),
    "required flags": ("trainer.nnodes=1", '--prompt-data "${PROMPT_DATA}"'),
}


@pytest.mark.parametrize(("words", "printed"), VERL_COMMANDS.values(), ids=VERL_COMMANDS)
def test_printed_command_of_verl(tmp_path, words, printed):
    assert printed in ported(tmp_path, f"{VERL} {words}")[0]


# (words after VERL, part of the comments)
VERL_COMMENTS = {
    "renamed": (
        f"{ROLLOUT}.max_num_seqs=64",
        f"{ROLLOUT}.max_num_seqs=64 is --vllm-max-num-seqs 64.",
    ),
    "dropped": (
        f"{ROLLOUT}.free_cache_engine=True",
        f"{ROLLOUT}.free_cache_engine=True is dropped: training and vLLM do not share GPUs.",
    ),
    "unknown option of the engine": (
        f"{ROLLOUT}.frobnicate=3",
        f"Write the flags for the others yourself: {ROLLOUT}.frobnicate=3.",
    ),
    "option of training": ("actor_rollout_ref.actor.optim.lr=1e-6", "actor.optim.lr=1e-6."),
    "value with another meaning": (f"{ROLLOUT}.ignore_eos=True", f"{ROLLOUT}.ignore_eos=True."),
    "word that is no override": ("--config-name=x", "--config-name=x."),
    "value of the running script": (
        f"{ROLLOUT}.gpu_memory_utilization=$(free)",
        "the value is known when the script runs",
    ),
    "correction of the running script": (
        "algorithm.rollout_correction.rollout_is_threshold=$T",
        "rollout_is_threshold=${T}: the value is known when the script runs; add the option",
    ),
    "engine of the running script": (
        f"{ROLLOUT}.name=$ENGINE",
        f"{ROLLOUT}.name is known when the script runs; port has assumed vllm.",
    ),
    "default": ("trainer.nnodes=1", f"{ROLLOUT}.tensor_model_parallel_size=2 by default"),
}


@pytest.mark.parametrize(("words", "comment"), VERL_COMMENTS.values(), ids=VERL_COMMENTS)
def test_comment_on_a_script_of_verl(tmp_path, words, comment):
    assert comment in ported(tmp_path, f"{VERL} {words}")[1]


def test_metrics_are_not_added_to_verls_correction(tmp_path):
    words = f"{ROLLOUT}.calculate_log_probs=True algorithm.rollout_correction.rollout_is=token"
    assert "--get-mismatch-metrics" not in ported(tmp_path, f"{VERL} {words}")[0]


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_verl_with_another_engine_is_refused(tmp_path, engine):
    with pytest.raises(ValueError, match=f"name is {engine}, but port converts only"):
        ported(tmp_path, VERL.replace("vllm", engine))


# (words after TRL, part of the printed command)
TRL_COMMANDS = {
    "memory": (
        "--vllm_mode colocate --vllm_gpu_memory_utilization 0.3",
        "--vllm-gpu-memory-utilization 0.3",
    ),
    "hyphens": ("--vllm-max-model-length 4096", "--vllm-max-model-len 4096"),
    "shared GPUs": (
        "--vllm_tensor_parallel_size 2",
        "--vllm-launch 1 --vllm-tensor-parallel-size 2 --vllm-base-gpu-id 2",
    ),
    "server": (
        "--vllm_mode server --vllm_server_host 10.0.0.2 --vllm_server_port 8123",
        "--vllm-url http://10.0.0.2:8123",
    ),
    "server on this machine": ("--vllm_mode server", "--vllm-url http://127.0.0.1:8000"),
    "IPv6": ("--vllm_mode server --vllm_server_host ::1", "--vllm-url 'http://[::1]:8000'"),
    "URL before host": (
        "--vllm_mode server --vllm_server_base_url http://a:1 --vllm_server_host b",
        "--vllm-url http://a:1",
    ),
    "all tokens": ("--top_k 0", "--rollout-top-k -1"),
    "default correction": (
        "",
        "--use-tis --tis-level sequence --tis-mode mask --tis-upper-bound 3.0 --tis-lower-bound 0",
    ),
    "truncated tokens": (
        "--vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_clip_max 2.0",
        "--use-tis --tis-level token --tis-mode truncate --tis-upper-bound 2.0 ",
    ),
    "two bounds": (
        "--vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_clip_min 0.5",
        "--tis-mode clip --tis-upper-bound 3.0 --tis-lower-bound 0.5",
    ),
    "no upper bound": ("--vllm_importance_sampling_clip_max None", "--tis-upper-bound inf"),
    "older name of a bound": ("--vllm_importance_sampling_cap 4.0", "--tis-upper-bound 4.0"),
    "defaults": ("", "--n-samples-per-prompt 8 --rollout-max-response-len 512"),
}


@pytest.mark.parametrize(("words", "printed"), TRL_COMMANDS.values(), ids=TRL_COMMANDS)
def test_printed_command_of_trl(tmp_path, words, printed):
    assert printed in ported(tmp_path, f"{TRL} {words}")[0]


def test_trl_without_correction_has_no_weights(tmp_path):
    words = "--vllm_importance_sampling_correction False"
    assert "--use-tis" not in ported(tmp_path, f"{TRL} {words}")[0]


def test_flags_of_trl_may_be_in_a_variable(tmp_path):
    script = 'ARGS="--use_vllm true --temperature 0.7"\npython grpo.py $ARGS'
    assert "--rollout-temperature 0.7" in ported(tmp_path, script)[0]


@pytest.mark.parametrize("words", ["--use_vllm --top_p $P --top_k 1", "--top_p $P --use_vllm"])
def test_conditional_value_of_trl_has_a_note(tmp_path, words):
    script = f"if [ -z x ]; then P=0.7; fi\naccelerate launch grpo.py {words}"
    assert "P is set under a condition; '0.7' is taken." in ported(tmp_path, script)[1]


def test_trls_own_program_named_train_py_is_not_slimes(tmp_path):
    command = TRL.replace("grpo.py", "train.py")
    assert "--rollout-engine vllm" in ported(tmp_path, command)[0]


def test_option_of_trl_that_is_not_converted_is_listed(tmp_path):
    comments = ported(tmp_path, f"{TRL} --vllm_structured_outputs_regex x+ --learning_rate 1e-6")[1]
    assert "yourself: vllm_structured_outputs_regex=x+, learning_rate=1e-6." in comments


@pytest.mark.parametrize("mode", ["colocate", "server --vllm_server_base_url http://a:1"])
def test_unused_address_of_trls_server_is_named(tmp_path, mode):
    comments = ported(tmp_path, f"{TRL} --vllm_mode {mode} --vllm_server_port 8123")[1]
    assert "vllm_server_port=8123 is dropped: it has no effect in the mode colocate" in comments


def test_trls_server_is_started_otherwise(tmp_path):
    assert "`trl vllm-serve` has other routes" in ported(tmp_path, f"{TRL} --vllm_mode server")[1]


def test_trls_command_reads_its_yaml(tmp_path):
    (tmp_path / "grpo.yaml").write_text("use_vllm: true\ntemperature: 0.7\ntop_p: 0.9\n")
    command = ported(tmp_path, "trl grpo --config grpo.yaml --temperature 0.8")[0]
    assert "--rollout-temperature 0.8 --rollout-top-p 0.9" in command


def test_missing_yaml_of_trl_is_named(tmp_path):
    comments = ported(tmp_path, f"{TRL} --config none.yaml")[1]
    assert "the file 'none.yaml' is not found; what it sets is missing." in comments


def test_alias_in_yaml_of_trl_is_its_value(tmp_path):
    (tmp_path / "grpo.yaml").write_text("use_vllm: true\ntop_p: &p 0.7\ntemperature: *p\n")
    command = ported(tmp_path, "trl grpo --config grpo.yaml")[0]
    assert "--rollout-top-p 0.7 --rollout-temperature 0.7" in command


def test_nested_aliases_in_yaml_of_trl_are_cut(tmp_path):
    lines = ["use_vllm: true", "a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 6):
        aliases = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{aliases}]")
    (tmp_path / "grpo.yaml").write_text("\n".join(lines))
    # uncut, they have 5 million characters
    assert len(ported(tmp_path, "trl grpo --config grpo.yaml")[1]) < 5_000


def test_missing_yaml_is_named_if_vllm_is_not_on(tmp_path):
    with pytest.raises(ValueError, match=r"is not on \(the file 'none\.yaml' is not found"):
        ported(tmp_path, "trl grpo --config none.yaml")


def test_trl_without_vllm_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use_vllm is not on"):
        ported(tmp_path, "trl grpo --learning_rate 1e-6")


PROGRAM = """
import trl
options = trl.GRPOConfig(
    use_vllm=True, vllm_mode="colocate", temperature=0.7, max_completion_length=LENGTH
)
trainer = trl.GRPOTrainer(model="org/model", args=options)
"""


def ported_program(folder: Path, replaced: Mapping[str, str]) -> str:
    """The text for a program of TRL with replaced parts, in one line."""
    program = PROGRAM
    for old, new in replaced.items():
        program = program.replace(old, new)
    path = folder / "grpo.py"
    path.write_text(program)
    return " ".join(port_script(str(path)).text.replace("#", " ").split())


@pytest.mark.parametrize("part", ["--rollout-temperature 0.7", "--hf-checkpoint org/model"])
def test_options_of_a_program_of_trl_are_read(tmp_path, part):
    assert part in ported_program(tmp_path, {})


def test_value_that_a_program_computes_is_named(tmp_path):
    text = ported_program(tmp_path, {})
    assert "max_completion_length=LENGTH: the value is known when the script runs" in text


def test_mapping_of_options_in_a_program_is_named(tmp_path):
    text = ported_program(tmp_path, {"LENGTH": "8, **more"})
    assert "**more: options of this mapping are not read." in text


def test_mapping_that_may_contain_use_vllm_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"is not on \(\*\*more: options of this mapping"):
        ported_program(tmp_path, {"use_vllm=True": "**more"})


def test_program_that_computes_use_vllm_is_taken_to_use_it(tmp_path):
    text = ported_program(tmp_path, {"use_vllm=True": "use_vllm=args.vllm"})
    assert "use_vllm is known when the script runs; port has assumed true." in text


def test_computed_bound_of_trls_correction_is_shown_as_written(tmp_path):
    bound = "vllm_importance_sampling_clip_max=float('inf')"
    text = ported_program(tmp_path, {"LENGTH": f"8, {bound}"})
    assert f"{bound} is --use-tis" in text


def test_program_with_two_configurations_has_a_note(tmp_path):
    text = ported_program(tmp_path, {PROGRAM: f"{PROGRAM}\n{PROGRAM}"})
    assert "the program makes several configurations; they are read as one." in text


def test_program_may_begin_with_a_byte_order_mark(tmp_path):
    assert "--rollout-engine vllm" in ported_program(tmp_path, {PROGRAM: f"\ufeff{PROGRAM}"})


def test_deeply_nested_program_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nests its expressions too deeply"):
        ported_program(tmp_path, {"LENGTH": "-" * 50_000 + "1"})


@pytest.mark.parametrize(
    ("program", "message"),
    [("print(1)", "is a Python program without TRL's"), ("def f(:", "is not a Python program")],
    ids=["no TRL", "no Python"],
)
def test_other_programs_are_refused(tmp_path, program, message):
    with pytest.raises(ValueError, match=message):
        ported_program(tmp_path, {PROGRAM: program})
