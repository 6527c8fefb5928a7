"""Porting launch scripts: what is printed parses here, and whatever was left out is said."""

import json
import shlex

import pytest

from slime_tis.main import main, port_script
from slime_tis.trainer.cli.arguments import ALIASES, FLAGS, OPTIONS, configure
from slime_tis.trainer.cli.launch_script import read_launch
from slime_tis.trainer.cli.port import SPECIAL, Vocabulary, port
from slime_tis.trainer.cli.slime_flags import ADVICE

VOCABULARY = Vocabulary(options=OPTIONS, aliases=ALIASES, flags=FLAGS)

MODEL = """
MODEL_ARGS=(
   --swiglu --num-layers 36 --hidden-size 2560 --num-attention-heads 32 --num-query-groups 8
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}" --qk-layernorm
)"""
RUN = r"""#!/bin/bash
pkill -9 ray
set -ex
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"
GPUS=$(nvidia-smi -L | wc -l)
if [ "$GPUS" -le 0 ]; then
    GPUS=8
fi

CKPT_ARGS=(
   --hf-checkpoint DIRECTORY/model
   --ref-load DIRECTORY/model_torch_dist
   --load DIRECTORY/saved/
   --save DIRECTORY/saved
)
ROLLOUT_ARGS=(
   --prompt-data DIRECTORY/train.jsonl
   --input-key prompt --label-key label
   --rm-type deepscaler
   --num-rollout 10 --rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 32
   --rollout-max-response-len 64
   --balance-data
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
   --attention-dropout 0.0 --hidden-dropout 0.0 --attention-backend flash
   --use-tensorboard --wandb-key ${WANDB_KEY} --tb-experiment-name "a 'b'"
   --update-weight-buffer-size $((512 * 1024)) --frobnicate 3
)
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node ${GPUS} --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]} "${OTHER_ARGS[@]}"
"""
PORTED = r"""# run.sh for train.py; nothing of it was run. Its flags: 5 renamed, 10 left out since config.json or this
#   program says it, 23 kept, 3 changed, 3 not supported, 1 to do by hand, 1 not known.
torchrun --nproc-per-node 4 train.py \
   --hf-checkpoint DIRECTORY/model \
   --load DIRECTORY/saved \
   --save DIRECTORY/saved \
   --prompt-data DIRECTORY/train.jsonl \
   --input-key prompt \
   --label-key label \
   --rm-type deepscaler \
   --num-rollout 10 \
   --rollout-batch-size 8 \
   --n-samples-per-prompt 4 \
   --global-batch-size 32 \
   --rollout-max-response-len 64 \
   --advantage-estimator grpo \
   --policy-loss gspo \
   --eps-clip 3e-4 \
   --lr 1e-6 \
   --lr-decay-style constant \
   --adam-beta2 0.98 \
   --eval-prompt-data aime DIRECTORY/train.jsonl \
   --tensor-model-parallel-size 2 \
   --sequence-parallel \
   --use-dynamic-batch-size \
   --max-tokens-per-gpu 9216 \
   --sglang-mem-fraction-static 0.7 \
   --sglang-concurrency 512 \
   --use-tensorboard \
   --tb-experiment-name 'a '"'"'b'"'"'' \
   --rollout-engine sglang \
   --sglang-launch 2 \
   --sglang-tp-size 2 \
   --sglang-base-gpu-id 4 \
   --bf16 \
   --eval-temperature 1.0
"""
RANK_0 = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def run_sh(tmp_path):
    """A launch script in slime's form, with its model and data."""
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
    """The words after train.py, as bash reads what was printed."""
    words = shlex.split(printed.replace("\\\n", " "), comments=True)
    return words[words.index("train.py") + 1 :]


def ported(tmp_path, flags):
    path = tmp_path / "one.sh"
    path.write_text(f"python train.py {flags}")
    return port(read_launch(path), VOCABULARY)


def test_a_script_in_slimes_form_is_ported_and_explained(run_sh):
    printed = port_script(str(run_sh))
    shown = printed.replace(str(run_sh.parent), "DIRECTORY")
    assert shown.startswith(PORTED)
    notes = " ".join(shown[len(PORTED) :].replace("#", " ").split())
    for said in (
        "GPUS is set under a condition; '8' is taken.",
        "--update-weight-buffer-size $(…): its value is the output of a command, which was not run; add it yourself.",
        "--ref-load DIRECTORY/model_torch_dist is left out: slime's is a Megatron checkpoint,",
        "--load DIRECTORY/saved/ resumes from checkpoints of this program; those of slime are not read.",
        "--advantage-estimator gspo is --advantage-estimator grpo --policy-loss gspo.",
        "torchrun starts 4 ranks, and --sglang-launch 2 servers of 2 GPUs from GPU 4 on: training and SGLang do not",
        "--sglang-server-concurrency 512 is --sglang-concurrency 512.",
        "--swiglu, --num-layers 36, --hidden-size 2560, --num-attention-heads 32, --num-query-groups 8,",
        "--balance-data: micro-batches are packed by tokens alone,",
        "--wandb-key ${WANDB_KEY}: the wandb package reads its account and run from the environment;",
        "--frobnicate 3: neither a flag of train.py nor one of slime that is known here.",
    ):
        assert said in notes


def test_what_is_printed_parses_here(run_sh):
    arguments = configure(command_of(port_script(str(run_sh))), RANK_0)
    assert arguments.reporting.tb_experiment_name == "a 'b'"
    assert arguments.policy.advantage_estimator == "grpo" and arguments.correction.policy_loss == "gspo"
    assert arguments.sglang.sglang_server_args == (
        "--mem-fraction-static",
        "0.7",
        "--tp-size",
        "2",
        "--base-gpu-id",
        "4",
    )
    assert "on this machine train.py says" not in port_script(str(run_sh))


def test_a_flag_that_contradicts_config_json_is_said(run_sh):
    (run_sh.parent / "models" / "tiny.sh").write_text("MODEL_ARGS=(--num-layers 28)")
    said = " ".join(port_script(str(run_sh)).replace("#", " ").split())
    assert "--num-layers is '28' but num_hidden_layers of config.json is 36; leave it out, or give the" in said


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
    ids=["apart", "two nodes", "colocated", "batch of 6", "servers that run"],
)
def test_gpus_are_shared_out(tmp_path, flags, argv, ranks):
    found = ported(tmp_path, flags)
    kept = [word for word in found.argv if word not in ("--rollout-engine", "sglang")]
    kept = kept[: kept.index("--bf16")]
    assert " ".join(kept) == argv
    assert found.ranks == ranks


CARRIED_OVER = [
    ("--update-weight-buffer-size 536870912", "--sglang-bucket-mb 512"),
    ("--update-weight-transport nccl", "--sglang-weight-sync distributed"),
    ("--check-weight-update-equal", "--check-weight-sync"),
    ("--advantage-estimator reinforce_plus_plus", "--advantage-estimator reinforce_plus_plus_baseline"),
    ("--load /ckpt", ""),
    ("--lr fast", ""),
    ("--lr 1 --lr 2", "--lr 2"),
    ("--seed=7", "--seed 7"),
    (
        "--custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
        "--custom-tis-function-path custom_tis.mis.compute_mis_weights_with_cp",
    ),
]


@pytest.mark.parametrize(("flags", "argv"), CARRIED_OVER, ids=[row[0][:60] for row in CARRIED_OVER])
def test_values_are_carried_over(tmp_path, flags, argv):
    found = ported(tmp_path, flags)
    del found.flags["--rollout-engine"]
    kept = found.argv
    assert " ".join(kept[: kept.index("--sglang-launch")]) == argv


def test_train_async_is_one_rollout_of_lookahead(tmp_path):
    (tmp_path / "run.sh").write_text("python train_async.py --lr 1")
    assert port(read_launch(tmp_path / "run.sh"), VOCABULARY).flags["--rollout-lookahead"] == ("1",)


def test_an_unset_variable_stays_one_and_nothing_else_is_expanded(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("python train.py --wandb-group \"${USER_X}-\\`id\\`\\$(id)\" --save '$(id)'")
    printed = port_script(str(path))
    assert '--wandb-group "${USER_X}-\\`id\\`\\$(id)"' in printed
    assert "--save '$(id)'" in printed


def test_what_train_py_says_names_unset_variables_as_bash_does(run_sh):
    run_sh.write_text(
        run_sh.read_text().replace(f"--prompt-data {run_sh.parent}/train.jsonl", '--prompt-data "${TRAIN}"')
    )
    printed = port_script(str(run_sh))
    verdict = " ".join(printed[printed.index("on this machine train.py says:") :].replace("#", " ").split())
    assert "'${TRAIN}'" in verdict and "ue000" not in printed


def test_every_special_flag_is_one_of_this_program():
    assert set(SPECIAL) <= FLAGS


def test_no_advice_names_a_flag_that_is_nowhere():
    """What advice says to use exists: flags of this program, those of servers, of torchrun, or groups of flags."""
    elsewhere = {"--nnodes", "--nproc-per-node", "--sglang-tp-size", "--sglang-base-gpu-id", "--sglang-quantization"}
    for advice in ADVICE:
        named = {word.strip(",;:.") for word in f"{advice.reason} {advice.instead}".split() if word.startswith("--")}
        assert named <= FLAGS | elsewhere | {"--eval-", "--help"}, advice.flags


def test_the_command(run_sh, capsys):
    assert main(["port", str(run_sh)]) == 0
    assert capsys.readouterr().out == port_script(str(run_sh))
    assert main(["port", str(run_sh.parent / "none.sh")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"'{run_sh.parent / 'none.sh'}' cannot be read: No such file or directory.\n"
