"""slime-tis port: the words that bash would pass to training, converted and never executed."""

import shlex

import pytest

from slime_tis.main import main
from slime_tis.trainer.port.launch_script import legible, read_launch
from slime_tis.trainer.port.port_command import port_script

FILES = {
    "train.jsonl": '{"prompt": "21>", "label": "12"}\n',
    "model/config.json": (
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2,'
        ' "hidden_size": 2560, "intermediate_size": 64, "num_attention_heads": 32,'
        ' "num_key_value_heads": 8, "rope_theta": 1000000, "vocab_size": 64}'
    ),
    "models/tiny.sh": (
        "MODEL_ARGS=(\n   --swiglu --num-layers 2 --hidden-size 2560 --num-attention-heads 32\n"
        '   --num-query-groups 8 --rotary-base "${ROTARY_BASE:-1000000}" --qk-layernorm\n)'
    ),
    "models/small.sh": 'ROTARY_BASE=5 source "$(dirname -- "${BASH_SOURCE[0]}")/tiny.sh"',
}
RUN = r"""#!/bin/bash
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"
source $FOLDER/none.sh
FOUND=$(nvidia-smi -L | wc -l)
GPUS=${GPUS:-${FOUND}}
if [ -z "$GPUS" ]; then
    GPUS=8
fi
CKPT_ARGS=(
   --hf-checkpoint DIRECTORY/model --ref-load DIRECTORY/model_torch_dist
   --load DIRECTORY/saved/ --save DIRECTORY/saved
   --prompt-data DIRECTORY/train.jsonl --input-key prompt --label-key label --rm-type deepscaler
   --num-rollout 10 --rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 32
   --rollout-max-response-len 64 --balance-data --update-weight-buffer-size $((512 * 1024 * 1024))
   --advantage-estimator gspo   # by sequences
   --eps-clip 3e-4 --kl-loss-coef 0.0 --kl-loss-type k1 --tis-clip 2
   # --use-tis
)
OTHER_ARGS=(
   --optimizer adam --lr 1e-6 --lr-decay-style constant --adam-beta2 0.98
   --eval-prompt-data aime DIRECTORY/train.jsonl
   --tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 9216
   --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --sglang-server-concurrency 512
   --attention-dropout 0.0 --attention-backend flash --frobnicate 3
   --use-tensorboard --wandb-key ${WANDB_KEY} --tb-experiment-name "a 'b'"
)
if [ "$FOUND" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi
RUNTIME="{\"env_vars\": {\"NCCL_NVLS_ENABLE\": \"${HAS_NVLINK}\"}}"
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="$RUNTIME" -- python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node ${GPUS} --colocate ${EVAL_ARGS} \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} "${OTHER_ARGS[@]}"
"""
PORTED = """--hf-checkpoint DIRECTORY/model --load DIRECTORY/saved --save DIRECTORY/saved
--prompt-data DIRECTORY/train.jsonl --input-key prompt --label-key label --rm-type deepscaler
--num-rollout 10 --rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 32 --rollout-max-response-len 64
--balance-data --sglang-bucket-mb 512 --eps-clip 3e-4 --lr 1e-6 --lr-decay-style constant --adam-beta2 0.98
--eval-prompt-data aime DIRECTORY/train.jsonl
--tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 9216
--sglang-mem-fraction-static 0.7 --sglang-concurrency 512 --use-tensorboard --tb-experiment-name "a 'b'"
--advantage-estimator grpo --policy-loss gspo
--rollout-engine sglang --sglang-launch 2 --sglang-tp-size 2 --sglang-base-gpu-id 4 --bf16 --eval-temperature 1.0
--use-distributed-optimizer"""
COMMENTS = (
    "the sourced file '${FOLDER}/none.sh' is not found; what it sets is missing.",
    "GPUS is set under a condition; '8' is taken. EVAL_ARGS is unset and expands to nothing.",
    "--update-weight-buffer-size 536870912 is --sglang-bucket-mb 512.",
    "--ref-load DIRECTORY/model_torch_dist is dropped",
    "--load DIRECTORY/saved/ resumes from this program's checkpoints",
    "--advantage-estimator gspo becomes --advantage-estimator grpo --policy-loss gspo.",
    "torchrun starts 4 ranks",
    "--sglang-server-concurrency 512 is --sglang-concurrency 512.",
    "--kl-loss-coef is 0.0 but has no effect",
    "--tis-upper-bound is 2.0 but has no effect",
    "--swiglu, --num-layers 2, --hidden-size 2560,",
    "--wandb-key ${WANDB_KEY}: use WANDB_API_KEY",
    "--frobnicate 3 is dropped: neither",
)


def write(folder, text):
    """Writes a script next to FILES and returns its path."""
    for path, content in {**FILES, "run.sh": text}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(content.replace("DIRECTORY", str(folder)))
    return folder / "run.sh"


def ported(folder, text):
    """The command printed for a script in one line, and the comments after it in another."""
    script = port_script(str(write(folder, text)))
    comments = script.text.partition("\n#\n")[2]
    return script.command.replace(" \\\n  ", ""), " ".join(comments.replace("#", " ").split())


def test_a_script_in_slimes_form_is_ported_and_explained(tmp_path):
    command, comments = (text.replace(str(tmp_path), "DIRECTORY") for text in ported(tmp_path, RUN))
    assert shlex.split(command) == [
        "torchrun",
        "--nproc-per-node",
        "4",
        "train.py",
        *shlex.split(PORTED),
    ]
    assert [comment for comment in COMMENTS if comment not in comments] == []
    assert "HAS_NVLINK" not in comments  # only ray gets it
    assert "train.py refuses" not in comments


# (flags added to RUN, part of the command, part of the comments)
ADDED = {
    "greedy evaluation": (
        "--eval-top-k 1 --eval-temperature 0.6",
        "--eval-temperature 0",
        "--eval-top-k 1 becomes",
    ),
    "no tensor parallelism": (
        "--tensor-model-parallel-size 1",
        "",
        "--sequence-parallel is on but",
    ),
    "too few GPUs": (
        "--tensor-model-parallel-size 8",
        "--sglang-url http://SERVER:30000",
        "with --tp-size 2 --mem",
    ),
    "large servers": (
        "--rollout-num-gpus-per-engine 16",
        "--sglang-url http://SERVER:30000",
        "with --tp-size 16",
    ),
    "refused": ("--lr fast", "--lr fast", "train.py refuses: --lr is 'fast' but must be a number"),
    "another model": ("--num-layers 28", "", "--num-layers is '28' but"),
}


@pytest.mark.parametrize(("flags", "part", "comment"), ADDED.values(), ids=ADDED)
def test_train_py_answers_the_command(tmp_path, flags, part, comment):
    command, comments = ported(tmp_path, f"{RUN.rstrip()} {flags}")
    assert part in command and comment in comments
    assert ("train.py refuses" in comments) == (flags == "--lr fast")
    assert "--eval-top-k" not in command and "--num-layers" not in command


RAW_REWARDS = "--custom-reward-post-process-path slime_tis.trainer.rewards.raw.raw_rewards"
MIS = "mis.compute_mis_weights_with_cp"
PATH = 'PYTHONPATH="/x:${X}/y" torchrun --nproc-per-node 8 train.py --lr'
# (script, part of the printed command)
COMMANDS = {
    "train.py --eval-config /x/eval.yaml --eval-interval 20": (
        "--eval-config /x/eval.yaml --eval-interval 20 --rollout-engine"
    ),
    "train.py --update-weight-buffer-size 536870912": (
        "train.py --sglang-bucket-mb 512 --rollout-engine"
    ),
    "train.py --advantage-estimator reinforce_plus_plus --kl-coef 0.01 --gamma 0.99": (
        "--advantage-estimator reinforce_plus_plus --kl-coef 0.01 --gamma 0.99"
    ),
    "train.py --advantage-estimator reinforce_plus_plus_baseline": (
        "--advantage-estimator grpo --disable-grpo-std-normalization"
    ),
    "train.py --disable-rewards-normalization --n-samples-per-prompt 1": RAW_REWARDS,
    "train.py --num-rollout 100000000": "--num-rollout 10000000",
    "train.py --use-dynamic-batch-size --micro-batch-size 2": (
        "train.py --use-dynamic-batch-size --rollout-engine"
    ),
    "train.py --hf-checkpoint /x/${1}": (
        'train.py --hf-checkpoint "${HF_CHECKPOINT}" --rollout-engine'
    ),
    "train.py --prompt-data /x/p.parquet@[0:3000]": "--prompt-data '/x/p.parquet@[0:3000]'",
    (
        "train_async.py --rollout-function-path mine.generate --custom-generate-function-path "
        "mine.one"
    ): ("train.py --rollout-function-path mine.generate --rollout-engine"),
    "train.py --load /ckpt": "train.py --rollout-engine",
    "train.py --lr 1 --lr 2 --seed=7": "train.py --lr 2 --seed 7 --rollout-engine",
    f"train.py --custom-tis-function-path examples.train_infer_mismatch_helper.{MIS}": (
        f"-path custom_tis.{MIS}"
    ),
    "train_async.py": "train.py --rollout-lookahead 1 --rollout-engine",
    "train.py --actor-num-gpus-per-node 4 --rollout-num-gpus 4": (
        "node 4 train.py --rollout-engine sglang --sglang-launch 4 --sglang-base-gpu-id 4 --bf16"
    ),
    "train.py --actor-num-nodes 2 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4": (
        "torchrun --nnodes 2"
        " --nproc-per-node 8 train.py --rollout-engine sglang --sglang-url http://SERVER:30000"
    ),
    "train.py --actor-num-gpus-per-node 8 --rollout-num-gpus 8": (
        "node 8 train.py --rollout-engine sglang --sglang-url http://SERVER:30000"
    ),
    (
        "train.py --colocate --tensor-model-parallel-size 4 --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1"
    ): ("torchrun --nproc-per-node 8 train.py"),
    "train.py --colocate --tensor-model-parallel-size 2 --context-parallel-size 2": (
        "node 4 train.py"
        " --tensor-model-parallel-size 2 --context-parallel-size 2"
        " --rollout-engine sglang --sglang-launch 4 --sglang-base-gpu-id 4"
    ),
    "train.py --colocate --global-batch-size 6": (
        "node 3 train.py --global-batch-size 6"
        " --rollout-engine sglang --sglang-launch 5 --sglang-base-gpu-id 3"
    ),
    "train.py --rollout-external-engine-addrs a:1 b:2": (
        "--sglang-url http://a:1 http://b:2 --rollout-engine"
    ),
    "train.py --tb-project-name \"${USER_X}-\\`id\\`\\$(id)\" --save '$(id)'": (
        "train.py --tb-project-name \"${USER_X}-\\`id\\`\\$(id)\" --save '$(id)' --rollout-engine"
    ),
    'R="{\\"PYTHONPATH\\": \\"/root/Megatron-LM/:${D}:$X/y\\"}"; python train.py --lr 1': PATH,
    'cat <<EOF\n{"PYTHONPATH": "/root/Megatron-LM:/x:$X/y"}\nEOF\npython train.py --lr 1': PATH,
    'export PYTHONPATH="${D}:$X/y:$PYTHONPATH"  # PYTHONPATH=/no\npython train.py --lr 1': PATH,
    "PYTHONPATH=/x:$(pwd):$X/y ls\n# PYTHONPATH=/old\npython train.py --lr 1": PATH,
}


@pytest.mark.parametrize(
    ("text", "printed"), COMMANDS.items(), ids=[text[:70] for text in COMMANDS]
)
def test_printed_command(tmp_path, text, printed):
    assert printed in ported(tmp_path, f"D=/x; {text}")[0]


TINY = (
    "--swiglu --num-layers 2 --hidden-size 2560 --num-attention-heads 32 --num-query-groups 8"
    " --rotary-base"
)
COMPLETE = (
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --num-rollout 2 --rollout-max-response-len 8"
    " --rm-type math --prompt-data /none/p.jsonl --micro-batch-size 1"
)


def test_all_refusals_are_listed_before_any_file(tmp_path):
    flags = (
        "--hf-checkpoint /none/Mine --lr fast --eps-clip 7 --lr-decay-style odd"
        " --max-tokens-per-gpu 5"
    )
    script = port_script(str(write(tmp_path, f"python train.py {COMPLETE} {flags}")))
    assert [refusal.split()[0] for refusal in script.refusals] == [
        "--lr",
        "--lr-decay-style",
        "--eps-clip",
    ]
    assert "--max-tokens-per-gpu is 5 but has no effect" in script.text
    assert "--prompt-data /none/p.jsonl" in script.text
    assert all(line.startswith("#") for line in script.text.splitlines())


# (flags, part of the reason)
OTHER_EXPERIMENTS = {
    "several adapters": (
        "--lora-rank 32 --target-modules all-linear --multi-lora-n-adapters 2",
        "trains and samples with one LoRA adapter",
    ),
    "adapters of latent attention": (
        "--lora-rank 32 --target-modules q_a_proj,o_proj",
        "--target-modules q_a_proj: this program trains and samples with one LoRA adapter",
    ),
    "distillation": ("--use-opd --opd-type sglang", "no on-policy distillation"),
    "critic": ("--advantage-estimator ppo", "there is no critic"),
    "fine-tuning": ("--loss-type sft_loss", "no supervised fine-tuning"),
    "fp8 training": ("--fp8-format e4m3", "training is in bf16, fp16 or fp32"),
    "another optimizer": ("--optimizer muon", "always adam here"),
    "images": ("--multimodal-keys '{}'", "prompts are text"),
    "hook of Megatron": ("--custom-megatron-init-path a.b", "inside the training engine"),
    "layers of another model": ("--freeze-indexer", "layers that this program lacks"),
}


@pytest.mark.parametrize(("flags", "reason"), OTHER_EXPERIMENTS.values(), ids=OTHER_EXPERIMENTS)
def test_another_experiment_is_no_command(tmp_path, capsys, flags, reason):
    path = write(tmp_path, f"python train.py {COMPLETE} --hf-checkpoint /none/Qwen3-4B {flags}")
    assert main(["port", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "is an experiment that train.py cannot run" in printed.err and reason in printed.err


# (flags of miles, flags here, part of a note)
ADAPTERS = {
    "all layers": (
        "--lora-rank 32 --lora-alpha 64 --lora-type canonical_lora --target-modules all-linear",
        "--lora-rank 32 --lora-alpha 64 --lora-target-modules all-linear",
        "written as --lora-target-modules all-linear",
    ),
    "miles' default of alpha": (
        "--lora-rank 8",
        "--lora-rank 8 --lora-alpha 16",
        "--lora-alpha 16",
    ),
    "commas": (
        "--lora-rank 8 --lora-alpha 8 --target-modules q_proj,v_proj",
        "--lora-rank 8 --lora-alpha 8 --lora-target-modules q_proj v_proj",
        "written as --lora-target-modules q_proj v_proj",
    ),
    "names of Megatron": (
        "--lora-rank 8 --lora-alpha 8 --target-modules linear_qkv,linear_fc2",
        "--lora-rank 8 --lora-alpha 8 --lora-target-modules q_proj k_proj v_proj down_proj",
        "",
    ),
    "exclusion": (
        "--lora-rank 8 --lora-alpha 8 --target-modules linear_qkv --exclude-modules k_proj",
        "--lora-rank 8 --lora-alpha 8 --lora-target-modules q_proj v_proj",
        "",
    ),
    "one A of fused layers": (
        "--lora-rank 8 --lora-alpha 8 --lora-type lora",
        "--lora-rank 8 --lora-alpha 8",
        "has one matrix A for query, key and value",
    ),
    "server": (
        "--lora-rank 8 --lora-alpha 8 --sglang-lora-backend triton",
        "--lora-rank 8 --lora-alpha 8",
        "--sglang-lora-backend is dropped",
    ),
    "off": ("--lora-rank 0 --lora-alpha 8 --target-modules all-linear", "", "trains all weights"),
    "saved adapter": (
        "--lora-rank 8 --lora-alpha 8 --lora-adapter-path /none/a",
        "--lora-adapter-path /none/a",
        "--lora-rank is dropped: the adapter of the directory has it",
    ),
}


@pytest.mark.parametrize(("flags", "expected", "note"), ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_of_miles_are_kept(tmp_path, flags, expected, note):
    script = port_script(str(write(tmp_path, f"python train.py {COMPLETE} {flags}")))
    words = []
    for name, values in script.flags.items():
        if "lora" in name:
            words += [name, *values]
    assert sorted(words) == sorted(expected.split())
    assert note in " ".join(script.text.replace("#", "").split())


def test_a_rank_of_the_running_script_keeps_the_other_flags(tmp_path):
    flags = "--lora-rank $RANK --lora-alpha 64"
    command, _ = ported(tmp_path, f"python train.py {COMPLETE} {flags}")
    assert '--lora-rank "${RANK}" --lora-alpha 64' in command


# (--hf-checkpoint, flags, part of the text)
MODELS = {
    "sizes of the script": (
        "/none/m",
        f"{TINY} 1000000 --vocab-size 64 --ffn-hidden-size 64 --lr 1",
        "",
    ),
    "published, by name": ("/none/Phi-4", "--lr 1", "pipeline stage 0 does not fit"),
    "unsupported layers of a name": (
        "/none/Phi-4-mini-instruct",
        "--lr 1",
        "of an unsupported family",
    ),
    "published": ("/none/Qwen3-32B", "--lr 1", "pipeline stage 0 does not fit"),
    "unknown": (
        "/none/Mine",
        "--lr 1",
        "neither config.json nor the script gives the model's sizes",
    ),
    "too many heads": (
        "/none/Qwen3-4B",
        "--tensor-model-parallel-size 3",
        "num_key_value_heads is 8",
    ),
    "unsupported name": ("/none/Kimi-Linear-48B", "--lr 1", "of an unsupported family"),
    "quantized name": ("/none/Qwen3-4B-FP8", "--lr 1", "by its name quantized"),
}


@pytest.mark.parametrize(("model", "flags", "part"), MODELS.values(), ids=MODELS)
def test_model_of_another_machine_is_checked(tmp_path, model, flags, part):
    text = port_script(
        str(write(tmp_path, f"python train.py {COMPLETE} --hf-checkpoint {model} {flags}"))
    ).text
    assert part in " ".join(text.replace("#", " ").split())
    assert ("# memory:" in text) == (model not in ("/none/m", "/none/Qwen3-4B-FP8"))


def test_expert_layout_of_slimes_script_runs_by_plan(tmp_path, capsys):
    layout = (
        "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8"
        " --expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform"
        " --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 8192"
        " --global-batch-size 32"
    )
    launch = "--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 8"
    complete = COMPLETE.replace("--micro-batch-size 1", "")
    line = f"python train.py {launch} {complete} --hf-checkpoint /none/Qwen3-30B-A3B {layout}"
    assert main(["port", str(write(tmp_path, line))]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].startswith("torchrun --nproc-per-node 8 train.py")
    assert "--sglang-launch" not in printed
    assert "does not fit" not in printed


def test_missing_sourced_file_keeps_its_name(tmp_path):
    folder = "/very/long/directory" * 8
    comments = ported(
        tmp_path, f"source {folder}/models/qwen3-4B.sh\npython train.py ${{MODEL_ARGS[@]}} --lr 1"
    )[1]
    assert "/models/qwen3-4B.sh' is not found" in comments
    assert "MODEL_ARGS is unset" not in comments


MODEL = "\npython train.py ${MODEL_ARGS[@]}"
# (script, words after train.py)
SCRIPTS = {
    "append": ("A=(--a)\nA+=(--b 1)\nB=(\n # --x\n)\npython train.py ${A[@]} ${B[@]}", "--a --b 1"),
    "unset array": (
        'python train.py --x ${A[@]} "${A[@]}" "${EVAL_ARGS}" $EVAL_ARGS --y',
        "--x --y",
    ),
    "variables": (
        "M=/m A=(1 2)\nexport N=${M}/n\npython train.py $M \"${N}.x\" '$M' $A",
        "/m /m/n.x $M 1",
    ),
    "several in a word": (
        "H=h P=1\nA=(http://$H:$P/g)\npython train.py ${A[@]} x$H:$P",
        "http://h:1/g xh:1",
    ),
    "blanks": (
        'A="1  2"\nB=$A\npython train.py "$A $B " $B \'\' ""',
        ["1  2 1  2 ", "1", "2", "", ""],
    ),
    "apostrophes": (
        "# don't\nA=1 B=$C\n# can't\npython train.py \"it's $A\" $B",
        ["it's 1", "${C}"],
    ),
    "defaults": ('python3 /slime/train.py --a ${A:-1} "${B:-x y}" ${C:-}', ["--a", "1", "x y"]),
    "unknown": (
        "python train.py ${K}/x `id -u` $(id -u) ${X%.*}",
        ["${K}/x", "`id -u`", "$(id -u)", "${X%.*}"],
    ),
    "redirected": (
        "CUDA=1 nohup python train.py --a 2>&1 1 > log.txt | tee log && echo done &",
        "--a 1",
    ),
    "shell": ('X=2\nbash -c "cd x; python train.py --a ${X} ${Y}"', "--a 2 ${Y}"),
    "here-document": (
        "cat <<'EOF' > x\npython train.py 'open\nEOF\n(cd /x && python train.py --a 1)",
        "--a 1",
    ),
    "condition": ("N=2\nif true; then N=3; fi\npython train.py --n $N", "--n 2"),
    "carriage returns": ("A=(--a 1)\r\npython train.py ${A[@]}\r\n", "--a 1"),
    "case": ("case $X in\n  a) Y=1 ;;\n  *) Y=2 ;;\nesac\npython train.py --a $Y", "--a 1"),
    "the last of two": (
        "for ((i=0; i<3; i++)); do B+=($i); done\npython train.py --a\npython train.py --b",
        "--b",
    ),
    "slime's models": (
        f"source /root/slime/scripts/models/tiny.sh{MODEL}",
        f"{TINY} 1000000 --qk-layernorm",
    ),
    "model from a model": (f". models/small.sh{MODEL}", f"{TINY} 5 --qk-layernorm"),
    "arithmetic": (
        "N=16 P=8\npython train.py --n $((N / ${P} + 2 * 3)) --m $((N ** 9))",
        ["--n", "8", "--m", "$((N ** 9))"],
    ),
    "own folder": ('python train.py "$(cd "$(dirname "$0")/.." && pwd)" `id`', "DIRECTORY/.. `id`"),
}


@pytest.mark.parametrize(("text", "words"), SCRIPTS.values(), ids=SCRIPTS)
def test_words_of_the_training_command(tmp_path, text, words):
    launch = read_launch(write(tmp_path, text))
    found = [legible(word).replace(str(tmp_path), "DIRECTORY") for word in launch.words]
    assert found == (words.split(" ") if isinstance(words, str) else words)


def test_missing_script_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a file"):
        read_launch(tmp_path / "none.sh")


@pytest.mark.parametrize("memory", ["nan", "0", "-1", "inf"])
def test_memory_that_is_no_size_is_refused(tmp_path, capsys, memory):
    path = write(tmp_path, f"python train.py {COMPLETE} --hf-checkpoint /none/Qwen3-4B")
    assert main(["port", str(path), "--gpu-memory", memory]) == 2
    assert capsys.readouterr().err.startswith("--gpu-memory is ")
