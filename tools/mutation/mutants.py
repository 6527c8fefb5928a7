"""One-line mutants of a source file: each is one small fault, as a replacement of bytes."""

import ast
import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARISONS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "&": "|", "|": "&"}
RENAMED_CALLS = {
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "minimum": "maximum",
    "maximum": "minimum",
    "any": "all",
    "all": "any",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
}
DELETED_METHODS = {
    "clamp",
    "clamp_",
    "clamp_min",
    "clamp_max",
    "nan_to_num",
    "detach",
    "abs",
    "masked_fill",
}
"""`x.clamp(…)` becomes `x`."""


@dataclass(frozen=True)
class Mutant:
    """One fault in one file."""

    path: Path
    line: int
    before: str
    """The complete line, without indentation."""
    start: int
    end: int
    """Bytes of the file that are replaced."""
    replacement: str
    original: str
    """The replaced text."""

    @property
    def change(self) -> str:
        """The change as a reader sees it, on one line."""
        before, after = (" ".join(text.split()) for text in (self.original, self.replacement))
        return f"{before} → {after}"

    @property
    def name(self) -> str:
        """Path, line of code and change, which do not depend on other lines of the file.

        Equal changes of one line have one name; the first of them is drawn.
        """
        return f"{self.path}: {self.before}: {self.change}"

    def rank(self, seed: int) -> str:
        """A random number of the mutant, so that edits elsewhere leave a drawn sample as it is."""
        return hashlib.sha256(f"{seed} {self.name}".encode()).hexdigest()

    def mutate(self, source: bytes) -> bytes:
        """Returns the file with the fault."""
        return source[: self.start] + self.replacement.encode() + source[self.end :]


def mutants_of(root: Path, path: Path) -> list[Mutant]:
    """Returns all mutants of a file below `root`; `path` is relative."""
    source = (root / path).read_bytes()
    lines = source.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    mutants = []
    for node in _mutable_nodes(ast.parse(source)):
        start = offsets[node.lineno - 1] + node.col_offset
        assert node.end_lineno is not None and node.end_col_offset is not None
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        for shift, length, replacement in _replacements(node, source[start:end]):
            place = start + shift
            number = source[:place].count(b"\n") + 1
            mutants.append(
                Mutant(
                    path=path,
                    line=number,
                    before=lines[number - 1].decode().strip(),
                    start=place,
                    end=place + length,
                    replacement=replacement,
                    original=source[place : place + length].decode(),
                )
            )
    return mutants


def _mutable_nodes(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yields expressions and statements, but no annotations, decorators, docstrings or messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Assert):
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            # The exception of a `raise` is a message; the mutant without the statement is enough.
            if not isinstance(child, ast.Raise):
                yield from _mutable_nodes(child)


def _replacements(node: ast.AST, text: bytes) -> Iterator[tuple[int, int, str]]:  # noqa: C901
    """(start, length, new text) of each mutation of a node, relative to the node's bytes."""
    whole = (0, len(text))
    match node:
        case ast.Compare():
            yield from _between(node, text, [node.left, *node.comparators], COMPARISONS)
        case ast.BinOp(
            op=ast.Add()
            | ast.Sub()
            | ast.Mult()
            | ast.Div()
            | ast.FloorDiv()
            | ast.BitAnd()
            | ast.BitOr()
        ):
            yield from _between(node, text, [node.left, node.right], OPERATORS)
        case ast.BoolOp():
            yield from _between(node, text, node.values, {"and": "or", "or": "and"})
        case ast.UnaryOp(op=ast.Not() | ast.Invert()):
            yield *whole, f"({_text(node, text, node.operand)})"
        case ast.Constant(value=bool(value)):
            yield *whole, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            for changed in sorted({value * 2 or 1, value + 1}):
                yield *whole, repr(changed)
        case ast.IfExp():
            test = _text(node, text, node.test)
            yield _offset(node, text, node.test), len(test.encode()), f"(not ({test}))"
        case ast.Return(value=ast.AST()) if not _is_none(node.value):
            yield *whole, "return None"
        case ast.Raise():
            yield *whole, "pass"
        case ast.Expr(value=ast.Call()):
            yield *whole, "pass"
        case ast.Call(func=ast.Attribute(attr=attr) as function):
            method = _text(node, text, function)  # with the parentheses of `(x - 1).abs`
            receiver = method.removesuffix(attr).rstrip(" \n.")
            if attr in RENAMED_CALLS:
                yield len(method.encode()) - len(attr), len(attr), RENAMED_CALLS[attr]
            if attr in DELETED_METHODS and receiver != "torch":
                yield *whole, receiver
            if attr == "where" and len(node.args) == 3:
                yield *whole, f"({_text(node, text, node.args[1])})"
        case ast.Call(func=ast.Name(id=name)) if name in RENAMED_CALLS:
            yield 0, len(name), RENAMED_CALLS[name]


def _between(
    node: ast.AST, text: bytes, operands: list[ast.expr], swaps: dict[str, str]
) -> Iterator[tuple[int, int, str]]:
    """The swapped operators between neighbouring operands."""
    for left, right in itertools.pairwise(operands):
        start = _offset(node, text, left) + len(_text(node, text, left).encode())
        gap = text[start : _offset(node, text, right)].decode()
        found = re.search(r"[<>=!]=?|//|[-+*/&|]|\b(?:is not|not in|is|in|and|or)\b", gap)
        if found and found[0] in swaps:
            yield start + len(gap[: found.start()].encode()), len(found[0]), swaps[found[0]]


def _offset(node: Any, text: bytes, child: Any) -> int:
    """Where a child starts in its parent's bytes."""
    if child.lineno == node.lineno:
        return child.col_offset - node.col_offset
    lines = text.splitlines(keepends=True)
    skipped = sum(len(line) for line in lines[: child.lineno - node.lineno])
    return skipped + child.col_offset


def _text(node: Any, text: bytes, child: Any) -> str:
    """The bytes of a child as text."""
    start = _offset(node, text, child)
    end_of_child = ast.Pass(lineno=child.end_lineno, col_offset=child.end_col_offset)
    return text[start : _offset(node, text, end_of_child)].decode()


def _is_none(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
