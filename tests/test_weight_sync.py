"""The probe of --check-weight-sync, and what is refused when set-up ends half-way."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from slime_tis.cli.main import train
from slime_tis.weight_sync import PROBE_TOKENS, sync_check
from tests.runs import ROOT, make_task

SERVER = f"""
import sys, threading

sys.path.insert(0, {str(ROOT)!r})
from tests.rollout.sglang.fake_sglang import fake_servers

with fake_servers(1) as (server,):
    server.die()
    server.port = int(sys.argv[sys.argv.index("--port") + 1])
    server.come_back()
    threading.Event().wait()
"""
"""In place of SGLang's module of the same name: a server whose log-probs are those of no model."""


def dataset(*prompts: tuple[int, ...]) -> Any:
    return SimpleNamespace(prompts=[SimpleNamespace(token_ids=ids) for ids in prompts])


def test_the_probe_is_the_longest_prompt_cut_and_has_two_tokens() -> None:
    assert sync_check(dataset((1,), (4, 5, 6), (2, 3)), 0.1).probe == (4, 5, 6)
    assert sync_check(dataset((9,) * 1000), 0.1).probe == (9,) * PROBE_TOKENS
    assert sync_check(dataset((7,), (8,)), 0.1).probe == (7, 7)


def test_prompts_of_one_token_are_checked(tmp_path: Path) -> None:
    task = make_task(tmp_path, "qwen2")  # whose tokenizer puts no <bos> before the text
    (tmp_path / "short.jsonl").write_text('{"prompt": ">", "label": "1"}\n' * 4)
    flags = [*task, "--prompt-data", str(tmp_path / "short.jsonl"), "--check-weight-sync", "--num-rollout", "1"]
    assert train([*flags, "--rollout-precision", "fp32", "--output-dir", str(tmp_path / "run")]) == 0


def test_servers_are_stopped_where_set_up_fails_after_their_start(
    task: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "packages/sglang").mkdir(parents=True)
    (tmp_path / "packages/sglang/__init__.py").touch()
    (tmp_path / "packages/sglang/launch_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    place = task.index("--rollout-precision")
    flags = [*task[:place], *task[place + 2 :], "--rollout-engine", "sglang", "--sglang-launch", "1"]
    flags += ["--sglang-python", sys.executable, "--sglang-weight-sync", "disk", "--check-weight-sync"]
    flags += ["--sglang-weight-dir", str(tmp_path / "weights"), "--output-dir", str(tmp_path / "run")]
    assert train(flags) == 1
    assert "error: parameter-sync error: after the update to step 0" in capsys.readouterr().err
    assert (tmp_path / "run/sglang_0.log").exists()  # a server was started
    lines = [word for one in psutil.Process().children(recursive=True) for word in one.cmdline()]
    assert "--model-path" not in lines
