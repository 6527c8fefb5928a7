"""Recipes: train.py accepts the flags of every launch script."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime_tis.trainer.cli.train_arguments import configure
from tests.checkpoints import make_checkpoint
from tests.runs import ROOT

SCRIPTS = [
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*/*.s[hb]*")),
    "tools/sglang_cpu/build.sh",
    ".ci/run",
]
SBATCH = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "time": r"(\d+-)?\d+:\d\d:\d\d",
    "signal": r"(B:)?[A-Z]+@\d+",
}
"""Options of sbatch that the script uses, and their values as Slurm's manual defines them."""
SRUN = 'while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=0 exec "$@"'
"""Stand-in for srun: runs the command once, on this machine."""


def command_line(recipe, *flags, **environment):
    """What a recipe would pass to train.py."""
    found = subprocess.run(
        ["bash", recipe, *flags],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "LAUNCH": "printf %s\\n", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    program, *arguments = found.stdout.splitlines()
    assert program == "train.py"
    return arguments


@pytest.fixture
def files(tmp_path):
    make_checkpoint(
        tmp_path / "model", "qwen3", max_position_embeddings=40960, num_key_value_heads=4
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"messages": [{"role": "user", "content": "1+1?"}], "label": "2"}) + "\n"
    )
    return {
        "MODEL": str(tmp_path / "model"),
        "TRAIN": str(rows),
        "EVAL": str(rows),
        "OUT": str(tmp_path / "out"),
    }


def torchrun(ranks):
    """What torchrun sets in the first of its processes."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_qwen3_on_gsm8k(files):
    line = command_line(
        "examples/qwen3_gsm8k/run.sh", "--num-rollout", "7", SGLANG_PYTHON=sys.executable, **files
    )
    found = configure(line, torchrun(4))
    assert found.sglang.sglang_python == sys.executable and found.loop.num_rollout == 7
    assert found.sglang.sglang_launch == 2
    assert found.sglang.sglang_server_args[:2] == ("--tp-size", "2")
    assert found.rollout.rollout_lookahead == 1 and found.correction.use_rs


@pytest.fixture
def mixture(files):
    """The same files with a mixture of 128 experts."""
    make_checkpoint(
        Path(files["MODEL"]),
        "qwen3_moe",
        max_position_embeddings=40960,
        num_experts=128,
        num_experts_per_tok=8,
    )
    return files


def test_qwen3_30b_a3b_with_servers_or_on_one_machine(mixture):
    servers = "http://10.0.0.5:30000 http://10.0.0.6:30000"
    line = command_line(
        "examples/qwen3_30b_a3b/run.sh", SERVERS=servers, ADDRESS_OF_RANK_0="10.0.0.1", **mixture
    )
    found = configure(line, torchrun(8))
    assert found.rollout.use_rollout_routing_replay and found.rollout.measure_routing_mismatch == 50
    assert found.megatron.expert_model_parallel_size == 8
    assert found.sglang.sglang_url == tuple(servers.split())
    assert found.correction.use_tis and found.correction.rs_veto_threshold == 1e-4
    found = configure(
        command_line("examples/qwen3_30b_a3b/run.sh", "--lr", "1e-7", TRAIN_GPUS="4", **mixture),
        torchrun(4),
    )
    assert found.megatron.expert_model_parallel_size == 4 and found.sglang.sglang_launch == 2
    assert found.sglang.sglang_server_args[:4] == ("--tp-size", "2", "--base-gpu-id", "4")
    with pytest.raises(subprocess.CalledProcessError) as error:
        command_line("examples/qwen3_30b_a3b/run.sh", **mixture)
    assert (
        error.value.returncode == 2
        and "set SERVERS to the URLs of SGLang's servers" in error.value.stderr
    )


def test_several_machines(files):
    servers = "http://10.0.0.5:30000 http://10.0.0.6:30000"
    line = command_line(
        "examples/clusters/torchrun.sh",
        "--num-rollout",
        "7",
        SERVERS=servers,
        MASTER="10.0.0.1",
        **files,
    )
    found = configure(line, torchrun(16))
    assert found.sglang.sglang_url == tuple(servers.split())
    assert found.sglang.sglang_sync_address == "10.0.0.1" and found.loop.num_rollout == 7


def test_slurm_runs_the_recipe_of_several_machines(files, tmp_path):
    """sbatch reads `#SBATCH` lines up to the first command and refuses unknown options."""
    script = (ROOT / "examples/clusters/slurm.sbatch").read_text()
    head, body = re.split(r"^(?=[^#\n])", script, maxsplit=1, flags=re.MULTILINE)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", head, re.MULTILINE))
    assert script.count("#SBATCH") == len(options) and options.keys() <= SBATCH.keys()
    assert all(re.fullmatch(SBATCH[name], value) for name, value in options.items())
    trainers = int(re.findall(r"^TRAINERS=(\d+)$", body, re.MULTILINE)[0])
    assert 0 < trainers < int(options["nodes"]) and options["ntasks-per-node"] == "1"
    assert f"--tp-size {options['gpus-per-node']} " in body
    for name, command in (("scontrol", "printf 'node%s\\n' 1 2 3 4"), ("srun", SRUN)):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{command}\n")
        (tmp_path / name).chmod(0o700)
    slurm = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-4]",
        "SGLANG_PYTHON": "true",
    }
    found = configure(
        command_line("examples/clusters/slurm.sbatch", **slurm, **files), torchrun(8 * trainers)
    )
    assert found.sglang.sglang_url == ("http://node3:30000", "http://node4:30000")
    assert found.sglang.sglang_sync_address == "node1"


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.rpartition("/")[2] for script in SCRIPTS])
def test_shellcheck(script):
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)
    subprocess.run([Path(sys.executable).with_name("shellcheck"), script], cwd=ROOT, check=True)


def test_kubernetes_runs_the_same_recipe(files):
    documents = yaml.safe_load_all((ROOT / "examples/clusters/kubernetes.yaml").read_text())
    by_name = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in documents}
    job, servers = by_name["Job", "slime-tis-train"], by_name["StatefulSet", "slime-tis-sample"]
    pod = job["template"]["spec"]
    (train,) = pod["containers"]
    environment = {each["name"]: each.get("value", "0") for each in train["env"]}
    assert (
        environment["MASTER"] == f"slime-tis-train-0.{pod['subdomain']}"
        and environment["NODES"] == "2"
    )
    for name, labels in (
        ("slime-tis-train", job["template"]),
        ("slime-tis-sample", servers["template"]),
    ):
        assert by_name["Service", name]["selector"] == labels["metadata"]["labels"]
    words = train["command"][1:] + train["args"]
    script = words[0]
    flags = words[1:]
    line = command_line(script, *flags, **environment | files)
    found = configure(line, torchrun(8 * int(environment["NODES"])))
    assert (
        found.sglang.sglang_url == tuple(environment["SERVERS"].split())
        and len(found.sglang.sglang_url) == 2
    )


@pytest.mark.parametrize("name", ["train", "sglang"])
def test_smollm2(name, tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "data/smollm2/checkpoint", "llama")
    (tmp_path / "data/smollm2/prompts").mkdir()
    for rows in ("train.jsonl", "eval.jsonl"):
        (tmp_path / "data/smollm2/prompts" / rows).write_text(
            json.dumps({"prompt": [], "label": "2"}) + "\n"
        )
    monkeypatch.chdir(tmp_path)
    found = configure(
        ["--custom-config-path", str(ROOT / f"examples/smollm2_reasoning_gym/{name}.yaml")], {}
    )
    assert not found.megatron.bf16
    assert (found.rollout.rollout_engine, found.rollout.weight_update_rounding) == (
        ("local", "nearest") if name == "train" else ("sglang", "stochastic")
    )
    assert (ROOT / str(found.rollout.custom_rm_path).split(":")[0]).is_file()
