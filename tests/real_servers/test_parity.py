"""`slime-tis parity` with a real server."""

import json

import pytest

from slime_tis.main import main
from tests.real_servers.engines import ServedModel
from tests.real_servers.references import BOUND
from tests.real_servers.servers import ENGINE


def test_parity_finds_rounding_only(model: ServedModel, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parity", str(model.checkpoint), "--other", ENGINE.name, "--url", model.server.url]
    # The engine sends the checkpoint's weights: other tests leave theirs on the server.
    with model.engine():
        assert main([*words, "--samples", "3", "--tokens", "20", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    # Prompts have 6, 13 and 20 tokens; the first token of a sample has no log-prob.
    assert result["log_probs"]["tokens"] == (6 + 20) + (13 + 20) + (20 + 20) - 3
    assert result["log_probs"]["largest"] < BOUND
    assert result["other"]["precision"] == "fp32"
