"""Who imports whom, downward only, by the source of every file; and what `import slime_tis` pulls in."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Layer to the project's modules it may import, besides itself. `slime_tis` is the package's public names.
ALLOWED: dict[str, set[str]] = {
    "slime_tis.correction": {"slime_tis.limits"},
    "slime_tis.errors": set(),
    "slime_tis.files": set(),
    "slime_tis.alarm": set(),
    "slime_tis.sampling_mask": set(),
    "slime_tis.dumps": {
        *("slime_tis", "slime_tis.correction", "slime_tis.errors", "slime_tis.files", "slime_tis.policy"),
    },
    "slime_tis.interrupt": set(),
    "slime_tis.custom": {"slime_tis.errors", "slime_tis.integrations"},
    "slime_tis": {"slime_tis.correction"},
    "slime_tis.integrations": {"slime_tis.correction", "slime_tis.errors"},
    "custom_tis": {"slime_tis", "slime_tis.correction", "slime_tis.integrations"},
    "slime_tis.storage": {"slime_tis.errors", "slime_tis.files", "slime_tis.hf_directory", "slime_tis.limits"},
    "slime_tis.limits": {"slime_tis.errors"},
    "slime_tis.hf_directory": {"slime_tis.errors"},
    "slime_tis.cli": {
        *("slime_tis", "slime_tis.correction", "slime_tis.custom", "slime_tis.dumps", "slime_tis.errors"),
        *("slime_tis.hf_directory", "slime_tis.integrations", "slime_tis.limits", "slime_tis.megatron"),
        "slime_tis.policy",
        *("slime_tis.reporting", "slime_tis.rollout", "slime_tis.storage"),
    },
    "slime_tis.diagnosis": {"slime_tis.dumps", "slime_tis.errors", "slime_tis.hf_directory"},
    "slime_tis.cli.main": {"slime_tis", "slime_tis.cli", "slime_tis.report", "slime_tis.train"},
    "slime_tis.report": {
        *("slime_tis.correction", "slime_tis.diagnosis", "slime_tis.dumps", "slime_tis.errors", "slime_tis.files"),
        "slime_tis.reporting",
    },
    "slime_tis.train": {
        *("slime_tis.cli", "slime_tis.custom", "slime_tis.errors", "slime_tis.evaluation", "slime_tis.exit_status"),
        *(
            "slime_tis.hf_directory",
            "slime_tis.interrupt",
            "slime_tis.learner",
            "slime_tis.megatron",
            "slime_tis.policy",
        ),
        *("slime_tis.reporting", "slime_tis.resumption", "slime_tis.rollout", "slime_tis.train_dump"),
        "slime_tis.weight_sync",
    },
    "slime_tis.evaluation": {"slime_tis.interrupt", "slime_tis.megatron", "slime_tis.rollout"},
    "slime_tis.exit_status": {"slime_tis.errors", "slime_tis.interrupt", "slime_tis.megatron", "slime_tis.rollout"},
    "slime_tis.resumption": {
        *("slime_tis.evaluation", "slime_tis.learner", "slime_tis.megatron", "slime_tis.rollout", "slime_tis.storage"),
    },
    "slime_tis.weight_sync": {"slime_tis.megatron", "slime_tis.rollout"},
    "slime_tis.diffusion": {"slime_tis.alarm", "slime_tis.correction", "slime_tis.policy"},
    "slime_tis.policy": {
        "slime_tis",
        "slime_tis.correction",
        "slime_tis.custom",
        "slime_tis.errors",
        "slime_tis.integrations",
        "slime_tis.limits",
    },
    "slime_tis.megatron": {
        "slime_tis",
        "slime_tis.integrations",
        "slime_tis.hf_directory",
        "slime_tis.correction",
        "slime_tis.custom",
        "slime_tis.policy",
        "slime_tis.storage",
        "slime_tis.errors",
        "slime_tis.limits",
        "slime_tis.sampling_mask",
    },
    "slime_tis.rollout": {
        "slime_tis",
        "slime_tis.sampling_mask",
        "slime_tis.hf_directory",
        "slime_tis.correction",
        "slime_tis.custom",
        "slime_tis.errors",
        "slime_tis.interrupt",
        "slime_tis.files",
        "slime_tis.integrations",
        "slime_tis.limits",
        "slime_tis.storage",
    },
    "slime_tis.reporting": {
        "slime_tis",
        "slime_tis.files",
        "slime_tis.alarm",
        "slime_tis.correction",
        "slime_tis.errors",
        "slime_tis.limits",
    },
    "slime_tis.learner": {
        *("slime_tis.correction", "slime_tis.custom", "slime_tis.errors", "slime_tis.megatron"),
        *("slime_tis.policy", "slime_tis.rollout", "slime_tis.train_dump"),
    },
    "slime_tis.train_dump": {
        *("slime_tis.correction", "slime_tis.dumps", "slime_tis.errors", "slime_tis.policy", "slime_tis.rollout"),
    },
}
HEAVY = (
    "megatron",
    "transformers",
    "sglang",
    "tensorboard",
    "transformer_engine",
    "verl",
    "matplotlib",
    "numpy.testing",
)


@cache
def sources() -> list[Path]:
    return sorted([*(ROOT / "slime_tis").rglob("*.py"), *(ROOT / "custom_tis").rglob("*.py")])


def layer_of(module: str) -> str | None:
    """The most specific layer that a dotted name belongs to."""
    return max((layer for layer in ALLOWED if f"{module}.".startswith(f"{layer}.")), key=len, default=None)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    """Modules of the project that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if layer_of(name) != layer_of(node.module) else node.module for name in names}
    return {name for name in found if name.split(".")[0] in ("slime_tis", "custom_tis", "train")}


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def module_names() -> set[str]:
    return {module_of(path) for path in sources()}


def imported_at_start(path: Path) -> set[str]:
    """Modules of the project that are imported while a file is: not those in functions or under TYPE_CHECKING."""
    modules = module_names()
    found: set[str] = set()
    statements: list[ast.AST] = list(parsed(path).body)
    while statements:
        match statements.pop():
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                within = {f"{module}.{alias.name}" for alias in names}
                found |= {name if name in modules else module for name in within}
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=otherwise):
                statements += otherwise
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                pass
            case other:
                statements += ast.iter_child_nodes(other)
    return found & modules


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    module = module_of(path)
    own = layer_of(module)
    assert own is not None, f"{module} has no layer; give it one in ALLOWED"
    for name in imports(path):
        layer = layer_of(name)
        assert layer == own or layer in ALLOWED[own], f"{module} imports {name}"


def test_no_module_imports_itself_through_others() -> None:
    graph = {module_of(path): imported_at_start(path) for path in sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' → '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("folder", ["custom_tis", "slime_tis/integrations", "slime_tis/diffusion"])
def test_the_outside_uses_public_names_of_the_correction(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        assert not {name for name in imports(path) if name.startswith("slime_tis.correction.")}, path


def test_config_modules_need_the_standard_library_alone() -> None:
    for name in ("config", "criteria", "presets"):
        for node in ast.walk(ast.parse((ROOT / f"slime_tis/correction/{name}.py").read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert module and module.split(".")[0] in sys.stdlib_module_names | {"slime_tis"}, module


def test_import_is_light() -> None:
    script = "import sys, slime_tis, slime_tis.custom; print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = loaded.stdout.split()
    assert "torch" in modules
    assert not [name for name in modules if name in HEAVY or name.startswith(tuple(f"{h}." for h in HEAVY))]
