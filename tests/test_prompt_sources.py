"""Runs whose prompts come from generate functions, rollout functions, slices of files or saved
samples."""

import json

import pytest

from slime_tis.main import train
from slime_tis.trainer.data.sample_file import load_samples
from tests.checkpoints import make_tokenizer
from tests.runs import run_here, training_metrics

# slime's generate function without its retries: the prompt is tokenized by the function, and the
# server is asked
OWN_TOKENS = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post

async def generate(args, sample, sampling_params):
    ids = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=SPECIAL)["input_ids"]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    out = await post(url, payload)
    new = [item[1] for item in out["meta_info"]["output_token_logprobs"]]
    sample.tokens = ids + new
    sample.response_length = len(new)
    sample.response = out["text"]
    sample.status = sample.Status.COMPLETED
    return sample
"""

# the engine's answer, under a prompt with one more token at its start
OTHER_PROMPT = """
async def generate(args, sample, sampling_params, engine):
    out = await engine.generate(sample.tokens, sampling_params)
    sample.tokens = [1, *sample.tokens, *out.token_ids]
    sample.response_length = len(out.token_ids)
    return sample
"""

# a rollout function that brings its prompts, as slime's with --disable-rollout-global-dataset
OWN_PROMPTS = """
from slime.utils.types import Sample

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    assert not args.rollout_global_dataset and len(data_source) == 0
    groups = data_source.get_samples(args.rollout_batch_size)
    for number, group in enumerate(groups):
        for index, sample in enumerate(group):
            sample.prompt = f"prompt {number}"
            sample.tokens = [1, 3 + number, 5, 6]
            sample.response_length = 2
            sample.rollout_log_probs = [-1.0, -1.0]
            sample.reward = float(index % 2)
    return groups
"""


def task_with(task, tmp_path, source, option, function, **values):
    """The flags of a task whose samples a user function makes."""
    for name, value in values.items():
        source = source.replace(name, value)
    (tmp_path / "user.py").write_text(source)
    return [*task, option, f"{tmp_path / 'user.py'}:{function}", "--num-rollout", "1"]


@pytest.fixture
def llama_like(task):
    """The task with a tokenizer that adds BOS to texts by default."""
    directory = task[task.index("--hf-checkpoint") + 1]
    make_tokenizer(adds_bos=True).save_pretrained(directory)
    yield task
    make_tokenizer().save_pretrained(directory)


def samples(path):
    return [sample for group in load_samples(str(path), 4, 4) for sample in group]


def test_a_generate_function_of_slime_samples_the_engines_tokens(llama_like, tmp_path):
    data = tmp_path / "engine.jsonl"
    flags = [*llama_like, "--num-rollout", "1", "--save-debug-rollout-data", str(data)]
    (engine,) = run_here(flags, tmp_path / "engine")
    own = tmp_path / "own.jsonl"
    flags = task_with(
        llama_like,
        tmp_path,
        OWN_TOKENS,
        "--custom-generate-function-path",
        "generate",
        SPECIAL="False",
    )
    (row,) = run_here([*flags, "--save-debug-rollout-data", str(own)], tmp_path / "own")
    assert [list(sample.prompt_ids) for sample in samples(own)] == [
        list(one.prompt_ids) for one in samples(data)
    ]
    assert row["rollout/retokenized"] == 0
    assert row["train/mismatch_k3_kl"] == pytest.approx(engine["train/mismatch_k3_kl"], abs=1e-3)


def test_the_first_retokenized_sample_names_position_and_tokens(task, tmp_path, capsys):
    flags = task_with(task, tmp_path, OTHER_PROMPT, "--custom-generate-function-path", "generate")
    (row,) = run_here([*flags, "--rm-type", "random", "--custom-rm-path", "none"], tmp_path / "run")
    assert row["rollout/retokenized"] == 1
    error = capsys.readouterr().err
    assert error.count("that differ from the sampled tokens") == 1
    assert "they differ first at prompt token 1, 1 ('<bos>') in the sample and" in error
    assert "tokenize sample.prompt with add_special_tokens=False" in error


def without(flags, *names):
    """The flags without some flags and their values."""
    kept = list(flags)
    for name in names:
        place = kept.index(name)
        del kept[place : place + 2]
    return kept


def test_a_rollout_function_that_brings_prompts_needs_no_file(task, tmp_path):
    flags = task_with(task, tmp_path, OWN_PROMPTS, "--rollout-function-path", "generate_rollout")
    flags = without(flags, "--prompt-data", "--input-key", "--label-key", "--custom-rm-path")
    save = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    (row,) = run_here([*flags, "--disable-rollout-global-dataset", *save], tmp_path / "run")
    assert row["train/loss_denominator"] > 0 and row["rollout/raw_reward"] == 0.5
    flags[flags.index("--num-rollout") + 1] = "2"
    flags = [*flags, *save]
    rows = run_here(
        [*flags, "--num-rollout", "2", "--disable-rollout-global-dataset"], tmp_path / "run"
    )
    assert [row["step"] for row in rows] == [1, 2]


def test_saved_samples_need_no_reward_function(task, tmp_path):
    data = tmp_path / "d.jsonl"
    (first,) = run_here(
        [*task, "--num-rollout", "1", "--save-debug-rollout-data", str(data)], tmp_path / "first"
    )
    flags = without([*task, "--num-rollout", "1"], "--custom-rm-path")
    (again,) = run_here([*flags, "--load-debug-rollout-data", str(data)], tmp_path / "again")
    assert training_metrics(again) == training_metrics(first)


def test_slices_of_the_prompt_file_train_and_evaluate(task, tmp_path):
    place = task.index("--prompt-data") + 1
    file = task[place]
    flags = [
        *task,
        "--prompt-data",
        f"{file}@[2:6]",
        "--eval-prompt-data",
        "held",
        f"{file}@[-3:]",
        "--num-rollout",
        "1",
        "--save-debug-rollout-data",
        str(tmp_path / "d.jsonl"),
    ]
    del flags[place - 1 : place + 1]
    (row,) = [row for row in run_here(flags, tmp_path / "run") if "train/loss" in row]
    with open(file) as lines:
        texts = [json.loads(line)["prompt"] for line in lines]
    assert "eval/held" in row
    assert [group[0].prompt for group in load_samples(tmp_path / "d.jsonl", 4, 4)] == texts[2:6]


REFUSED = {
    "prompts for the engine": (["--prompt-data", "none"], "--prompt-data is unset but required"),
    "a switch without a function": (["--disable-rollout-global-dataset"], "has no effect without"),
    "a slice of a missing file": (["--prompt-data", "none.jsonl@[0:3]"], "there is no such file"),
    "nothing that scores": (
        ["--custom-rm-path", "none"],
        "--rm-type is unset and so is --custom-rm-path",
    ),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_a_source_that_cannot_work_is_refused(task, tmp_path, capsys, flags, message):
    kept = without(task, *[flag for flag in flags if flag in task])
    with pytest.raises(SystemExit):
        train([*kept, *flags, "--output-dir", str(tmp_path / "run")])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", [["--check-weight-sync"], ["--rollout-shuffle"]], ids=lambda flag: flag[0]
)
def test_options_that_need_prompts_are_refused_without_them(task, tmp_path, capsys, flag):
    flags = task_with(task, tmp_path, OWN_PROMPTS, "--rollout-function-path", "generate_rollout")
    with pytest.raises(SystemExit):
        train(
            [
                *flags,
                "--disable-rollout-global-dataset",
                *flag,
                "--output-dir",
                str(tmp_path / "run"),
            ]
        )
    assert (
        f"{flag[0]} has no effect with --disable-rollout-global-dataset" in capsys.readouterr().err
    )


# (flags, part of the message)
UNFIT_PROMPTS = {
    "no remote reward": (
        ["--rm-type", "exact_match", "--rm-url", "http://127.0.0.1:9"],
        "no prompt has a remote",
    ),
    "no label": (["--rm-type", "exact_match", "--label-key", "none"], "has no label"),
    "no such key": (["--rm-type", "exact_match", "--input-key", "text"], "text"),
}


@pytest.mark.parametrize(("flags", "part"), UNFIT_PROMPTS.values(), ids=UNFIT_PROMPTS)
def test_prompts_that_flags_do_not_fit_are_a_wrong_command_line(
    task, tmp_path, capsys, flags, part
):
    line = [*without(task, "--custom-rm-path"), *flags, "--output-dir", str(tmp_path / "run")]
    assert train(line) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.startswith("error: ")
