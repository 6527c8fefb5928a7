"""Faults of vLLM servers, planted, that a trainer must find or survive.

--check-weight-sync must find a tied output layer that stays old, half an update, and a prefix cache
that outlives an update. The others must end in a clear message or be repaired.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_tis.analysis.report.report_commands import diagnosis
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.vllm.vllm_api import WORKER_DIRECTORY, num_tensors
from tests.real_servers.engines import ServedModel, decode_steps, engine_with_weights
from tests.real_servers.proxy import Proxy, running_proxy
from tests.real_servers.references import BOUND, Reference
from tests.real_servers.servers import ENGINE, STARTUP, RealServer, send
from tests.real_servers.training import ended_run, without_engine
from tests.runs import Completed, make_task
from tests.samples import flat

pytestmark = pytest.mark.skipif(ENGINE.name != "vllm", reason="faults of vLLM")

FAULTY = Path(__file__).with_name("faulty_vllm")
SIZES = {"hidden_size": 64, "max_position_embeddings": 512, "tie_word_embeddings": True}
GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def tied_task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of train.py for a model whose output layer is tied to the embedding."""
    directory = tmp_path_factory.mktemp("tied")
    flags = make_task(directory, prompts=32, **SIZES, **ENGINE.sizes)
    return [*without_engine(flags), "--num-rollout", "3", "--lr", "1e-3", "--check-weight-sync"]


@pytest.fixture(scope="module")
def tied_checkpoint(tied_task: list[str]) -> Path:
    return Path(tied_task[tied_task.index("--hf-checkpoint") + 1])


@pytest.fixture(scope="module")
def started_server(tied_checkpoint: Path, directory: Path) -> Iterator[RealServer]:
    paths = f"{FAULTY}:{WORKER_DIRECTORY}"
    server = RealServer(
        tied_checkpoint,
        directory / "faulty.log",
        "--dtype",
        "float32",
        "--worker-extension-cls",
        "faulty_extension.FaultyExtension",
        environment={"PYTHONPATH": paths},
    )
    yield server.wait()
    server.stop()


@pytest.fixture
def faulty_server(started_server: RealServer) -> RealServer:
    """A server whose updates go wrong on demand, and right at the start of a test."""
    plant(started_server, "")
    return started_server


@pytest.fixture
def proxy(faulty_server: RealServer) -> Iterator[Proxy]:
    with running_proxy(faulty_server.url) as proxy:
        yield proxy


def call(server: RealServer, method: str, **arguments: object) -> None:
    """Calls a method of the server's worker extension."""
    body = {"method": method, "kwargs": arguments}
    answer = send("POST", f"{server.url}/collective_rpc", body)
    assert answer.status_code == 200, answer.text


def plant(server: RealServer, fault: str, after: int = 0) -> None:
    """Chooses the fault of the server's updates, after some complete ones."""
    call(server, "plant_fault", name=fault, after=after)


def run_on(url: str, flags: list[str], output: Path) -> Completed:
    return ended_run([*flags, "--rollout-engine", "vllm", "--vllm-url", url], output)


def test_a_run_without_a_fault_passes_the_check(
    tied_task: list[str], faulty_server: RealServer, tmp_path: Path
) -> None:
    run = run_on(faulty_server.url, tied_task, tmp_path)
    assert run.returncode == 0, run.stderr


def test_the_check_names_a_tied_head_that_stays_old(
    tied_task: list[str], tied_checkpoint: Path, faulty_server: RealServer, tmp_path: Path
) -> None:
    # The output layer of the initial weights: an older one would already fail the first check,
    # which knows no earlier checksums and names no tensor.
    path = str(tied_checkpoint)
    call(faulty_server, "load_checkpoint", path=path, num_tensors=num_tensors(tied_checkpoint))
    plant(faulty_server, "old head")
    run = run_on(faulty_server.url, tied_task, tmp_path)
    assert run.returncode == 1
    assert "first: 'lm_head.weight'" in run.stderr


def test_the_check_finds_half_an_update(
    tied_task: list[str], faulty_server: RealServer, tmp_path: Path
) -> None:
    plant(faulty_server, "half")
    run = run_on(faulty_server.url, tied_task, tmp_path)
    assert run.returncode == 1
    assert "parameter-sync error" in run.stderr


def test_the_diagnosis_names_half_an_update(
    tied_task: list[str], tied_checkpoint: Path, faulty_server: RealServer, tmp_path: Path
) -> None:
    flags = [flag for flag in tied_task if flag != "--check-weight-sync"]
    flags += ["--n-samples-per-prompt", "16"]
    after_one_step = tmp_path / "hf"
    run = run_on(
        faulty_server.url,
        [*flags, "--num-rollout", "1", "--save-hf", str(after_one_step)],
        tmp_path / "first",
    )
    assert run.returncode == 0, run.stderr
    # The first update, of the initial weights, is complete.
    plant(faulty_server, "half", after=1)
    dump = tmp_path / "dump"
    flags += ["--num-rollout", "2", "--save-debug-train-data", str(dump / "{rollout_id}.parquet")]
    run = run_on(faulty_server.url, flags, tmp_path / "second")
    assert run.returncode == 0, run.stderr
    text = diagnosis(
        str(dump),
        hf_checkpoint=str(tied_checkpoint),
        other_checkpoints=[str(after_one_step)],
        as_json=True,
    )
    proof = json.loads(text)["proof"]
    assert proof["causes"] == ["weights_not_updated"], proof["sentence"]


def test_the_check_finds_a_cache_that_outlives_updates(
    tied_task: list[str], faulty_server: RealServer, proxy: Proxy, tmp_path: Path
) -> None:
    # Without the pause and the reset, vLLM loads weights and keeps its prefix cache.
    proxy.swallowed = {
        "/pause": b"{}",
        "/resume": b"{}",
        "/reset_prefix_cache": b'{"success": true}',
    }
    run = run_on(proxy.url, tied_task, tmp_path)
    assert run.returncode == 1
    assert "took 384 tokens of a text from its prefix cache" in run.stderr


@pytest.fixture(scope="module")
def tied_reference(tied_checkpoint: Path) -> Reference:
    return Reference(tied_checkpoint)


def short_rollout(
    url: str, checkpoint: Path, reference: Reference, directory: Path, prompts: list[Prompt]
) -> list[Sample]:
    """Responses of the weights that the engine sends as version 0."""
    with engine_with_weights(
        checkpoint, reference, directory=directory, url=(url,), recovery_timeout=20.0
    ) as engine:
        return flat(engine.generate(prompts[:4], Sampling(max_response_len=16), seed=0))


def test_a_server_that_an_update_left_paused_is_used_again(
    faulty_server: RealServer,
    tied_checkpoint: Path,
    tied_reference: Reference,
    tmp_path: Path,
    short_prompts: list[Prompt],
) -> None:
    send("POST", f"{faulty_server.url}/pause?mode=keep")
    samples = short_rollout(
        faulty_server.url, tied_checkpoint, tied_reference, tmp_path, short_prompts
    )
    assert max(map(tied_reference.largest_difference, samples)) < BOUND


@pytest.fixture
def short_prompts() -> list[Prompt]:
    """Four prompts of the 64 tokens that the model of `make_task` has."""
    rows = []
    for index in range(4):
        rows.append(Prompt(index=index, text=str(index), token_ids=(1, 3 + index, 9, 20)))
    return rows


def masked(body: bytes) -> bytes:
    """An answer whose first token was masked."""
    answer = json.loads(body)
    for choice in answer.get("choices", []):
        for entry in choice["logprobs"]["content"][:1]:
            entry["logprob"] = -9999.0
    return json.dumps(answer).encode()


@pytest.mark.parametrize(
    "edit", [masked, lambda body: body[:-20], lambda body: b"{}"], ids=["sentinel", "cut", "empty"]
)
def test_wrong_answers_end_the_rollout_with_a_message(
    edit: object,
    faulty_server: RealServer,
    proxy: Proxy,
    tied_checkpoint: Path,
    tied_reference: Reference,
    tmp_path: Path,
    short_prompts: list[Prompt],
) -> None:
    with (
        engine_with_weights(
            tied_checkpoint,
            tied_reference,
            directory=tmp_path,
            url=(proxy.url,),
            recovery_timeout=5.0,
            max_retries=1,
        ) as engine,
    ):
        proxy.edited_answers[GENERATE] = edit  # type: ignore[assignment]
        with pytest.raises(RolloutUnavailable, match="cannot be used"):
            engine.generate(short_prompts, Sampling(max_response_len=16), seed=0)


def test_a_server_of_another_model_is_refused(
    faulty_server: RealServer, model: ServedModel
) -> None:
    message = "serves another model: its vocab_size is 64, but 1024"
    with pytest.raises(ValueError, match=message), model.engine(servers=(faulty_server,)):
        pass


def test_an_abort_without_the_prefix_ends_nothing(
    faulty_server: RealServer,
) -> None:
    # Why `VllmApi.abort` adds the prefix: vLLM answers 200 and counts one request.
    body = {"request_ids": ["no-such-request"]}
    answer = send("POST", f"{faulty_server.url}/abort_requests", body)
    assert answer.json()["aborted"] == 1


def test_requests_of_a_partial_rollout_are_aborted(
    model: ServedModel, prompts: list[Prompt]
) -> None:
    # It leaves room for 31 tokens, so its group is complete hundreds of tokens before the others.
    long_prompt = dataclasses.replace(prompts[0], token_ids=(3,) * 480)
    sampling = Sampling(max_response_len=400, n_samples=2)
    with model.engine() as engine:
        first = engine.submit([long_prompt, *prompts[1:]], sampling, seed=0, num_groups=1)
        assert len(first.result()) == 1
        statuses = {sample.status for sample in flat(engine.unfinished())}
    assert Sample.Status.ABORTED in statuses


def test_a_restart_with_the_first_weights_samples_nothing_old(
    faulty_server: RealServer,
    tied_checkpoint: Path,
    tied_reference: Reference,
    tmp_path: Path,
    short_prompts: list[Prompt],
) -> None:
    with engine_with_weights(
        tied_checkpoint,
        tied_reference,
        directory=tmp_path,
        url=(faulty_server.url,),
        recovery_timeout=STARTUP,
    ) as engine:
        changed = Reference(tied_checkpoint)
        changed.model.model.embed_tokens.weight.data.mul_(1.1)
        engine.update_weights(changed.named_tensors, 4)
        pending = engine.submit(short_prompts, Sampling(max_response_len=300, n_samples=4), seed=0)
        decode_steps(engine, short_prompts)
        faulty_server.kill()
        faulty_server.restart()
        faulty_server.wait()
        samples = flat(pending.result())
    assert {version for sample in samples for version in sample.weight_versions} == {4}
    assert max(map(changed.largest_difference, samples)) < BOUND


def test_a_server_that_hangs_ends_the_run_with_a_message(
    tied_checkpoint: Path,
    tied_reference: Reference,
    faulty_server: RealServer,
    tmp_path: Path,
    short_prompts: list[Prompt],
) -> None:
    # The last test of the server: a stopped process is killed in the end.
    with engine_with_weights(
        tied_checkpoint,
        tied_reference,
        directory=tmp_path,
        url=(faulty_server.url,),
        # Long enough for the first weights, too.
        request_timeout=30.0,
        recovery_timeout=5.0,
        max_retries=1,
    ) as engine:
        faulty_server.hang()
        with pytest.raises(RolloutUnavailable, match="did not answer within 30 s"):
            engine.generate(short_prompts, Sampling(max_response_len=16), seed=0)
    faulty_server.kill()
