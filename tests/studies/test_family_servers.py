"""The study of families on servers: its messages, its table, and its models."""

from pathlib import Path

from slime_tis.families import FAMILIES
from studies.families.measure import Measurement, error_message
from studies.families.models import MODELS
from studies.families.run import cell, read, table
from tests.checkpoints import architecture_of_family
from tests.runs import ROOT

OLDER = {
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
}
"""Families that other tests run on real servers."""
LOG = """\
Traceback (most recent call last):
RuntimeError: Expected size 192 but got 576.
(APIServer) RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_every_family_has_a_model():
    architectures = {architecture_of_family(model.family) for model in MODELS.values()}
    assert architectures == FAMILIES.keys() - OLDER


def test_the_message_is_the_cause_in_the_servers_log(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(LOG)
    message = error_message(log, "error: the server ended")
    assert message == "RuntimeError: Expected size 192 but got 576."


def test_advice_about_open_files_is_no_cause(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        "can cause `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n\n"
    )
    assert error_message(log, "error: refused") == "refused"


def test_the_message_of_an_invalid_option_says_what_is_invalid(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        "(APIServer pid=1) pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        "(APIServer pid=1)   Assertion failed, Chunked prefill is required. [type=error]\n"
    )
    assert error_message(log, "error: the server ended") == (
        "Assertion failed, Chunked prefill is required."
    )


def test_without_a_log_the_message_is_that_of_training():
    assert error_message(Path("missing"), "a warning\nerror: refused\n") == "refused"


def test_equal_messages_have_one_note():
    failed = Measurement(engine="vllm", model="phi3", before=None, after=None, message="no")
    notes: list[str] = []
    assert [cell(failed, notes), cell(failed, notes)] == ["failed (1)", "failed (1)"]


def test_models_without_a_measurement_were_not_run():
    assert table({}).count("not run | not run") == len(MODELS)


def test_the_table_of_the_page_is_that_of_the_results():
    page = (ROOT / "docs" / "models.md").read_text()
    assert table(read()) in page
