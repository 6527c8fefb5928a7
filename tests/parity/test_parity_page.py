"""docs/parity.md: its commands and its output are those of the program."""

import re
import shlex

import pytest
import torch

from slime_tis.main import _parser, main
from slime_tis.parity.executions import EXECUTIONS
from slime_tis.parity.parity_command import sides
from slime_tis.peft_directory import AdapterConfig, tensor_name, write_adapter
from tests.checkpoints import make_checkpoint
from tests.runs import ROOT

PAGE = (ROOT / "docs" / "parity.md").read_text()
COMMANDS, ADAPTER_COMMANDS, OUTPUT = re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S)

ADAPTER = AdapterConfig(rank=4, alpha=8.0, targets=("q_proj",))
Q_PROJ = "model.layers.0.self_attn.q_proj"
ADAPTER_TENSORS = {
    tensor_name(Q_PROJ, "A"): torch.zeros(4, 8),
    tensor_name(Q_PROJ, "B"): torch.zeros(8, 4),
}


@pytest.mark.parametrize("line", COMMANDS.splitlines(), ids=range(len(COMMANDS.splitlines())))
def test_command_of_the_page_is_accepted(line):
    words = shlex.split(line, comments=True)[1:]
    chosen = _parser().parse_args(words)
    reference, others = sides(chosen)
    assert reference.checkpoint == "CHECKPOINT" and others


@pytest.mark.parametrize("line", ADAPTER_COMMANDS.splitlines(), ids=range(3))
def test_command_with_an_adapter_is_accepted(line, tmp_path, monkeypatch):
    (tmp_path / "ADAPTER").mkdir()
    write_adapter(tmp_path / "ADAPTER", ADAPTER_TENSORS, ADAPTER, base="BASE")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)[1:]
    reference, others = sides(_parser().parse_args(words))
    assert reference.adapter == "ADAPTER" and others


def test_page_has_a_row_for_each_execution():
    rows = re.findall(r"^\| (`\w+`.*?) \|", PAGE, re.M)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [*EXECUTIONS]


def outline(output):
    """The first word of each line of the tables and facts, without numbers."""
    heads = []
    for line in output.splitlines():
        heads.append(re.split("  +", line)[0])
    return heads


def test_output_of_the_page_has_the_form_of_the_program(tmp_path, capsys):
    checkpoint = make_checkpoint(tmp_path / "qwen3", "qwen3", num_hidden_layers=3)
    options = re.search(r"\(`(--precision .*?)`\)", PAGE)[1]
    assert main(["parity", str(checkpoint), *shlex.split(options)]) == 0
    printed = capsys.readouterr().out
    assert outline(printed)[2:] == outline(OUTPUT)[2:]
    assert printed.startswith("norm before attention of layer 0: full and training differ in bf16")
