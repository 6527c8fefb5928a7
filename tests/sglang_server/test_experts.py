"""Routed experts and sampling masks of real servers, against transformers."""

import dataclasses

import pytest
import torch

from slime_tis.trainer.configs.sglang import SGLangConfig
from slime_tis.trainer.data.sample import Sample, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer, weights_by_file_name
from slime_tis.trainer.engines.rollout_engine import EngineHost
from slime_tis.trainer.engines.sglang.server_group import SGLangSettings
from slime_tis.trainer.engines.sglang.sglang_engine import SGLangEngine
from tests.checkpoints import make_checkpoint
from tests.runs import read_metrics, run_apart
from tests.samples import flat, reloaded
from tests.sglang_server.references import BOUND, Reference, worst_by_version
from tests.sglang_server.servers import RealServer, wait_for_decoding
from tests.sglang_server.test_train import sglang_flags, task  # noqa: F401  # a fixture

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
LONG = Sampling(max_response_len=300, n_samples=2, return_routed_experts=True)


class MoeReference(Reference):
    """A mixture of experts in transformers, float32, which also says what its routers choose."""

    def __init__(self, checkpoint):
        super().__init__(checkpoint)
        self._chosen = {}
        for name, module in self._model.named_modules():
            if name.endswith(
                ".mlp.experts"
            ):  # called with hidden states, experts and their weights
                module.register_forward_pre_hook(
                    lambda module, args, name=name: self._chosen.__setitem__(name, args[1])
                )

    def named_tensors(self):
        """Its weights under the names of files, one matrix for each expert."""
        yield from weights_by_file_name(self._model).items()

    def experts(self, token_ids):
        """[tokens - 1, layers, k] of all tokens but the last."""
        self.log_probs(token_ids)
        return torch.stack(list(self._chosen.values()), 1)[:-1]


@pytest.fixture(scope="module")
def served(directory):
    """A server with a mixture of experts, and references of its weights and of two others."""
    paths = [
        make_checkpoint(directory / f"moe_{seed}", "qwen3_moe", seed=seed, **SIZES)
        for seed in range(2)
    ]
    server = RealServer(
        paths[0], directory / "moe.log", "--dtype", "float32", "--enable-return-routed-experts"
    )
    references = [MoeReference(path) for path in paths]
    yield server.wait(), {0: references[0], 1: references[1], 2: references[0]}, paths[0]
    server.stop()


def connect(served, output_dir, **options):
    server, references, path = served
    config = SGLangConfig(sglang_url=(server.url,), **options)
    host = EngineHost(
        hf_checkpoint=path, weights=references[0].named_tensors, output_dir=output_dir
    )
    return SGLangEngine(SGLangSettings(config=config, sampling=LONG), load_tokenizer(path), host)


@pytest.fixture
def engine(served, tmp_path):
    _, references, _ = served
    engine = connect(served, tmp_path, sglang_bucket_mb=1)
    engine.update_weights(references[0].named_tensors, 0)
    yield engine
    engine.close()


def assert_experts(sample, references):
    """Every row is the choice of the weights that sampled the next token.

    Rows whose router hesitates between two experts may differ; there are next to none in float32.
    """
    first = len(sample.row.token_ids)
    of_next = [
        sample.weight_versions[max(place + 1 - first, 0)] for place in range(len(sample.tokens) - 1)
    ]
    by_version = {version: references[version].experts(sample.tokens) for version in set(of_next)}
    expected = torch.stack([by_version[version][place] for place, version in enumerate(of_next)])
    assert sample.rollout_routed_experts.shape == expected.shape
    differing = (
        (sample.rollout_routed_experts.long().sort(-1).values != expected.sort(-1).values)
        .any(-1)
        .any(-1)
    )
    assert int(differing.sum()) <= len(differing) // 200
    assert worst_by_version(sample, references) < BOUND


def test_experts_and_log_probs_are_those_of_transformers_through_updates(
    served, engine, prompts, tmp_path
):
    server, references, _ = served
    sampling = Sampling(max_response_len=32, n_samples=2, return_routed_experts=True)
    for sample in flat(engine.generate(prompts, sampling, seed=0)):
        assert_experts(sample, references)
    pending = engine.submit(prompts, LONG, seed=1)
    for version in (1, 2):
        wait_for_decoding(server.log)
        engine.update_weights(references[version].named_tensors, version)
    samples = flat(pending.result())
    for sample in samples:
        assert_experts(sample, references)
    assert [len(set(sample.weight_versions)) for sample in samples].count(
        3
    ) >= 2  # or the updates missed them
    engine.close()

    by_disk = connect(served, tmp_path, sglang_weight_sync="disk")
    by_disk.update_weights(references[1].named_tensors, 1)
    for sample in flat(by_disk.generate(prompts[:4], sampling, seed=2)):
        assert set(sample.weight_versions) == {1}
        assert_experts(sample, references)
    by_disk.close()


def test_a_router_with_a_bias_and_groups_chooses_as_in_transformers_through_an_update(
    directory, prompts, tmp_path
):
    paths = [
        make_checkpoint(directory / f"glm_{seed}", "glm4_moe", seed=seed, **SIZES)
        for seed in range(2)
    ]
    server = RealServer(
        paths[0], directory / "glm.log", "--dtype", "float32", "--enable-return-routed-experts"
    )
    try:
        references = {version: MoeReference(path) for version, path in enumerate(paths)}
        engine = connect((server.wait(), references, paths[0]), tmp_path, sglang_bucket_mb=1)
        sampling = Sampling(max_response_len=16, n_samples=2, return_routed_experts=True)
        for version in (0, 1):
            engine.update_weights(references[version].named_tensors, version)
            samples = flat(engine.generate(prompts[:4], sampling, seed=0))
            assert {one for sample in samples for one in sample.weight_versions} == {version}
            for sample in samples:
                assert_experts(sample, references)
        engine.close()
    finally:
        server.stop()


def test_stragglers_keep_the_experts_of_their_tokens_over_a_checkpoint_and_an_update(
    served, engine, prompts
):
    _, references, _ = served
    sampling = dataclasses.replace(
        LONG, stop_token_ids=tuple(range(3, 1024, 32))
    )  # so that lengths differ
    groups = engine.submit(prompts, sampling, seed=0, num_groups=3).result()
    left = engine.unfinished()
    begun = [
        sample
        for sample in flat(left)
        if sample.status is Sample.Status.ABORTED and sample.response_ids
    ]
    assert begun
    for sample in [*flat(groups), *begun]:
        assert_experts(sample, references)
    stored = reloaded(left)
    engine.update_weights(references[1].named_tensors, 1)
    engine.resume_unfinished(stored)
    finished = flat(engine.submit([], sampling, seed=1, num_groups=len(left)).result())
    for sample in finished:
        assert_experts(sample, references)
    assert sum(set(sample.weight_versions) == {0, 1} for sample in finished) == len(begun)


CASES = {
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 7},
    "both, hot": {"top_p": 0.8, "top_k": 50, "temperature": 1.7},
    "both, cool": {"top_p": 0.95, "top_k": 20, "temperature": 0.6},
    "greedy": {"top_k": 1},
}


def truncated(**filters):
    return Sampling(max_response_len=40, n_samples=2, return_sampling_mask=True, **filters)


def expected_sizes(reference, sample, sampling):
    """The number of tokens that SGLang leaves: top-p applies to the full distribution."""
    probs = (
        (reference.logits(sample) / sampling.temperature)
        .softmax(-1)
        .sort(-1, descending=True)
        .values
    )
    sizes = (probs.cumsum(-1) - probs < sampling.top_p).sum(-1)
    return sizes if sampling.top_k == -1 else sizes.clamp(max=sampling.top_k)


@pytest.mark.parametrize("case", CASES)
def test_sets_and_log_probs_are_those_of_transformers(case, real):
    sampling = truncated(**CASES[case])
    engine = real.make_engine(real.server, sampling=sampling)
    for version, weights in ((0, real.reference), (1, real.other_reference)):
        if version:
            engine.update_weights(weights.named_tensors, version)
        for sample in flat(engine.generate(real.prompts, sampling, seed=0)):
            assert set(sample.weight_versions) == {version}
            assert sample.sampling_mask.contains(torch.tensor(sample.response_ids)).all()
            assert weights.gap_over_sets(sample, (version,), sampling.temperature) < BOUND
            sizes = expected_sizes(weights, sample, sampling)
            # A token whose likelier ones sum to the nucleus probability but for rounding may be in
            # or out.
            assert (sample.sampling_mask.lengths - sizes).abs().max() <= 1
            assert (sample.sampling_mask.lengths == sizes).float().mean() > 0.9


def test_sets_through_an_update_in_the_middle_of_requests_and_a_partial_rollout(real):
    long = dataclasses.replace(truncated(top_p=0.9), max_response_len=400)
    engine = real.make_engine(real.server, sampling=long)
    rollout = engine.submit(real.prompts, long, seed=0)
    wait_for_decoding(real.server.log)
    engine.update_weights(real.other_reference.named_tensors, 1)
    updated = flat(rollout.result())
    assert {version for sample in updated for version in sample.weight_versions} == {0, 1}

    short = dataclasses.replace(long, stop_token_ids=tuple(range(3, 1024, 32)))
    groups = engine.submit(real.prompts, short, seed=0, num_groups=3).result()
    left = engine.unfinished()
    engine.update_weights(real.reference.named_tensors, 2)
    groups += engine.submit([], short, seed=1, num_groups=len(left)).result()
    partial = flat(groups)
    assert {version for sample in partial for version in sample.weight_versions} == {1, 2}
    for sample in [*updated, *partial]:
        assert len(sample.sampling_mask) == len(sample.response_ids)
        assert (sample.sampling_mask.lengths > 0).all()
        assert real.reference.gap_over_sets(sample, (0, 2)) < BOUND
        assert real.other_reference.gap_over_sets(sample, (1,)) < BOUND


def test_a_run_with_top_p_has_no_mismatch_and_measures_its_sets(task, tmp_path):  # noqa: F811
    flags = [
        *task,
        *sglang_flags("--sglang-dtype", "float32"),
        "--rollout-top-p",
        "0.9",
        "--rollout-top-k",
        "40",
    ]
    run = run_apart([*flags, "--context-parallel-size", "2"], tmp_path, ranks=2)
    assert run.returncode == 0, run.stderr
    for row in read_metrics(tmp_path):
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert 1 < row["rollout/sampling_mask_tokens"] <= 40
        assert row["rollout/sampling_mask_missing"] == row["rollout/sampling_mask_violations"] == 0
