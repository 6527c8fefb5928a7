"""Recipes: train.py accepts the flags of every launch script."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_tis.trainer.cli.train_arguments import configure
from slime_tis.trainer.cli.train_options import Arguments
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


def command_line(recipe: str, *flags: str, **environment: str) -> list[str]:
    """The flags that a recipe would pass to train.py."""
    process = subprocess.run(
        ["bash", recipe, *flags],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "LAUNCH": "printf %s\\n", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    program, *arguments = process.stdout.splitlines()
    assert program == "train.py"
    return arguments


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A checkpoint and prompts, as the variables that recipes read."""
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


def torchrun(ranks: int) -> dict[str, str]:
    """The variables that torchrun sets in the first of its processes."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }


@pytest.fixture
def gsm8k(files: dict[str, str]) -> Arguments:
    """The options of the recipe on four GPUs, with a flag of the user."""
    flags = command_line(
        "examples/qwen3_gsm8k/run.sh", "--num-rollout", "7", SGLANG_PYTHON=sys.executable, **files
    )
    return configure(flags, torchrun(4))


def test_gsm8k_starts_two_servers(gsm8k):
    assert gsm8k.servers["sglang"].python == sys.executable
    assert gsm8k.servers["sglang"].launch == 2
    assert gsm8k.servers["sglang"].server_args[:2] == ("--tp-size", "2")


def test_gsm8k_corrects_a_rollout_ahead(gsm8k):
    assert gsm8k.rollout.rollout_lookahead == 1
    assert gsm8k.correction.use_rs


def test_gsm8k_passes_flags_on(gsm8k):
    assert gsm8k.loop.num_rollout == 7


@pytest.fixture
def mixture(files: dict[str, str]) -> dict[str, str]:
    """The same files with a mixture of 128 experts."""
    make_checkpoint(
        Path(files["MODEL"]),
        "qwen3_moe",
        max_position_embeddings=40960,
        num_experts=128,
        num_experts_per_tok=8,
    )
    return files


MIXTURE = "examples/qwen3_30b_a3b/run.sh"
SERVERS = "http://10.0.0.5:30000 http://10.0.0.6:30000"


@pytest.fixture
def with_servers(mixture: dict[str, str]) -> Arguments:
    """The options of the recipe on eight GPUs, with two running servers."""
    flags = command_line(MIXTURE, SERVERS=SERVERS, ADDRESS_OF_RANK_0="10.0.0.1", **mixture)
    return configure(flags, torchrun(8))


def test_the_mixture_replays_its_routing(with_servers):
    assert with_servers.rollout.use_rollout_routing_replay
    assert with_servers.rollout.measure_routing_mismatch == 50


def test_the_mixture_is_corrected(with_servers):
    assert with_servers.correction.use_tis
    assert with_servers.correction.rs_veto_threshold == 1e-4


def test_all_gpus_train_if_servers_run_elsewhere(with_servers):
    assert with_servers.megatron.expert_model_parallel_size == 8
    assert with_servers.servers["sglang"].url == tuple(SERVERS.split())


def test_one_machine_trains_on_half_of_its_gpus(mixture):
    flags = command_line(MIXTURE, "--lr", "1e-7", TRAIN_GPUS="4", **mixture)
    arguments = configure(flags, torchrun(4))
    assert arguments.megatron.expert_model_parallel_size == 4
    assert arguments.servers["sglang"].launch == 2
    first_server = arguments.servers["sglang"].server_args[:4]
    assert first_server == ("--tp-size", "2", "--base-gpu-id", "4")


def test_the_mixture_needs_servers_or_training_gpus(mixture):
    with pytest.raises(subprocess.CalledProcessError) as error:
        command_line(MIXTURE, **mixture)
    assert error.value.returncode == 2
    assert "set SERVERS to the URLs of SGLang's servers" in error.value.stderr


def test_several_machines(files):
    flags = command_line(
        "examples/clusters/torchrun.sh",
        "--num-rollout",
        "7",
        SERVERS=SERVERS,
        MASTER="10.0.0.1",
        **files,
    )
    arguments = configure(flags, torchrun(16))
    assert arguments.servers["sglang"].url == tuple(SERVERS.split())
    assert arguments.servers["sglang"].sync_address == "10.0.0.1"
    assert arguments.loop.num_rollout == 7


@dataclass(frozen=True)
class SlurmScript:
    """examples/clusters/slurm.sbatch: its options, and the commands below them."""

    options: dict[str, str]
    body: str

    @property
    def trainers(self) -> int:
        """The number of nodes that train."""
        return int(re.findall(r"^TRAINERS=(\d+)$", self.body, re.MULTILINE)[0])


@pytest.fixture
def slurm_script() -> SlurmScript:
    """sbatch reads `#SBATCH` lines up to the first command."""
    script = (ROOT / "examples/clusters/slurm.sbatch").read_text()
    head, body = re.split(r"^(?=[^#\n])", script, maxsplit=1, flags=re.MULTILINE)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", head, re.MULTILINE))
    assert script.count("#SBATCH") == len(options)
    return SlurmScript(options, body)


def test_slurm_knows_every_option(slurm_script):
    """sbatch refuses unknown options."""
    for name, value in slurm_script.options.items():
        assert re.fullmatch(SBATCH[name], value)


def test_slurm_leaves_nodes_for_servers(slurm_script):
    assert 0 < slurm_script.trainers < int(slurm_script.options["nodes"])
    assert slurm_script.options["ntasks-per-node"] == "1"
    assert f"--tp-size {slurm_script.options['gpus-per-node']} " in slurm_script.body


def test_slurm_runs_the_recipe_of_several_machines(slurm_script, files, tmp_path):
    programs = {"scontrol": "printf 'node%s\\n' 1 2 3 4", "srun": SRUN}
    for name, command in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{command}\n")
        (tmp_path / name).chmod(0o700)
    slurm = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-4]",
        "SGLANG_PYTHON": "true",
    }
    flags = command_line("examples/clusters/slurm.sbatch", **slurm, **files)
    arguments = configure(flags, torchrun(8 * slurm_script.trainers))
    assert arguments.servers["sglang"].url == ("http://node3:30000", "http://node4:30000")
    assert arguments.servers["sglang"].sync_address == "node1"


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.rpartition("/")[2] for script in SCRIPTS])
def test_shellcheck(script):
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)
    subprocess.run([Path(sys.executable).with_name("shellcheck"), script], cwd=ROOT, check=True)


Specs = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def kubernetes() -> Specs:
    """The specifications of examples/clusters/kubernetes.yaml by kind and name."""
    text = (ROOT / "examples/clusters/kubernetes.yaml").read_text()
    return {
        (document["kind"], document["metadata"]["name"]): document["spec"]
        for document in yaml.safe_load_all(text)
    }


def training_container(kubernetes: Specs) -> tuple[dict[str, Any], dict[str, str]]:
    """The container of the training job, and its environment."""
    (container,) = kubernetes["Job", "slime-tis-train"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value", "0") for each in container["env"]}
    return container, environment


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Job", "slime-tis-train"), ("StatefulSet", "slime-tis-sample")],
    ids=["training", "servers"],
)
def test_a_kubernetes_service_selects_its_pods(kubernetes, kind, name):
    labels = kubernetes[kind, name]["template"]["metadata"]["labels"]
    assert kubernetes["Service", name]["selector"] == labels


def test_kubernetes_names_the_first_pod(kubernetes):
    _, environment = training_container(kubernetes)
    subdomain = kubernetes["Job", "slime-tis-train"]["template"]["spec"]["subdomain"]
    assert environment["MASTER"] == f"slime-tis-train-0.{subdomain}"
    assert environment["NODES"] == "2"


def test_kubernetes_runs_the_recipe_of_several_machines(kubernetes, files):
    container, environment = training_container(kubernetes)
    script, *flags = container["command"][1:] + container["args"]
    line = command_line(script, *flags, **environment | files)
    arguments = configure(line, torchrun(8 * int(environment["NODES"])))
    assert arguments.servers["sglang"].url == tuple(environment["SERVERS"].split())
    assert len(arguments.servers["sglang"].url) == 2


@pytest.fixture
def smollm2_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the checkpoint and prompts that the configurations name."""
    make_checkpoint(tmp_path / "data/smollm2/checkpoint", "llama")
    prompts = tmp_path / "data/smollm2/prompts"
    prompts.mkdir()
    for name in ("train.jsonl", "eval.jsonl"):
        (prompts / name).write_text(json.dumps({"prompt": [], "label": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("smollm2_data")
@pytest.mark.parametrize(
    ("name", "engine", "rounding"),
    [("train", "local", "nearest"), ("sglang", "sglang", "stochastic")],
    ids=["local", "sglang"],
)
def test_smollm2(name, engine, rounding):
    config = ROOT / f"examples/smollm2_reasoning_gym/{name}.yaml"
    # The recipe's precision otherwise depends on the processor.
    flags = ["--custom-config-path", str(config), "--no-bf16-if-fast"]
    arguments = configure(flags, {})
    assert not arguments.megatron.bf16
    assert arguments.rollout.rollout_engine == engine
    assert arguments.rollout.weight_update_rounding == rounding
    assert (ROOT / str(arguments.rollout.custom_rm_path).split(":")[0]).is_file()
