"""Markdown pages: links, flags, commands, YAML, Python and metrics match the program."""

import importlib.util
import math
import re
import shlex
import sys
import textwrap
import tomllib

import pytest
import torch
import yaml

from slime_tis.correction import RolloutCorrectionConfig, correct
from slime_tis.integrations import verl
from slime_tis.main import _parser
from slime_tis.options.fields import flag
from slime_tis.options.flags import Flag
from slime_tis.parity.parity_command import sides
from slime_tis.policy.step_sums import STALENESS, TURN, metrics_by, sums_by
from slime_tis.trainer.cli.slime_flags import (
    ADVICE,
    FIXED,
    RENAMED,
    RESTATED,
    VALUES,
    refusal,
)
from slime_tis.trainer.cli.train_arguments import configure
from slime_tis.trainer.cli.train_options import ALIASES, FLAGS, OPTIONS
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.rollout.rollout_metrics import rollout_metrics
from tests.checkpoints import make_checkpoint, make_task
from tests.runs import ROOT

DOCS = ROOT / "docs"


def blocks(page, language):
    """The fenced blocks of a page in a language, none for a plain one."""
    fenced = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", (DOCS / page).read_text(), re.M | re.S)
    return [textwrap.dedent(text) for _, name, text in fenced if name == language]


def documented(pattern):
    return set(re.findall(f"`({pattern})`", (DOCS / "metrics.md").read_text()))


@pytest.fixture
def task(tmp_path, monkeypatch):
    """The paths that the pages name, and the flags that every run needs."""
    monkeypatch.chdir(tmp_path)
    make_task(tmp_path / "data" / "sort_digits")
    return (
        "--hf-checkpoint data/sort_digits/checkpoint --prompt-data data/sort_digits/train.jsonl"
        " --num-rollout 1 --rollout-batch-size 4 --n-samples-per-prompt 2"
        " --rollout-max-response-len 12 --rm-type exact_match "
    )


@pytest.fixture(scope="module")
def flags_writer():
    return writer_of("flags")


def test_flags_page_is_what_its_writer_writes(flags_writer):
    assert (DOCS / "flags.md").read_text() == flags_writer.render(), "run `make docs`"


def test_options_schema_is_what_its_writer_writes(flags_writer):
    written = (DOCS / "options.schema.json").read_text()
    assert written == flags_writer.render_schema(), "run `make docs`"


def writer_of(page):
    """The program that writes a page, as a module."""
    spec = importlib.util.spec_from_file_location(page, DOCS / f"write_{page}.py")
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    return writer


def slime_flags_writer():
    return writer_of("slime_flags")


def test_page_of_ported_options_is_what_its_writer_writes():
    written = (DOCS / "ported_options.md").read_text()
    assert written == writer_of("ported_options").render(), "run `make docs`"


def test_page_of_slimes_flags_is_what_its_writer_writes():
    assert (DOCS / "slime_flags.md").read_text() == slime_flags_writer().render(), "run `make docs`"


def test_every_flag_of_slimes_parser_has_one_row():
    words = slime_flags_writer().PARSER.split()
    assert len(words) == len(set(words)) == 223


def test_flags_of_slime_are_refused_as_their_page_says():
    writer = slime_flags_writer()
    known = [flag(name) for name in (*OPTIONS, *ALIASES)]
    for word in writer.PARSER.split():
        name = f"--{word}"
        status, _ = writer.judged(name)
        unknown = [Flag(name, FIXED.get(name, ("1",))[:1])]
        if status == "supported":
            assert name in FLAGS
        elif status == "accepted":
            assert refusal(unknown, known) == ""
        else:
            assert refusal(unknown, known).startswith(name)


def quick_start(first_words: str) -> str:
    """The only plain block of the quick start that begins with these words."""
    (block,) = [block for block in blocks("quick_start.md", "") if block.startswith(first_words)]
    return block


@pytest.mark.usefixtures("task")
def test_the_command_of_the_quick_start_is_accepted():
    command = quick_start("python train.py \\")
    got = configure(shlex.split(command.replace("\\\n", " "))[2:], {})
    assert got.correction.rs_z_score == 3.0 and got.correction.rs_level == "geometric"
    assert got.rollout.eval_prompt_sets == (("sort_digits", "data/sort_digits/eval.jsonl"),)
    assert got.loop.global_batch_size == 256


def test_the_choices_of_the_quick_start_are_accepted(task):
    choices = quick_start("--use-tis\n").splitlines()
    corrections = [configure(shlex.split(task + line), {}).correction for line in choices]
    assert [c.use_rollout_logprobs for c in corrections] == [False] * 4 + [True] * 3 + [False]
    assert [c.corrects for c in corrections] == [True] * 4 + [False] + [True] * 3


def test_the_chat_flags_of_the_quick_start_are_accepted(task):
    chat = quick_start("--apply-chat-template")
    options = configure(shlex.split(task + chat), {}).rollout.chat_template_options
    assert options == {"enable_thinking": False}


def test_the_wrong_command_of_the_quick_start_is_refused_as_shown(task):
    command, message = quick_start("$ ").splitlines()
    with pytest.raises(ValueError) as error:
        configure(shlex.split(task + command.split("…")[1]), {})
    assert str(error.value) == message


@pytest.mark.usefixtures("task")
def test_the_command_of_the_page_on_equal_log_probs_is_accepted():
    command, _ = blocks("true_on_policy.md", "")
    options = configure(shlex.split(command.replace("\\\n", " "))[2:], {})
    assert options.rollout.true_on_policy


def test_the_comparison_with_a_server_on_that_page_is_accepted():
    _, command = blocks("true_on_policy.md", "")
    _, others = sides(_parser().parse_args(shlex.split(command)[1:]))
    assert [side.execution for side in others] == ["sglang"]


def test_commands_on_the_sglang_page_are_accepted(task):
    (commands,) = [
        block for block in blocks("sglang.md", "") if block.startswith("python train.py")
    ]
    found = [
        configure(shlex.split(task + line.split("…")[1]), {}).servers["sglang"]
        for line in commands.splitlines()
    ]
    assert [config.launch for config in found] == [1, None, None]
    assert found[0].server_args == ("--mem-fraction-static", "0.8")
    assert len(found[1].server_urls) == 2 and found[2].router_url == "http://10.0.0.4:8000"


def test_the_block_on_the_verl_page_equals_flags(task, tmp_path):
    (block,) = blocks("verl.md", "yaml")
    (tmp_path / "verl.yaml").write_text(block)
    got = configure(shlex.split(task + "--custom-config-path verl.yaml"), {}).correction
    flags = (
        "--use-tis --tis-upper-bound 2.0 --use-rs --rs-level sequence --rs-upper-bound 2.0"
        " --rs-lower-bound 0.5 --rs-veto-threshold 1e-4 --rejection-normalizer kept"
    )
    assert got == configure(shlex.split(task + flags), {}).correction


@pytest.mark.parametrize("page", ["flags.md", "quick_start.md"])
def test_yaml_on_the_pages_is_accepted(task, tmp_path, page):
    (block,) = blocks(page, "yaml")
    (tmp_path / "page.yaml").write_text(block)
    got = configure(shlex.split(task + "--custom-config-path page.yaml"), {}).correction
    assert got.use_tis and got.rs_veto_threshold == 1e-4


def test_the_staged_roll_out_is_accepted_stage_by_stage(task, tmp_path):
    found = []
    for block in blocks("off_policy.md", "yaml"):
        (tmp_path / "stage.yaml").write_text(block)
        found.append(
            configure(shlex.split(task + "--custom-config-path stage.yaml"), {}).correction
        )
    ours, verls = found[:3], found[3:]
    for stages in (ours, verls):
        assert [(stage.use_rs, stage.use_tis) for stage in stages] == [
            (False, False),
            (True, False),
            (True, True),
        ]
    assert not any(stage.use_rollout_logprobs for stage in ours)
    assert all(stage.use_rollout_logprobs and stage.policy_loss == "reinforce" for stage in verls)
    assert verls[2].tis_level == verls[2].rs_level == "sequence" and verls[2].rs_bounds == (
        0.5,
        2.0,
    )


CORRECTIONS = [
    {"use_tis": True, "use_rs": True, "rs_veto_threshold": 1e-4, "tis_batch_normalize": True},
    {
        "use_tis": True,
        "tis_mode": "clip",
        "rollout_rs": "token_k1,seq_max_k3",
        "rollout_rs_threshold": 2.0,
    },
    {"use_tis": True, "tis_mode": "mask", "tis_level": "sequence", "rs_second_moment_bound": 0.04},
    {"use_rs": True, "rs_level": "geometric"},
    {"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0},
]


@pytest.mark.parametrize("options", CORRECTIONS, ids=str)
def test_every_metric_of_the_correction_is_in_the_glossary(options):
    config = RolloutCorrectionConfig(**options)
    train = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]
    rollout = [torch.tensor([-1.1, -1.9]), torch.tensor([-0.4])]
    mask = [torch.ones(2), torch.ones(1)]
    names = correct(config, train, rollout, mask).statistics.metrics()
    criteria = "|".join(criterion.name for criterion in config.rejections) or "none"
    general = {
        re.sub(rf"mis_rs_({criteria})_", "mis_rs_CRITERION_", f"train/{name}") for name in names
    }
    assert len(names) >= 15 and general - documented(r"train/\w+") == set()


def test_every_metric_of_a_rollout_is_in_the_glossary():
    failed = Sample(response_length=1, loss_mask=[0], failure="raised")
    names = {name.replace("/raised", "/REASON") for name in rollout_metrics([[failed]], 0)}
    assert names - documented(r"rollout/[\w/]+") == set()


def test_every_timed_part_is_in_the_glossary():
    sources = (ROOT / "slime_tis").rglob("*.py")
    parts = re.findall(r'\btimer[(,] ?"(\w+)"', "".join(path.read_text() for path in sources))
    assert len(parts) >= 10
    assert {f"perf/{name}_time" for name in parts} - documented(r"perf/\w+") == set()


@pytest.mark.parametrize("by", [STALENESS, TURN], ids=["staleness", "turn"])
def test_every_metric_of_a_breakdown_is_in_the_glossary(by):
    sums = sums_by(
        by, torch.zeros(6), torch.ones(6), torch.ones(6), torch.tensor([0, 1, 2, 4, 7, 12])
    )
    names = {
        re.sub(f"_{by.name}_.*", f"_{by.name}_N", f"train/{name}") for name in metrics_by(by, sums)
    }
    assert len(names) == 4 and names - documented(r"train/\w+") == set()
    page = (DOCS / "metrics.md").read_text()
    assert all(f"`{bucket}`" in page for bucket in by.buckets)


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_python_on_the_library_page_runs(process_group):
    """Each block continues the ones before it; the page asserts that layouts and splits agree."""
    found = {}
    for block in blocks("library.md", "python"):
        exec(block, found)
    weights = [math.exp(0.1), 2.0, 1.0], [math.exp(-0.1), 1.0, 0.0]
    assert found["correction"].weights.flatten().tolist() == pytest.approx(
        [*weights[0], *weights[1]]
    )
    assert found["loss"].item() == pytest.approx((sum(weights[0]) + sum(weights[1])) / 5)
    assert found["metrics"]["mis_truncate_fraction"] == pytest.approx(0.2)


def test_python_on_the_page_for_verl_runs():
    """Each block continues the ones before it; the tensors have a masked token."""
    log_prob = torch.tensor([[-1.0, -2.0], [-0.5, -1.0]], requires_grad=True)
    found = {
        "log_prob": log_prob,
        "old_log_prob": log_prob.detach(),
        "rollout_log_prob": torch.tensor([[-1.1, -2.9], [-0.4, -1.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "advantages": torch.ones(2, 2),
    }
    for block in blocks("verl.md", "python"):
        exec(block, found)
        if block.startswith(
            "import slime_tis"
        ):  # w = exp(ΣΔ) = e bounded to 2, and e^-0.1; on −log π of 1, 2 and 1/2
            row = math.exp(1.0), math.exp(-0.1)
            assert found["loss"].item() == pytest.approx((min(row[0], 2.0) * 3 + row[1] * 0.5) / 3)
    assert found["config"].tis_level == "token" and found["weights"].max() == 2.0
    assert found["loss"].item() == pytest.approx(-(math.exp(0.1) + 2.0 + math.exp(-0.1)) / 3)


def test_the_switch_on_the_page_for_verl_replaces_its_helper(monkeypatch):
    name = "verl.trainer.ppo.rollout_corr_helper"
    monkeypatch.setitem(sys.modules, name, None)  # restored afterwards
    (code,) = [
        block for block in blocks("verl.md", "python") if block.startswith("# use_slime_tis.py")
    ]
    found = {}
    exec(code, found)
    found["switch"]()
    assert importlib.import_module(name).apply_bypass_mode is verl.apply_bypass_mode


README_FILE = ROOT / "README.md"
README = README_FILE.read_text()


def test_the_extras_of_the_readme_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name for names in re.findall(r"\[([\w,]+)\]'", README) for name in names.split(",")}
    assert extras == {"analysis", "train"} and extras <= set(project["optional-dependencies"])


def test_the_license_is_that_of_the_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and (ROOT / "LICENSE").exists()


def test_the_function_of_the_readme_loads():
    from slime_tis.user_functions import load_function

    (flags,) = [
        block for block in blocks(README_FILE, "") if block.startswith("--use-tis --custom")
    ]
    assert callable(load_function(flags.split()[-1]))


def test_the_readme_links_every_page():
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert [name for name in pages if f"docs/{name}" not in README] == []


def test_the_command_is_accepted(tmp_path):
    (command,) = [block for block in blocks(README_FILE, "") if block.startswith("python train.py")]
    make_checkpoint(tmp_path / "model", "qwen3", max_position_embeddings=4096)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    command = command.replace("DIR", str(tmp_path / "model")).replace(
        "FILE.jsonl", str(tmp_path / "prompts.jsonl")
    )
    got = configure(shlex.split(command.replace("\\\n", " "))[2:], {})
    assert got.correction.is_bounds[1] == 2.0 and got.correction.rs_z_score == 3.0


@pytest.mark.parametrize("layout", ["list", "padded"])
@pytest.mark.parametrize("rejected", ["nothing", "everything"])
def test_the_five_lines_run(layout, rejected):
    """Healthy samples are all kept; where nothing is, the loss and its gradient are 0."""
    generator = torch.Generator().manual_seed(0)
    rollout_log_probs = -torch.rand(8, 12, generator=generator)
    old_log_probs = rollout_log_probs + 0.02 * torch.randn(8, 12, generator=generator)
    leaf = torch.ones(8, 12, requires_grad=True)
    names = {
        "old_log_probs": old_log_probs + (torch.nan if rejected == "everything" else 0),
        "rollout_log_probs": rollout_log_probs,
        "loss_mask": torch.ones(8, 12),
        "token_loss": leaf * 3,
    }
    if layout == "list":
        names = {name: list(value) for name, value in names.items()}
    block = blocks(README_FILE, "python")[0]
    exec("import slime_tis\n" + block[block.index("config =") :], names)
    names["loss"].backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()
    if rejected == "everything":
        assert names["loss"].item() == 0.0 and not leaf.grad.any()
        return
    assert names["metrics"]["gradient_kept_fraction"] == 1.0
    assert names["loss"].item() == pytest.approx(
        3 * (old_log_probs - rollout_log_probs).exp().mean().item()
    )


def test_the_blocks_run_in_the_order_in_which_they_are_read(tmp_path, monkeypatch):
    """Commands are parsed with the data that earlier blocks make; Python blocks are run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    makefile = (ROOT / "Makefile").read_text()
    runs = set()
    seen = set()
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S):
        if language == "python":
            exec(text, {})
        for line in text.replace("\\\n", " ").splitlines() if not language else ():
            words = (
                shlex.split(line, comments=True)
                if re.match(r"make |pip |slime-tis |python |\.venv/", line)
                else []
            )
            match words:
                case ["slime-tis", "demo"]:
                    assert "pip install" in seen
                case ["make", target]:
                    assert re.search(rf"^{target}:", makefile, re.M), target
                    if target in ("data", "train"):
                        make_task(tmp_path / "data/sort_digits")
                case ["pip", "install", package]:
                    assert re.fullmatch(r"\.(\[(analysis|train)\])?", package)
                case [python, "train.py", *flags] if not any(
                    word in ("DIR", "FILE.jsonl") for word in flags
                ):
                    assert python == ".venv/bin/python"
                    configure(flags, {})
                    runs.update(
                        flags[flags.index("--output-dir") + 1 :][:1]
                        if "--output-dir" in flags
                        else ()
                    )
                case [".venv/bin/slime-tis", "report" | "diagnose", run]:
                    assert run in runs
            seen.add(" ".join(words[:2]))
    assert {"make install", "make train", "pip install", ".venv/bin/python train.py"} <= seen


PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "studies").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page):
    """The fragments of a page's headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


@each_page
def test_python_blocks_parse(page):
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")


@each_page
def test_yaml_blocks_parse(page):
    for text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)


@each_page
def test_commands_name_existing_targets(page):
    text = page.read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.M)) <= targets


@each_page
def test_commands_name_existing_scripts(page):
    text = page.read_text()
    for script in re.findall(r"(?:python|bash) ((?:[\w.]+/)*\w+\.(?:py|sh))\b", text):
        is_on_the_page = f"# {script}:" in text
        assert is_on_the_page or (ROOT / script).exists(), script


@each_page
def test_commands_name_existing_modules(page):
    text = page.read_text()
    for module in re.findall(r"python -m ((?:examples|studies|slime_tis|benchmarks)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        if path.is_dir():
            path = path / "__main__"
        assert path.with_suffix(".py").exists(), module


OTHER_PROGRAMS = """
--index-url --logdir --nnodes --no-build-isolation --nproc-per-node --shutdown-timeout --signal
--signals-to-handle --enable-deterministic-inference --enable-return-routed-experts
--moe-runner-backend --log-ratio-scale --dtype --compare --json --out --seeds --without-checkpoint
--experts --prompts --steps --every --held-out --plant-at --engines --device --stages --model
--other-checkpoint --fail-on --demo --only --sample --world-size --gpu-memory --bandwidth
--master-port --master-addr --node-rank --version --async_generate --python --enable-scale-out
--logprobs-mode --worker-extension-cls --enable-prompt-tokens-details --no-enable-chunked-prefill
--return-sampling-mask
--reference --other --precision --other-precision --adapter --other-adapter --older-adapter
--served-adapter --samples --tokens --chunk-size --url --enable-lora --max-loras --max-lora-rank
--lora-backend --api-server-count
"""
"""Flags of tensorboard, pip, torchrun, Slurm, SGLang, vLLM, ms-swift, pytest, examples/,
benchmarks/, tools/, other `slime-tis …`."""


WRITTEN = ("flags.md", "slime_flags.md", "ported_options.md")
"""Pages that are written from the flags themselves."""


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent in (ROOT, ROOT / "docs") and page.name not in WRITTEN],
    ids=lambda page: page.name,
)
def test_every_flag_exists(page):
    known = {"--" + name.replace("_", "-") for name in (*OPTIONS, *ALIASES)} | {
        "--help",
        *OTHER_PROGRAMS.split(),
    }
    known |= {
        *FIXED,
        *RESTATED,
        *RENAMED,
        *(flag for flags in ADVICE for flag in flags.split()),
        *VALUES,
    }
    known |= {f"--no-{name[2:]}" for name in known}
    found = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page.read_text()))
    assert {
        name for name in found - known if not name.startswith(("--sglang-", "--vllm-"))
    } == set()  # those go to the servers


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_files_of_contributing_exist():
    paths = re.findall(r"`((?:slime_tis|docs|tests)/[\w/.]*)`", CONTRIBUTING)
    assert len(paths) > 20
    missing = [path for path in paths if "NAME" not in path and not (ROOT / path).exists()]
    assert missing == []


def test_shape_suffixes_are_those_of_contributing():
    table = CONTRIBUTING.split("## Notation")[1].split("Lists of tensors")[0]
    known = set(re.findall(r"`_([A-Z]+)`", table))
    for path in (ROOT / "slime_tis").rglob("*.py"):
        found = set(re.findall(r"\b_?[a-z][a-z0-9_]*_([A-Z]{1,3})\b(?!\w)", path.read_text()))
        assert found <= known, f"{path}: {found - known}"
