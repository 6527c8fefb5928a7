"""slime-tis port: the words that bash would pass to training, what becomes of them, and nothing executed."""

import json
import os
import shlex

import pytest

from slime_tis.main import main
from slime_tis.trainer.cli.arguments import configure
from slime_tis.trainer.cli.launch_script import END, OUTPUT, UNSET, read_launch
from slime_tis.trainer.cli.port import port, port_script
from slime_tis.trainer.cli.run_options import FLAGS
from slime_tis.trainer.cli.slime_flags import ADVICE

MODEL = """
MODEL_ARGS=(
   --swiglu --num-layers 36 --hidden-size 2560 --num-attention-heads 32 --num-query-groups 8
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}" --qk-layernorm
)"""
RUN = r"""#!/bin/bash
pkill -9 ray
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"
GPUS=$(nvidia-smi -L | wc -l)
if [ "$GPUS" -le 0 ]; then
    GPUS=8
fi
CKPT_ARGS=(
   --hf-checkpoint DIRECTORY/model --ref-load DIRECTORY/model_torch_dist
   --load DIRECTORY/saved/ --save DIRECTORY/saved
)
ROLLOUT_ARGS=(
   --prompt-data DIRECTORY/train.jsonl
   --input-key prompt --label-key label --rm-type deepscaler
   --num-rollout 10 --rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 32
   --rollout-max-response-len 64 --balance-data
)
GRPO_ARGS=(
   --advantage-estimator gspo   # by sequences
   --eps-clip 3e-4
   # --use-tis
)
OTHER_ARGS=(
   --optimizer adam --lr 1e-6 --lr-decay-style constant --adam-beta2 0.98
   --eval-prompt-data aime DIRECTORY/train.jsonl
   --tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 9216
   --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --sglang-server-concurrency 512
   --attention-dropout 0.0 --attention-backend flash
   --use-tensorboard --wandb-key ${WANDB_KEY} --tb-experiment-name "a 'b'"
   --update-weight-buffer-size $((512 * 1024)) --frobnicate 3
)
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node ${GPUS} --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]} "${OTHER_ARGS[@]}"
"""
PORTED = """--hf-checkpoint DIRECTORY/model --load DIRECTORY/saved --save DIRECTORY/saved
--prompt-data DIRECTORY/train.jsonl --input-key prompt --label-key label --rm-type deepscaler
--num-rollout 10 --rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 32 --rollout-max-response-len 64
--advantage-estimator grpo --policy-loss gspo --eps-clip 3e-4
--lr 1e-6 --lr-decay-style constant --adam-beta2 0.98 --eval-prompt-data aime DIRECTORY/train.jsonl
--tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 9216
--sglang-mem-fraction-static 0.7 --sglang-concurrency 512 --use-tensorboard --tb-experiment-name "a 'b'"
--rollout-engine sglang --sglang-launch 2 --sglang-tp-size 2 --sglang-base-gpu-id 4 --bf16 --eval-temperature 1.0"""
COMMENTS = (
    "GPUS is set under a condition; '8' is taken.",
    "--update-weight-buffer-size $(...): the value is a command's output",
    "--ref-load DIRECTORY/model_torch_dist is dropped",
    "--load DIRECTORY/saved/ resumes from this program's checkpoints",
    "--advantage-estimator gspo becomes --advantage-estimator grpo --policy-loss gspo.",
    "torchrun starts 4 ranks",
    "--sglang-server-concurrency 512 is --sglang-concurrency 512.",
    "--swiglu, --num-layers 36, --hidden-size 2560,",
    "--balance-data: train.py chooses",
    "--wandb-key ${WANDB_KEY}: use WANDB_API_KEY",
    "--frobnicate 3: neither",
)
RANK_0 = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def run_sh(tmp_path):
    (tmp_path / "model").mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 1000000,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "train.jsonl").write_text('{"prompt": "21>", "label": "12"}\n')
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(MODEL)
    (tmp_path / "run.sh").write_text(RUN.replace("DIRECTORY", str(tmp_path)))
    return tmp_path / "run.sh"


def command_of(printed):
    """The words after train.py, as bash reads the printed command."""
    words = shlex.split(printed.replace("\\\n", " "), comments=True)
    return words[words.index("train.py") + 1 :]


def comments_of(printed):
    return " ".join(printed.replace("#", " ").split())


def ported(tmp_path, flags, program="train.py"):
    path = tmp_path / "one.sh"
    path.write_text(f"python {program} {flags}")
    return port(read_launch(path))


def add_flags(run_sh, flags):
    run_sh.write_text(run_sh.read_text().rstrip() + f" {flags}\n")
    return port_script(str(run_sh))


def test_a_script_in_slimes_form_is_ported_explained_and_accepted(run_sh):
    printed = port_script(str(run_sh))
    assert command_of(printed) == shlex.split(PORTED.replace("DIRECTORY", str(run_sh.parent)))
    said = comments_of(printed.replace(str(run_sh.parent), "DIRECTORY"))
    assert [comment for comment in COMMENTS if comment not in said] == []
    arguments = configure(command_of(printed), RANK_0)
    assert arguments.reporting.tb_experiment_name == "a 'b'"
    assert arguments.sglang.sglang_server_args[:2] == ("--mem-fraction-static", "0.7")
    assert "on this machine train.py says" not in printed


def test_what_train_py_refuses_or_config_json_contradicts_is_noted(run_sh):
    assert "--lr is 'fast' but must be a number" in comments_of(add_flags(run_sh, "--lr fast"))
    (run_sh.parent / "models" / "tiny.sh").write_text("MODEL_ARGS=(--num-layers 28)")
    assert "--num-layers is '28' but" in comments_of(port_script(str(run_sh)))


# (flags added to the script, flags dropped, flags added)
ACCEPTED = {
    "greedy evaluation": ("--eval-top-k 1 --eval-temperature 0.6", "--eval-top-k", "--eval-temperature 0"),
    "no tensor parallelism": ("--tensor-model-parallel-size 1", "--sequence-parallel", ""),
    "several without effect": ("--kl-loss-coef 0.0 --kl-loss-type k1 --tis-clip 2", "--kl-loss-coef --tis-clip", ""),
    "fully asynchronous": (
        "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "--rollout-function-path",
        "--rollout-lookahead 1",
    ),
    "unset array": ("${DISTRIBUTED_ARGS}", "${DISTRIBUTED_ARGS}", ""),
    "too few GPUs": ("--tensor-model-parallel-size 8", "--sglang-launch", "--sglang-url http://SERVER:30000"),
    "large servers": ("--rollout-num-gpus-per-engine 16", "--sglang-launch", "--sglang-url http://SERVER:30000"),
}


@pytest.mark.parametrize(("flags", "dropped", "added"), ACCEPTED.values(), ids=ACCEPTED)
def test_train_py_accepts_the_command(run_sh, flags, dropped, added):
    printed = add_flags(run_sh, flags)
    assert "train.py says" not in printed
    command = command_of(printed)
    assert not set(dropped.split()) & set(command)
    assert added in " ".join(command)
    if added.startswith("--sglang-url"):
        assert "start the servers with --tp-size" in comments_of(printed)


def test_evaluation_without_prompts_has_no_effect_and_the_scripts_pythonpath_is_kept(run_sh):
    run_sh.write_text(run_sh.read_text().replace("--eval-prompt-data aime", "--n-samples-per-eval-prompt 16 #"))
    printed = port_script(str(run_sh))
    assert "--n-samples-per-eval-prompt" not in command_of(printed)
    assert "--n-samples-per-eval-prompt is 16 but has no effect" in comments_of(printed)
    run_sh.write_text('R="{\\"PYTHONPATH\\": \\"/root/Megatron-LM/:${SCRIPT_DIR}:$X/y\\"}"\n' + run_sh.read_text())
    printed = port_script(str(run_sh))
    assert f'\nPYTHONPATH="{run_sh.parent}:${{X}}/y" torchrun --nproc-per-node 4 train.py' in printed


@pytest.mark.parametrize(
    ("flags", "argv", "ranks"),
    [
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4", "--sglang-launch 4 --sglang-base-gpu-id 4", 4),
        (
            "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4",
            "--sglang-launch 2 --sglang-tp-size 4 --sglang-base-gpu-id 8",
            16,
        ),
        (
            "--actor-num-gpus-per-node 8 --colocate --tensor-model-parallel-size 2 --context-parallel-size 2",
            "--tensor-model-parallel-size 2 --context-parallel-size 2 --sglang-launch 4 --sglang-base-gpu-id 4",
            4,
        ),
        (
            "--actor-num-gpus-per-node 8 --colocate --global-batch-size 6",
            "--global-batch-size 6 --sglang-launch 5 --sglang-base-gpu-id 3",
            3,
        ),
        ("--rollout-external-engine-addrs a:1 b:2", "--sglang-url http://a:1 http://b:2", 8),
    ],
    ids=["separate", "two nodes", "colocated", "batch of 6", "running servers"],
)
def test_gpus_are_assigned(tmp_path, flags, argv, ranks):
    found = ported(tmp_path, flags)
    kept = [word for word in found.argv if word not in ("--rollout-engine", "sglang")]
    assert " ".join(kept[: kept.index("--bf16")]) == argv
    assert found.ranks == ranks


MIS = "mis.compute_mis_weights_with_cp"
VALUES = [
    ("--update-weight-buffer-size 536870912", "--sglang-bucket-mb 512"),
    ("--update-weight-transport nccl", "--sglang-weight-sync distributed"),
    ("--check-weight-update-equal", "--check-weight-sync"),
    ("--advantage-estimator reinforce_plus_plus", "--advantage-estimator reinforce_plus_plus_baseline"),
    ("--load /ckpt", ""),
    ("--lr 1 --lr 2", "--lr 2"),
    ("--seed=7", "--seed 7"),
    (
        f"--custom-tis-function-path examples.train_infer_mismatch_helper.{MIS}",
        f"--custom-tis-function-path custom_tis.{MIS}",
    ),
    ("--rollout-function-path slime.rollout.sft_rollout.generate_rollout", ""),
    ("--rollout-function-path mine.generate", "--rollout-function-path mine.generate"),
]


@pytest.mark.parametrize(("flags", "argv"), VALUES, ids=[row[0][:60] for row in VALUES])
def test_values_are_converted(tmp_path, flags, argv):
    words = ported(tmp_path, flags).argv
    assert " ".join(words[: words.index("--rollout-engine")]) == argv


def test_unset_variables_stay_variables_and_train_async_looks_ahead(run_sh, tmp_path):
    printed = add_flags(run_sh, "--tb-project-name \"${USER_X}-\\`id\\`\\$(id)\" --save '$(id)' --prompt-data ${TRAIN}")
    assert '--tb-project-name "${USER_X}-\\`id\\`\\$(id)"' in printed and "--save '$(id)'" in printed
    assert "'${TRAIN}'" in printed[printed.index("train.py says") :]
    assert ported(tmp_path, "--lr 1", "train_async.py").flags["--rollout-lookahead"] == ("1",)


def test_advice_names_existing_flags():
    """Flags that advice recommends belong to this program, to SGLang servers or to torchrun."""
    elsewhere = {"--nnodes", "--nproc-per-node", "--sglang-tp-size", "--sglang-base-gpu-id", "--sglang-quantization"}
    for text in ADVICE.values():
        named = {word.strip(",;:.") for word in text.split() if word.startswith("--")}
        assert named <= FLAGS | elsewhere | {"--eval-", "--help"}, text


def test_the_command(run_sh, capsys):
    assert main(["port", str(run_sh)]) == 0
    assert capsys.readouterr().out == port_script(str(run_sh))
    assert main(["port", str(run_sh.parent / "none.sh")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "cannot be read" in captured.err


@pytest.fixture
def script(tmp_path):
    def write(text, name="run.sh"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def words_of(path):
    return list(read_launch(path).words)


# (script, words after train.py)
SCRIPTS = {
    "plain": ("python3 train.py --lr 1e-6 --use-tis", "--lr 1e-6 --use-tis"),
    "array": ('A=(\n  --lr 1e-6  # rate\n  #--seed 1\n  --x "a b"\n)\npython train.py ${A[@]}', "--lr 1e-6 --x a b"),
    "quoted array": ('A=(--x "a b")\npython train.py "${A[@]}" --y', ["--x", "a b", "--y"]),
    "append": ("A=(--a)\nA+=(--b 1)\npython train.py ${A[@]}", "--a --b 1"),
    "empty array": ("A=(\n # --x\n)\npython train.py ${A[@]} --y", "--y"),
    "unset array": ('python train.py --x ${A[@]} "${A[@]}" "${EVAL_ARGS}" $EVAL_ARGS --y', "--x --y"),
    "first of an array": ("A=(1 2)\npython train.py --a $A", "--a 1"),
    "variables": ("M=/m\nexport N=${M}/n\npython train.py --a $M \"${N}.x\" '$M'", "--a /m /m/n.x $M"),
    "defaults": ('python train.py --a ${A:-1} "${B:-x y}" ${C:-} ${D:+2}', ["--a", "1", "x y"]),
    "unset": ("python train.py --key ${KEY}/x", ["--key", f"{UNSET}KEY{END}/x"]),
    "output": ("python train.py --n $(nproc --all) `id -u` $((1+2)) ${#X}", ["--n", *[OUTPUT] * 4]),
    "ray": (
        'R="{\n  \\"env\\": \\"$(id)\\"\n}"\nray job submit --env="${R}" \\\n -- python3 train.py \\\n --a 1',
        "--a 1",
    ),
    "redirected": ("nohup python train.py --a 1 > log.txt 2>&1 &", "--a 1"),
    "piped": ("python train.py --a 2>&1 1 | tee log && echo done", "--a 1"),
    "shell": ('bash -c "python train.py --a 1"', "--a 1"),
    "comment": ("# python train.py --old\npython train.py --a '#no' # yes", "--a #no"),
    "here-document": ("cat <<'EOF' > x\npython train.py --wrong 'open\nEOF\npython train.py --a 1", "--a 1"),
    "subshell": ("(cd /x && python train.py --a 1)", "--a 1"),
    "empty quotes": ("python train.py --a '' \"\"", ["--a", "", ""]),
    "condition": ("N=2\nif true; then N=3; fi\npython train.py --n $N", "--n 2"),
    "crlf": ("A=(--a 1)\r\npython train.py ${A[@]}\r\n", "--a 1"),
    "environment": ("CUDA=1 python /root/slime/train.py --a", "--a"),
    "case": ('case $X in\n  a) Y=1 ;;\n  *) Y=2 ;;\nesac\npython train.py --a "1 \\" 2"', ["--a", '1 " 2']),
    "loop": ("for ((i=0; i<3; i++)); do B+=($i); done\npython train.py --a", "--a"),
    "several variables in a word": (
        "H=h P=1\nA=(--u http://$H:$P/g)\npython train.py ${A[@]} x$H:$P",
        "--u http://h:1/g xh:1",
    ),
    "the last of two": ("python train.py --a\npython train.py --b", "--b"),
}


@pytest.mark.parametrize(("text", "words"), SCRIPTS.values(), ids=SCRIPTS)
def test_words_of_the_training_command(script, text, words):
    assert words_of(script(text)) == (words.split(" ") if isinstance(words, str) else words)


def test_notes_name_the_doubtful_variables_that_reach_the_command(script):
    launch = read_launch(
        script(
            'FOUND=$(nvidia-smi -L | wc -l)\nN=${N:-${FOUND}}\nif [ -z "$N" ]; then\n  N=8\nfi\nM=x$N\n'
            "if x; then OTHER=1; fi\nray start --n $OTHER\nE=(${X[@]})\npython train_async.py --n $M $EVAL_ARGS"
        )
    )
    assert (launch.program, launch.words) == ("train_async.py", ("--n", "x8"))
    assert [note.split()[0] for note in launch.notes] == ["N", "EVAL_ARGS"]


def test_sourced_files_are_found_where_slime_keeps_them_or_noted(script):
    script("MODEL_ARGS=(--layers ${LAYERS:-36})", "models/m.sh")
    script('LAYERS=5 source "$(dirname -- "${BASH_SOURCE[0]}")/m.sh"', "models/small.sh")
    here = 'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    for name in ('"${DIR}/models/m.sh"', "/root/slime/scripts/models/m.sh", '"$UNSET/models/m.sh"'):
        assert words_of(script(f"{here}source {name}\npython train.py ${{MODEL_ARGS[@]}}")) == ["--layers", "36"]
    assert words_of(script(". models/small.sh\npython train.py ${MODEL_ARGS[@]}")) == ["--layers", "5"]
    up = 'ROOT="$(cd -- "$(dirname "$0")/.." && pwd)"\nsource $ROOT/models/m.sh\npython train.py ${MODEL_ARGS[@]}'
    assert words_of(script(up, "deeper/run.sh")) == ["--layers", "36"]
    launch = read_launch(script("source $X/none.sh\npython train.py ${MODEL_ARGS[@]} --a"))
    assert launch.words == ("--a",)
    assert "'${X}/none.sh'" in launch.notes[0] and "MODEL_ARGS" in launch.notes[1]


@pytest.mark.parametrize(
    "line",
    [
        'R="{\\"PYTHONPATH\\": \\"/root/Megatron-LM/:${D}:/root/slime\\"}"',
        'cat <<EOF\n{"PYTHONPATH": "/root/Megatron-LM:/x:/root/slime"}\nEOF',
        'export PYTHONPATH="${D}:/root/slime:$PYTHONPATH"  # PYTHONPATH=/no',
        "PYTHONPATH=/x:/root/slime ls",
    ],
    ids=["runtime environment", "here-document", "export", "prefix"],
)
def test_pythonpath(script, line):
    launch = read_launch(script(f"D=/x\n{line}\n# PYTHONPATH=/old\npython train.py --a"))
    assert launch.python_path == ("/x", "/root/slime")


REFUSED = {
    "an open quote": ("echo\necho 'open\npython train.py", "line 2 and what follows it are not understood"),
    "no training": ("echo hello", "no command that runs train.py"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_unreadable_scripts_are_refused(script, text, message):
    with pytest.raises(ValueError) as refusal:
        read_launch(script(text))
    assert message in str(refusal.value)


def test_other_files_are_refused(script, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a file"):
        read_launch(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a Python program"):
        read_launch(script("U.execute_train('--lr 1')", "run.py"))
