"""Output paths are checked before anything is built, with one message that names the obstacle."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.trainer.cli.file_checks import held_outputs
from slime_tis.trainer.cli.train_arguments import configure
from slime_tis.trainer.storage.checkpoint_files import MANIFEST, TRAINER_STATE

FLAGS = """
--hf-checkpoint data/model --ref-load data/ref --use-kl-loss --kl-loss-coef 0.1
--prompt-data data/train.jsonl
--eval-prompt-data e data/eval.jsonl --rm-type exact_match --num-rollout 1 --rollout-batch-size 4
--n-samples-per-prompt 2 --rollout-max-response-len 12
"""


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A model, data and earlier checkpoints in the working directory; returns the common flags."""
    monkeypatch.chdir(tmp_path)
    for directory in (
        "data/model",
        "data/ref",
        "old/iter_0000003",
        "export",
        "project",
        "empty",
        "runs/x/checkpoints",
    ):
        Path(directory).mkdir(parents=True)
    for model in ("data/model", "data/ref"):
        Path(model, "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    for name in ("train", "eval"):
        Path(f"data/{name}.jsonl").write_text('{"input": "1"}\n')
    for name in (
        "project/thesis.txt",
        "deep/er/thesis.txt",
        "hidden/.env",
        ".taken.unfinished/thesis.txt",
        "edited/mine",
    ):
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text("mine")
    Path("export/config.json").write_text("{}")
    for directory, file in (
        ("export", "config.json"),
        ("edited", "config.json"),
        ("hidden", "../file"),
    ):
        Path(directory, ".slime_tis_export.json").write_text(json.dumps({"files": [file]}))
    Path("link").symlink_to("data")
    Path("lost").symlink_to("nowhere")
    os.mkfifo("pipe.pt")
    parquet.write_table(pa.table({"mine": [1]}), "other.parquet")
    torch.save({"metadata": {}, "mine": torch.ones(3)}, "other.pt")
    (Path("old/iter_0000003") / TRAINER_STATE).write_text(
        json.dumps({"run": "a", "options": {"seed": 7}})
    )
    return FLAGS.split()


DUMPS = ("--save-debug-train-data", "--save-debug-rollout-data")
FOREIGN = (
    "data/train.jsonl",
    "data/model/config.json",
    "lost",
    "pipe.pt",
    "other.parquet",
    "other.pt",
)
# part of the message by flags
REFUSED = {
    "--save-hf data/model": "the same as --hf-checkpoint",
    "--save-hf link/model": "the same as --hf-checkpoint",
    "--save-hf data/model/hf": "inside --hf-checkpoint",
    "--save-hf data/ref/x": "inside --ref-load",
    "--save-hf /": "above --hf-checkpoint",
    "--save c --save-hf c": "the same as --save",
    "--save c/d --save-hf c": "above --save",
    "--load old --seed 7 --save-hf old/x": "inside --load",
    "--output-dir r --save-hf r": "the same as --output-dir",
    "--output-dir r --save-hf r/tensorboard/hf": "the run itself uses",
    "--save-hf project": "'thesis.txt'",
    "--save-hf deep": "'er'",
    "--save-hf hidden": "'.env'",
    "--save-hf edited": "'mine'",
    "--save-hf taken": "in its way",
    "--save-hf lost": "broken link",
    "--save-hf data": "above --hf-checkpoint",
    "--save-hf data/": "above --hf-checkpoint",
    "--save-hf .": "above",
    "--save-hf ..": "above",
    "--save-hf /dev/null": "that is a file",
    "--save-hf data/../data/model/": "the same as --hf-checkpoint",
    f"--save-hf {'x' * 300}": "File name too long",
    "--save-hf data/train.jsonl/hf": "is a file",
    "--save-hf data/train.jsonl": "that is a file",
    "--save-hf /proc": "mount point",
    "--output-dir data/train.jsonl": "that is a file",
    "--save old": "up to iter_0000003",
    "--load old": "--seed is 1234 but was 7 in the run that --load resumes",
    "--use-tensorboard --tb-project-name ../../..": "leads out of the run directory",
    **{f"{flag} {path}": "is no dump of this program" for flag in DUMPS for path in FOREIGN},
    "--save-debug-train-data data": "it is a directory",
    "--save-hf hf --dump-details hf/dump": "inside --save-hf",
    "--save-hf hf --save-debug-train-data hf": "inside --save-hf",
    "--output-dir r --save-debug-rollout-data r/metrics.jsonl": "the run itself uses",
    "--output-dir r --save-debug-train-data r/tensorboard/{rollout_id}.pt": "the run itself uses",
    "--dump-details ~/dump": "~",
    "--rm-url http://me:s3cret@host/x": "--rm-url",
    "--rm-url https://host/x?token=s3cret": "--rm-url",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_path_of_other_files_is_refused(flags, base):
    before = sorted(Path.cwd().rglob("*"))
    with pytest.raises(ValueError, match=r"^--") as refusal:
        configure([*base, *flags.split()], {})
    assert REFUSED[flags] in str(refusal.value) and "s3cret" not in str(refusal.value)
    assert sorted(Path.cwd().rglob("*")) == before


@pytest.mark.parametrize(
    "flags",
    [
        "--save-hf new/hf",
        "--save-hf empty",
        "--save-hf export",
        "--save-hf export/",
        "--save-hf data/hf",
        "--output-dir runs/x --save runs/x/checkpoints --save-hf runs/x/hf",
        "--load old --save old --seed 7",
        "--load link/../old --save ./old/ --seed 7",
        "--load fresh --save ./fresh",
        "--save empty",
        "--use-tensorboard --tb-project-name a/b",
    ],
)
def test_a_separate_path_is_accepted(flags, base):
    configure([*base, *flags.split()], {})


@pytest.mark.parametrize("name", ["a.parquet", "a.pt"])
def test_an_earlier_dump_is_written_over(name, base):
    write(
        name, TokenTable.from_parts([SampleParts(train_log_prob=[-1.0], rollout_log_prob=[-1.0])])
    )
    configure([*base, "--save-debug-train-data", name], {})
    with pytest.raises(
        ValueError, match=r"--save-debug-rollout-data would write .* is no dump of this program"
    ):
        configure([*base, "--save-debug-rollout-data", name], {})


def test_a_file_with_the_name_of_a_report_is_not_overwritten(base):
    Path("project/config.yaml").write_text("mine: 1\n")
    with pytest.raises(
        ValueError, match=r"--output-dir is 'project' but its config\.yaml is of no run"
    ):
        configure([*base, "--output-dir", "project"], {})


def test_checkpoints_that_came_after_the_check_are_seen_under_the_lock(base):
    def hold(arguments):
        with held_outputs(arguments.megatron, arguments.reporting, main=True):
            assert sorted(path.name for path in Path("new").iterdir()) == [".lock"]
            assert sorted(path.name for path in Path("r").iterdir()) == [".export.lock", ".lock"]

    arguments = configure(
        [*base, "--save", "new", "--output-dir", "r", "--save-hf", "r/export"], {}
    )
    hold(arguments)
    assert not list(Path("new").iterdir()) and not list(Path("r").iterdir())
    Path("new/iter_0000001").mkdir()
    (Path("new/iter_0000001") / MANIFEST).write_text("")
    with pytest.raises(ValueError, match="another run's checkpoints are there, up to iter_0000001"):
        hold(arguments)
