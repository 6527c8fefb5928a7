"""The file of --eval-config: slime's layout, precedence of values, and refusals."""

from pathlib import Path

import pytest

from slime_tis.trainer.engines.build import evaluation_sampling
from tests.cli.conftest import configured, refusal

TWO_SETS = """
eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
  datasets:
    - {name: easy, path: eval.jsonl, label_key: answer}
    - {name: hard, path: hard.jsonl, temperature: 0, n_samples_per_eval_prompt: 1, stop: ["#"]}
"""
BY_NAME = '{"datasets": {"easy": {"path": "eval.jsonl", "top_k": 20, "stop_token_ids": [3, 4]}}}'


@pytest.fixture
def rollout(base):
    """Returns the options of a run whose held-out sets are in a file."""

    def configure(text: str, flags: str = ""):
        Path("eval.yaml").write_text(text)
        return configured(f"{base} --eval-config eval.yaml {flags}").rollout

    return configure


def test_sets_have_their_names_with_paths(rollout):
    config = rollout(TWO_SETS)
    assert config.eval_prompt_sets == (("easy", "eval.jsonl"), ("hard", "hard.jsonl"))


def test_a_value_of_a_set_replaces_default_with_option(rollout):
    config = rollout(TWO_SETS, "--eval-max-response-len 7 --eval-temperature 0.1")
    easy, hard = (evaluation_sampling(config, held_out) for held_out in config.eval_sets)
    assert (easy.temperature, easy.n_samples, easy.max_response_len, easy.stop) == (0.6, 4, 7, ())
    assert (hard.temperature, hard.n_samples, hard.max_response_len) == (0.0, 1, 7)
    assert hard.stop == ("#",)


def test_a_set_without_top_k_has_the_runs(rollout):
    config = rollout(BY_NAME.replace('"top_k": 20, ', ""), "--eval-top-k 5 --eval-temperature 1")
    (held_out,) = config.eval_sets
    assert evaluation_sampling(config, held_out).top_k == 5


def test_sets_may_be_a_mapping_in_json(rollout):
    (held_out,) = rollout(BY_NAME, "--eval-temperature 1").eval_sets
    assert held_out.name == "easy"
    assert (held_out.top_k, held_out.stop_token_ids) == (20, (3, 4))


def test_sets_stay_when_the_file_is_removed(rollout):
    config = rollout(TWO_SETS)
    Path("eval.yaml").unlink()
    assert [held_out.name for held_out in config.eval_sets] == ["easy", "hard"]


def test_a_greedy_set_may_have_truncation_in_the_defaults(rollout):
    text = "defaults: {temperature: 1, top_p: 0.9}\ndatasets: [{name: a, path: eval.jsonl}, {}]"
    (first, second) = rollout(
        text.replace("{}", "{name: b, path: hard.jsonl, temperature: 0}")
    ).eval_sets
    assert (first.temperature, first.top_p) == (1.0, 0.9)
    assert (second.temperature, second.top_p) == (0.0, 0.9)


# (content of the file, part of the message)
REFUSED = {
    "empty": ("", "has no datasets"),
    "no mapping": ("eval: 3", "eval is no mapping"),
    "list of texts": ("datasets: [a]", "is no dataset"),
    "no sets": ("datasets: []", "give one set or more"),
    "same name": ("datasets: [{name: a, path: x}, {name: a, path: y}]", "each name once"),
    "no path": ("datasets: [{name: a}]", "path is missing"),
    "typing error": ("datasets: [{name: a, path: x, temprature: 1}]", "did you mean temperature?"),
    "unsupported": ("datasets: [{name: a, path: x, custom_rm_path: m.f}]", "is not supported"),
    "beyond limits": ("datasets: [{name: a, path: x, top_p: 2}]", "above 0 and at most 1"),
    "no number": ("datasets: [{name: a, path: x, temperature: hot}]", "must be a number"),
    "NaN": ("datasets: [{name: a, path: x, temperature: .nan}]", "must be a number"),
    "missing file": ("datasets: [{name: a, path: none.jsonl}]", "there is no such file"),
    "alias": ("datasets: &x [*x]", "an alias"),
    "misspelled defaults": ("default: {}\ndatasets: []", "did you mean defaults?"),
    "defaults beside eval": ("defaults: {}\neval: {datasets: []}", "'defaults' is no key here"),
    "path in place of a set": ("datasets: {a: a.jsonl}", "dataset 'a' is no mapping"),
    "set without values": ("datasets: {a: }", "dataset 'a' is no mapping"),
    "top_p of a greedy set": ("datasets: [{name: a, path: x, top_p: 0.9}]", "top_p has no effect"),
    "top_k of a greedy set": ("datasets: [{name: a, path: x, top_k: 5}]", "top_k has no effect"),
    "beyond the context": (
        "datasets: [{name: a, path: eval.jsonl, max_response_len: 9999999}]",
        "dataset 'a': max_response_len is 9999999 but the model's context",
    ),
    "beyond the vocabulary": (
        "datasets: [{name: a, path: eval.jsonl, stop_token_ids: [3, 9999999]}]",
        "dataset 'a': stop_token_ids has 9999999 but the model's vocabulary",
    ),
}


@pytest.mark.parametrize(("text", "part"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_file_is_refused(base, text, part):
    Path("eval.yaml").write_text(text)
    message = refusal(f"{base} --eval-config eval.yaml")
    assert "--eval-config" in message or "eval.yaml" in message
    assert part in message


def test_a_file_that_is_missing_is_refused(base):
    assert "no such file" in refusal(f"{base} --eval-config none.yaml")


def test_both_kinds_of_sets_are_refused(base):
    Path("eval.yaml").write_text(TWO_SETS)
    flags = f"{base} --eval-config eval.yaml --eval-prompt-data eval.jsonl"
    assert "both given" in refusal(flags)
