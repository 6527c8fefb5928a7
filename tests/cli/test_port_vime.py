"""slime-tis port: scripts of vime, which is slime with vLLM, keep their engine and its flags."""

import pytest

from slime_tis.trainer.cli.train_arguments import configure
from tests.cli.test_port import ported

SERVERS = "python train.py --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2"
"""Launches servers beside four training ranks."""

# (flags of the script, part of the printed command)
COMMANDS = {
    "server flag": (
        "--vllm-gpu-memory-utilization 0.7",
        "train.py --vllm-gpu-memory-utilization 0.7 --rollout-engine vllm",
    ),
    "tensor parallel": (
        "--vllm-max-num-seqs 64",
        "--vllm-launch 4 --vllm-tensor-parallel-size 2 --vllm-base-gpu-id 8",
    ),
    "pipeline parallel": (
        "--vllm-pipeline-parallel-size 2",
        "--rollout-engine vllm --vllm-launch 4 --vllm-base-gpu-id 8",
    ),
    "concurrency": ("--vllm-server-concurrency 512", "--vllm-concurrency 512"),
    "running servers": (
        "--rollout-external-engine-addrs a:1 b:2 --vllm-dtype float16",
        "--vllm-url http://a:1 http://b:2 --rollout-engine vllm",
    ),
    "router": (
        "--vllm-router-ip 10.0.0.1 --vllm-router-port 8000",
        "--vllm-router-ip 10.0.0.1 --vllm-router-port 8000 --rollout-engine vllm",
    ),
    "buckets": (
        "--vllm-dtype auto --update-weight-buffer-size 536870912",
        "--vllm-bucket-mb 512",
    ),
    "asynchronous rollouts": (
        "--vllm-dtype auto --rollout-function-path"
        " vime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "--rollout-lookahead 1",
    ),
}


@pytest.mark.parametrize(("flags", "printed"), COMMANDS.values(), ids=COMMANDS)
def test_printed_command_of_vime(tmp_path, flags, printed):
    script = f"{SERVERS.replace('8', '16')} {flags}"
    assert printed in ported(tmp_path, script)[0]


# (flags of the script, part of the comments)
COMMENTS = {
    "packed weights": (
        "--vllm-weight-sync-packed",
        "weights travel in buckets of --vllm-bucket-mb",
    ),
    "several kinds of servers": (
        "--vllm-config groups.yaml",
        "--vllm-config groups.yaml is dropped: vime's file describes several kinds of servers",
    ),
    "router policy": ("--vllm-router-policy random", "name it with --vllm-router-ip"),
    "health checks": (
        "--vllm-dtype auto --rollout-health-check-interval 5",
        "see --vllm-recovery-timeout and --vllm-weight-sync",
    ),
    "placement": ("--vllm-dtype auto", "Training and vLLM do not share GPUs"),
    "raw log-probs": (
        "--vllm-logprobs-mode raw_logprobs",
        "--vllm-logprobs-mode is 'raw_logprobs' but always processed_logprobs here",
    ),
    "unknown flag": ("--vllm-dtype auto --frobnicate 3", "--frobnicate 3 is dropped"),
    "flag of the other engine": (
        "--vllm-dtype auto --sglang-mem-fraction-static 0.7",
        "--sglang-mem-fraction-static 0.7 is dropped",
    ),
}


@pytest.mark.parametrize(("flags", "comment"), COMMENTS.values(), ids=COMMENTS)
def test_comment_on_a_script_of_vime(tmp_path, flags, comment):
    assert comment in ported(tmp_path, f"{SERVERS} {flags}")[1]


def test_script_in_vimes_checkout_samples_from_vllm(tmp_path):
    folder = tmp_path / "vime"
    folder.mkdir()
    assert "--rollout-engine vllm" in ported(folder, f"{SERVERS} --lr 1")[0]


def test_train_py_gives_servers_their_configuration_file():
    command = ["--rollout-engine", "vllm", "--vllm-launch", "1", "--vllm-config", "server.yaml"]
    # Another requirement, so --vllm-config itself is accepted.
    with pytest.raises(ValueError, match="--hf-checkpoint"):
        configure(command, {})


def test_train_py_refuses_a_flag_of_vime_that_no_server_has(tmp_path):
    command = ["--rollout-engine", "vllm", "--vllm-launch", "1", "--vllm-weight-sync-packed"]
    with pytest.raises(ValueError, match="weights travel in buckets of --vllm-bucket-mb"):
        configure(command, {})
