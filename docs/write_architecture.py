"""Writes the packages of docs/architecture.md from the table of tests/test_layers.py; `make docs` runs it.

python docs/write_architecture.py
"""

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.test_layers import ALLOWED, ROOT

PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- packages: make docs -->\n", "<!-- end of packages -->"


def render() -> str:
    """The page, with the picture and the table as the layers are in the source."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{_picture()}\n{_table()}\n{END}{rest.split(END)[1]}"


def _picture() -> str:
    edges = [f"    {_node(name)} --> {_node(below)}" for name in sorted(ALLOWED) for below in _nearest(name)]
    nodes = [f'    {_node(name)}["{name.removeprefix("slime_tis.")}"]' for name in sorted(ALLOWED)]
    return "\n".join(["```mermaid", "flowchart TD", *nodes, *edges, "```", ""])


def _table() -> str:
    rows = [f"| `{name}` | {_purpose(name)} | {_names(ALLOWED[name])} |" for name in sorted(ALLOWED)]
    return "\n".join(["| package or module | what it holds | may import |", "|---|---|---|", *rows, ""])


def _nearest(name: str) -> list[str]:
    """What a layer may import and reaches through no other layer that it may import."""
    through = {lower for middle in ALLOWED[name] for lower in _below(middle)}
    return sorted(ALLOWED[name] - through)


def _below(name: str) -> set[str]:
    """What a layer may import, directly or through others."""
    return ALLOWED[name] | {lower for middle in ALLOWED[name] for lower in _below(middle)}


def _purpose(name: str) -> str:
    """The first line of a package's or module's docstring."""
    path = ROOT / name.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _names(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none of these"


def _node(name: str) -> str:
    return name.replace(".", "_")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE)
