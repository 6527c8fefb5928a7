"""TRL's GRPOTrainer on samples of a real vLLM server on this machine's processor."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.trl import sort_digits, vllm_sort_digits
from examples.trl.vllm_sampler import SEEDS, VllmError, VllmSampler, num_tensors
from slime_tis.analysis.diagnosis.diagnose import diagnose
from slime_tis.analysis.dumps.readers import read
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.demo.sort_digits import Example, prepare

PAGE = Path(sort_digits.__file__).with_name("README.md")
STEPS = 4
ROUNDING = 1e-4
"""Largest difference of log-probs in float32, nats."""
PROMPT = [1, 7, 5, 6, 14]

pytestmark = pytest.mark.skipif(
    not vllm_sort_digits.PYTHON.exists(),
    reason=f"{vllm_sort_digits.PYTHON} does not exist: run `make vllm-env`",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, and a model whose output layer is tied to the embedding."""
    path = tmp_path_factory.mktemp("trl_vllm") / "sort_digits"
    example = Example(train_prompts=64, eval_prompts=16, accuracy=(0.0, 1.0), sampled_accuracy=0.0)
    prepare(path, example=example)
    return path


@pytest.fixture(scope="module")
def url(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with vllm_sort_digits.server(data / "checkpoint", log, dtype="float32") as url:
        yield url


def train(data: Path, sampler: VllmSampler, directory: Path) -> TokenTable:
    """Trains for some steps and returns the dump."""
    torch.manual_seed(0)
    trainer = sort_digits.make_trainer(data, directory, STEPS, sampler, sampler.precision)
    trainer.train()
    return read(str(directory / "dump"))


def step_sizes(table: TokenTable) -> list[float]:
    """Returns the largest abs(Δ) of each step."""
    assert table.step is not None
    sizes = []
    for step in range(STEPS):
        rows = table.select([row for row in range(len(table)) if table.step[row] == step])
        sizes.append(float(abs(rows.log_ratio[rows.valid]).max()))
    return sizes


@pytest.fixture(scope="module")
def trained(data: Path, url: str, tmp_path_factory: pytest.TempPathFactory) -> TokenTable:
    directory = tmp_path_factory.mktemp("trained")
    return train(data, VllmSampler(url, directory), directory)


def test_log_probs_are_those_of_training_after_each_update(trained: TokenTable) -> None:
    assert max(step_sizes(trained)) < ROUNDING


def test_dumps_have_the_servers_weight_versions(trained: TokenTable) -> None:
    assert trained.weight_version is not None and trained.step is not None
    versions = trained.weight_version[trained.offsets[:-1]]
    assert versions.tolist() == trained.step.tolist()
    assert set(versions.tolist()) == set(range(STEPS))


def test_dumps_name_the_precision_of_the_server(trained: TokenTable) -> None:
    assert trained.metadata["rollout_precision"] == "fp32"


def test_the_diagnosis_of_a_float32_server_is_healthy(trained: TokenTable) -> None:
    assert [finding.cause for finding in diagnose(trained).findings] == ["healthy"]


class OldHead(VllmSampler):
    """Reloads weights as vLLM does alone, which leaves a tied output layer old on a CPU."""

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        if body.get("method") == "load_checkpoint":
            arguments = {"weights_path": body["kwargs"]["path"]}
            body = {"method": "reload_weights", "kwargs": arguments}
        return super()._post(path, body)


@pytest.fixture(scope="module")
def old_head(
    data: Path, url: str, trained: TokenTable, tmp_path_factory: pytest.TempPathFactory
) -> TokenTable:
    """A run whose server starts with the right weights; `trained` runs before on the same one."""
    directory = tmp_path_factory.mktemp("old_head")
    start = AutoModelForCausalLM.from_pretrained(data / "checkpoint", dtype=torch.float32)
    VllmSampler(url, directory).update(start, 0)
    return train(data, OldHead(url, directory), directory)


def test_an_output_layer_that_stays_old_is_measured(old_head: TokenTable) -> None:
    sizes = step_sizes(old_head)
    assert sizes[0] < ROUNDING < 1e-3 < sizes[-1]


def test_an_output_layer_that_stays_old_is_not_healthy(old_head: TokenTable) -> None:
    assert diagnose(old_head).findings[0].cause in ("weights_not_updated", "unexplained")


def params(seed: int, **changes: Any) -> dict[str, Any]:
    """Sampling parameters, as `sampling_params` gives them."""
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "max_tokens": 12,
        "logprobs": 0,
        "detokenize": False,
        "seed": seed,
    }
    return {**neutral, **changes}


@pytest.fixture
def sampler(data: Path, url: str, tmp_path: Path) -> VllmSampler:
    """A sampler whose server has the start checkpoint."""
    sampler = VllmSampler(url, tmp_path)
    sampler.update(policy(data), 3)
    return sampler


def policy(data: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(data / "checkpoint", dtype=torch.float32)


def test_log_probs_are_of_the_sampled_temperature(data: Path, sampler: VllmSampler) -> None:
    completion = sampler.complete(PROMPT, params(1, temperature=0.5, ignore_eos=True))
    with torch.no_grad():
        logits = policy(data)(torch.tensor([PROMPT + completion.token_ids])).logits[0]
    rows = (logits[len(PROMPT) - 1 : -1] / 0.5).log_softmax(-1)
    expected = rows.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert completion.log_probs == pytest.approx(expected.tolist(), abs=ROUNDING)
    assert completion.weight_versions == [3] * 12


def test_equal_seeds_give_equal_completions(sampler: VllmSampler) -> None:
    texts = [sampler.complete(PROMPT, params(seed)).token_ids for seed in (5, 5, 5 + SEEDS)]
    assert texts[0] == texts[1]


def test_a_checkpoint_that_lacks_tensors_is_refused(
    data: Path, sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.trl.vllm_sampler.num_tensors", lambda path: 99)
    with pytest.raises(VllmError, match=r"did not load the weights.*but 99 were written"):
        sampler.update(policy(data), 4)


def test_an_update_after_a_failed_one_repairs_the_server(
    data: Path, sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("examples.trl.vllm_sampler.num_tensors", lambda path: 99)
        with pytest.raises(VllmError):
            sampler.update(policy(data), 4)
    sampler.update(policy(data), 5)
    assert set(sampler.complete(PROMPT, params(1)).weight_versions) == {5}


def test_tensors_of_a_checkpoint_are_counted(data: Path) -> None:
    # The output layer is tied, so it is not a tensor of its own.
    assert num_tensors(data / "checkpoint") == len(list(policy(data).parameters()))


def commands() -> list[list[str]]:
    """The program's command lines on the page, as words after the module's name."""
    text = PAGE.read_text(encoding="utf-8")
    return [shlex.split(line) for line in re.findall(r"python -m examples\.trl\.\w+ (.+)", text)]


@pytest.mark.parametrize("words", commands(), ids=["own server", "running server"])
def test_the_commands_on_the_page_run(
    words: list[str], data: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The last of two flags counts. One server serves both commands, and one step is enough.
    here = ["--data", str(data), "--output-dir", str(tmp_path), "--vllm-url", url, "--steps", "1"]
    vllm_sort_digits.main([*words, *here])
    assert "held-out accuracy: " in capsys.readouterr().out
    assert len(read(str(tmp_path / "dump"))) == 128


def test_a_missing_environment_names_the_command_that_builds_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_sort_digits, "PYTHON", tmp_path / "python")
    with pytest.raises(SystemExit, match=r"run `make vllm-env`"):
        vllm_sort_digits.main(["--data", str(data), "--output-dir", str(tmp_path)])


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(VllmError, match=r"http://127\.0\.0\.1:9/server_info"):
        VllmSampler("http://127.0.0.1:9", tmp_path)
