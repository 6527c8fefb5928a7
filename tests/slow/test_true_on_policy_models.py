"""--true-on-policy with frozen weights, scaled rotary embeddings, agents, and after a kill."""

import signal

import pytest

from tests.runs import make_task, metrics_of, read_metrics, start_apart
from tests.slow.test_true_on_policy_runs import PRECISIONS, assert_no_mismatch

ROPE = {
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
}
AGENT = """
async def generate(args, sample, sampling_params, engine):
    \"\"\"Three turns of the policy in one session, with an observation after each.\"\"\"
    for turn in range(3):
        params = {**sampling_params, "max_new_tokens": 2 + turn}
        answer = await engine.generate(sample.tokens, params, session_id="episode")
        sample.append_response_tokens(
            args, tokens=answer.token_ids, log_probs=answer.log_probs, text=answer.text
        )
        if answer.finish_reason == "stop":
            break
        sample.append_response_tokens(args, tokens=[5 + turn, 7], trainable=False, text="12")
    return sample
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    task = make_task(tmp_path_factory.mktemp("task"))
    return [*task, "--true-on-policy"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "pattern", ["embedding", r"layers\.0\.", "linear_qkv", "layernorm"], ids=lambda value: value
)
def test_frozen_weights_have_equal_log_probs(flags, tmp_path, precision, pattern):
    frozen = [*flags, *PRECISIONS[precision], "--freeze-params-name-list", pattern]
    assert_no_mismatch(metrics_of(frozen, tmp_path / "run"))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rope", ROPE)
def test_scaled_rotary_embeddings_have_equal_log_probs(tmp_path, precision, rope):
    task = make_task(tmp_path, "llama", rope_parameters=ROPE[rope])
    run = [*task, "--true-on-policy", *PRECISIONS[precision], "--rollout-max-response-len", "40"]
    assert_no_mismatch(metrics_of(run, tmp_path / "run"))


FAMILIES = {
    "mistral": {"sliding_window": 6},
    "smollm3": {"no_rope_layers": [1, 0]},
    "mimo": {},
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_dense_families_have_equal_log_probs(tmp_path, precision, ranks, family):
    task = make_task(tmp_path, family, **FAMILIES[family])
    run = [*task, "--true-on-policy", *PRECISIONS[precision]]
    run += ["--tensor-model-parallel-size", str(ranks)]
    assert_no_mismatch(metrics_of(run, tmp_path / "run", ranks))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_turns_of_an_agent_have_equal_log_probs(flags, tmp_path, precision, ranks):
    (tmp_path / "agent.py").write_text(AGENT)
    agent = ["--custom-generate-function-path", f"{tmp_path / 'agent.py'}:generate"]
    run = [*flags, *PRECISIONS[precision], *agent, "--rollout-max-response-len", "20"]
    run += ["--tensor-model-parallel-size", str(ranks)]
    rows = metrics_of(run, tmp_path / "run", ranks)
    assert_no_mismatch(rows)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_resumed_after_a_kill_has_equal_log_probs(flags, tmp_path, precision):
    saved = ["--load", str(tmp_path / "saved"), "--save", str(tmp_path / "saved")]
    run = [*flags, *PRECISIONS[precision], "--num-rollout", "6", "--save-interval", "2"]
    killed = start_apart([*run, *saved], tmp_path / "run")
    printed = tmp_path / "run.out"
    killed.until(lambda: printed.exists() and "step 4/6" in printed.read_text())
    killed.kill()
    assert killed.wait().statuses == [-signal.SIGKILL]
    metrics_of([*run, *saved], tmp_path / "run")
    resumed = read_metrics(tmp_path / "run")
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
    assert_no_mismatch(resumed)
