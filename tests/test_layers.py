"""Who imports whom, downward only, by the source of every file."""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the lowest layer to the highest: a module imports its own layer and lower ones.
LAYERS = (
    ("slime_tis.errors",),
    (
        "slime_tis.options",
        "slime_tis.atomic_files",
        "slime_tis.torch_files",
        "slime_tis.hf_model",
        "slime_tis.command_signals",
        "slime_tis.console_output",
        "slime_tis.progress",
        "slime_tis.alarm",
        "slime_tis.families",
        "slime_tis.family_weights",
        "slime_tis.hf_directory",
        "slime_tis.hf_tensors",
        "slime_tis.unread_fields",
        "slime_tis.unsupported_families",
        "slime_tis.hf_hub",
        "slime_tis.peft_directory",
    ),
    ("slime_tis.correction",),
    ("slime_tis.functional",),
    ("slime_tis",),  # the public names
    ("slime_tis.integrations",),
    (
        "slime_tis.options.command_line",
        "slime_tis.options.yaml_file",
        "slime_tis.options.json_schema",
    ),
    ("slime_tis.user_functions", "custom_tis"),
    ("slime_tis.policy",),
    ("slime_tis.diffusion",),
    ("slime_tis.health", "slime_tis.token_signs"),
    ("slime_tis.live_health",),
    ("slime_tis.analysis.dumps",),  # the file format of dumps, which training writes
    ("slime_tis.integrations.frameworks",),
    (
        "slime_tis.integrations.losses",
        "slime_tis.integrations.tinker",
        "slime_tis.integrations.trl",
        "slime_tis.integrations.verl_plugin",
    ),
    ("slime_tis.analysis.diagnosis",),
    ("slime_tis.analysis.logs",),
    ("slime_tis.analysis.report",),
    (
        "slime_tis.trainer.configs",
        "slime_tis.trainer.invariant",
        "slime_tis.trainer.matrix_products",
    ),
    ("slime_tis.trainer.reporting",),
    ("slime_tis.trainer.stop_signals",),
    ("slime_tis.trainer.storage",),
    (
        "slime_tis.trainer.data",
        "slime_tis.trainer.rank_collectives",
        "slime_tis.trainer.engines",
        "slime_tis.trainer.agents",
    ),
    ("slime_tis.trainer.rewards", "slime_tis.trainer.rollout"),
    ("slime_tis.parity",),  # also compares operations for messages of a run
    ("slime_tis.trainer.megatron",),
    (
        "slime_tis.parity.local_execution",
        "slime_tis.parity.shared_kernels",
        "slime_tis.parity.training_execution",
        "slime_tis.parity.training_sites",
    ),
    ("slime_tis.trainer.train_dump",),
    ("slime_tis.trainer.step_inputs",),
    (
        "slime_tis.trainer.step_assignment",
        "slime_tis.trainer.routing_mismatch",
        "slime_tis.trainer.token_gradients",
        "slime_tis.trainer.on_policy_gate",
    ),
    ("slime_tis.trainer.learner", "slime_tis.trainer.evaluation"),
    (
        "slime_tis.trainer.adapter_check",
        "slime_tis.trainer.weight_sync",
        "slime_tis.trainer.first_difference",
    ),
    ("slime_tis.trainer.checkpointer", "slime_tis.trainer.check_engines"),
    ("slime_tis.trainer.cli",),
    (
        "slime_tis.trainer.sample_pipeline",
        "slime_tis.trainer.adapter_plan",
        "slime_tis.trainer.memory_plan",
    ),
    ("slime_tis.trainer.port", "slime_tis.trainer.setup"),
    ("slime_tis.trainer.train", "slime_tis.trainer.exits"),
    ("slime_tis.trainer.training_command",),
    ("slime_tis.demo", "slime_tis.shell_completion"),
    ("slime_tis.main",),
    ("slime_tis.__main__",),
)
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}


@cache
def sources():
    return sorted([*(ROOT / "slime_tis").rglob("*.py"), *(ROOT / "custom_tis").rglob("*.py")])


def layer_of(module):
    """The most specific layer that a dotted name belongs to."""
    return max(
        (layer for layer in HEIGHT if f"{module}.".startswith(f"{layer}.")), key=len, default=None
    )


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path):
    """Modules of the project that a file imports, also inside functions."""
    modules = {module_of(source) for source in sources()}
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: import by the full name"
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules else node.module for name in within}
    return names & modules - {module_of(path)}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path):
    module = module_of(path)
    own = layer_of(module)
    assert own is not None, f"{module} has no layer; give it one in LAYERS"
    for name in imports(path):
        layer = layer_of(name)
        assert layer is not None and HEIGHT[layer] <= HEIGHT[own], f"{module} imports {name}"


def test_training_imports_no_report():
    trainer = [path for path in sources() if "trainer" in path.relative_to(ROOT).parts]
    used = {
        name for path in trainer for name in imports(path) if name.startswith("slime_tis.analysis.")
    }
    assert used and not any(name.startswith("slime_tis.analysis.report") for name in used), used


@pytest.mark.parametrize("name", ["config", "modes"])
def test_options_import_only_the_standard_library(name):
    allowed = sys.stdlib_module_names | {"slime_tis"}
    for node in ast.parse((ROOT / f"slime_tis/correction/{name}.py").read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert module and module.split(".")[0] in allowed, module


def test_no_module_imports_itself_through_others():
    graph = {module_of(path): imports(path) for path in sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' → '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("folder", ["custom_tis", "slime_tis/integrations", "slime_tis/diffusion"])
def test_the_outside_uses_public_names_of_the_correction(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert not {name for name in imports(path) if name.startswith("slime_tis.correction.")}, (
            path
        )
