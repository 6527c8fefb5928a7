"""Checkpoints that are written in the background: the same files, of the moment of the save."""

import threading

import pytest

from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron import checkpoint_saving, sharded_checkpoint
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.checkpoint_saving import Saving
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.checkpoints import make_checkpoint
from tests.megatron.passes import likelihood, on_ranks

MASK = [[1, 1, 1], [1, 1]]
BATCH = make_batch([[3, 4, 5, 6], [8, 9, 10]], MASK, [[0.0] * 3, [0.0] * 2], [[0] * 3, [0] * 2])


def build(model, parallel, **options):
    config = MegatronConfig(hf_checkpoint=str(model), lr=1e-2, **options)
    return TrainingEngine(config, parallel, temperature=1.0, total_steps=10)


def step(engine):
    return engine.train_step(BATCH, [[0, 1]], likelihood).grad_norm


def begin(directory, engine, number):
    saving = Saving(final=directory / f"iter_000000{number}", engine=engine, run="a", retain=1)
    saving.start({"run": "a"}, lambda path: None, in_background=True)
    return saving


@pytest.fixture
def writer(monkeypatch):
    """An event for which background writers wait before they write."""
    may_write = threading.Event()
    write = checkpoint_saving._write

    def write_later(request):
        if threading.current_thread() is not threading.main_thread():
            assert may_write.wait(60)
        write(request)

    monkeypatch.setattr(checkpoint_saving, "_write", write_later)
    yield may_write
    may_write.set()


LAYOUTS = [{}, {"use_distributed_optimizer": True}, {"bf16": True}]


@pytest.mark.parametrize("options", LAYOUTS, ids=["fp32", "distributed optimizer", "bf16"])
def test_the_checkpoint_is_of_the_moment_of_the_save(options, model, parallel, tmp_path, writer):
    engine = build(model, parallel, **options)
    step(engine)
    saving = begin(tmp_path, engine, 1)
    expected = [step(engine), step(engine)]  # changes all weights before they are written
    writer.set()
    saving.complete()
    resumed = build(model, parallel, **options)
    checkpoint, damages = sharded_checkpoint.latest_complete_checkpoint(tmp_path)
    sharded_checkpoint.load(checkpoint, resumed)
    assert damages == []
    assert [step(resumed), step(resumed)] == expected


def test_a_checkpoint_does_not_count_while_it_is_written(model, parallel, tmp_path, writer):
    engine = build(model, parallel)
    saving = begin(tmp_path, engine, 1)
    assert not saving.is_written()
    assert sharded_checkpoint.latest_complete_checkpoint(tmp_path) is None
    writer.set()
    saving.complete()
    assert sharded_checkpoint.latest_complete_checkpoint(tmp_path) is not None


def test_older_checkpoints_stay_until_the_new_one_is_complete(model, parallel, tmp_path, writer):
    engine = build(model, parallel)
    checkpoint_saving.save(tmp_path, 1, engine, {"run": "a"}, retain=1)
    saving = begin(tmp_path, engine, 2)
    assert (tmp_path / "iter_0000001").is_dir()
    writer.set()
    saving.complete()
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000002"]


def test_an_abandoned_checkpoint_leaves_no_files(model, parallel, tmp_path, writer):
    saving = begin(tmp_path, build(model, parallel), 1)
    writer.set()
    saving.abandon()
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_writer_is_raised(model, parallel, tmp_path, monkeypatch):
    def fail(request):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_saving, "_write", fail)
    saving = begin(tmp_path, build(model, parallel), 1)
    with pytest.raises(sharded_checkpoint.CheckpointError, match="No space left on device"):
        saving.complete()
    assert list(tmp_path.iterdir()) == []


def test_copies_have_the_size_that_the_plan_states(model, parallel, tmp_path, monkeypatch):
    engine = build(model, parallel)
    step(engine)
    copied = []
    start = checkpoint_saving._with_copies

    def counting(request):
        request = start(request)
        for _, _, (_, tensors) in request.async_fn_args[1]:
            copied.extend(tensor.nbytes for _, tensor in tensors)
        return request

    monkeypatch.setattr(checkpoint_saving, "_with_copies", counting)
    begin(tmp_path, engine, 1).complete()
    weights = sum(weight.numel() for weight in engine.model.module.parameters())
    # weights and two moments in float32; Adam also has a step count for each weight
    assert 12 * weights <= sum(copied) <= 12 * weights + 4 * 100


def saves_in_the_background(parallel, directory, layout):
    engine = build(directory / "model", parallel, **layout)
    step(engine)
    saving = begin(directory / "save", engine, 1)
    expected = step(engine)
    saving.complete()
    resumed = build(directory / "model", parallel, **layout)
    checkpoint, _ = sharded_checkpoint.latest_complete_checkpoint(directory / "save")
    sharded_checkpoint.load(checkpoint, resumed)
    assert step(resumed) == expected


def fails_on_one_rank(parallel, directory, layout):
    def fail(request):
        if parallel.rank == 1:
            raise OSError(28, "No space left on device")

    checkpoint_saving._write = fail
    saving = begin(directory / "save", build(directory / "model", parallel, **layout), 1)
    with pytest.raises(sharded_checkpoint.CheckpointError, match="No space left on device"):
        saving.complete()
    if parallel.is_main:  # which removes the files
        assert list((directory / "save").iterdir()) == []


@pytest.mark.parametrize("check", [saves_in_the_background, fails_on_one_rank])
@pytest.mark.parametrize(
    "layout",
    [{"tensor_model_parallel_size": 2}, {"use_distributed_optimizer": True}],
    ids=["tensor", "distributed optimizer"],
)
def test_two_ranks_save_together(check, layout, tmp_path):
    make_checkpoint(tmp_path / "model", "qwen3")
    (tmp_path / "save").mkdir()
    on_ranks(check, tmp_path, layout)
