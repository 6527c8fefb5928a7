"""Reads the training command out of a bash launch script; executes nothing.

tree-sitter parses the script. Followed are assignments (`=`, `+=`, arrays), `source`, `$X`, `${X}`, `${X[@]}`,
`${X:-default}` and its relatives, and the script's own directory. The output of other commands and other expansions
become marks in the word. An assignment in a block counts if the variable has no other value, and a note names it.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

MAX_SCRIPT_BYTES = 1 << 18
MAX_EXPANDED_CHARACTERS = 1 << 22
"""Characters that all variables of a script expand to, together."""
MAX_FILES = 16
PROGRAMS = ("train.py", "train_async.py")

UNSET, END = "\ue000", "\ue001"
"""Marks in expanded words: UNSET NAME END for a variable without a value."""
OUTPUT = UNSET + END
"""Mark in expanded words for the output of a command."""

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
PARAMETER = re.compile(rf"({NAME})(\[[@*]\])?(?:(:?[-=+?]).*)?", re.DOTALL)
WHOLE_VARIABLE = re.compile(rf'"\$\{{?({NAME})(\[@\])?\}}?"')
OWN_DIRECTORY = re.compile(r"cd (?:-- )?(.*?)(?: *&>/dev/null)? *&& pwd", re.DOTALL)
SCRIPT_ITSELF = re.compile(r"\bBASH_SOURCE\b|\$0|\$\{0\}")
PYTHON_PATH = re.compile(
    rf"""^[^#\n]*PYTHONPATH\\?"?\s*[:=]\s*\\?["']?((?:[^"'\\\s`$]|\$\{{{NAME}\}}|\$(?={NAME}))+)""", re.MULTILINE
)
BLOCKS = ("if_statement", "case_statement", "compound_statement", "do_group")
SUBSTITUTIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion")
BASH = Parser(Language(tree_sitter_bash.language()))


@dataclass(frozen=True)
class Launch:
    """The training command of a script."""

    program: str
    words: tuple[str, ...]
    """The expanded words after the program, with marks for unknown values."""
    notes: tuple[str, ...] = ()
    """Parts of the script that were not read, and uncertain values."""
    python_path: tuple[str, ...] = ()
    """Entries of the script's PYTHONPATH, without Megatron-LM."""


def read_launch(path: str | Path) -> Launch:
    """Returns the last command of a script that runs train.py or train_async.py."""
    path = Path(path)
    if path.suffix == ".py":
        raise ValueError(f"{str(path)!r} is a Python program; write `python train.py FLAGS` into a file for port.")
    reader = _Reader(path.parent.absolute(), files={path.resolve()})
    try:
        reader.read(_text_of(path))
    except RecursionError:
        raise ValueError(f"{str(path)!r} nests its commands too deeply to be read.") from None
    if reader.launch is None:
        broken = "".join(f" ({note})" for note in reader.notes)[:200]
        raise ValueError(
            f"{str(path)!r} has no command that runs {' or '.join(PROGRAMS)}{broken}; give slime's script."
        )
    paths = dict.fromkeys(reader.python_path.split(":"))
    own = [each for each in paths if each not in ("", f"{UNSET}PYTHONPATH{END}") and "Megatron-LM" not in each]
    notes = (*reader.notes, *reader.launch.notes)
    return dataclasses.replace(reader.launch, notes=notes, python_path=tuple(own))


def legible(word: str) -> str:
    """The word with its marks as bash writes them."""
    return re.sub(f"{UNSET}([^{END}]*){END}", lambda mark: f"${{{mark[1]}}}" if mark[1] else "$(...)", word)


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{str(path)!r} cannot be read: it is not a file; give a slime launch script.")
    if path.stat().st_size > MAX_SCRIPT_BYTES:
        raise ValueError(f"{str(path)!r} is too large; a script has at most {MAX_SCRIPT_BYTES} bytes.")
    text = path.read_text(encoding="utf-8", errors="replace")
    if "\ufffd" in text:
        raise ValueError(f"{str(path)!r} is not text in UTF-8; give a slime launch script.")
    return re.sub(f"[{UNSET}{END}\0]", "?", text)


@dataclass
class _Reader:
    """Follows the commands of a script, and expands words with the variables set so far."""

    directory: Path
    """Directory of the file that is read."""
    files: set[Path]
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Words by variable; one word for a variable that is not an array."""
    doubts: dict[str, dict[str, None]] = field(default_factory=dict)
    """Notes on uncertain variables, by each variable whose words depend on them."""
    met: dict[str, None] = field(default_factory=dict)
    """Notes on the variables of the words that were expanded last."""
    notes: list[str] = field(default_factory=list)
    launch: Launch | None = None
    python_path: str = ""
    expanded: int = 0

    def read(self, text: str) -> None:
        """Follows assignments, sourced files and training commands."""
        root = BASH.parse(text.encode()).root_node
        if root.has_error:
            self.notes.append(f"line {_error_row(root) + 1} and what follows it are not understood")
        self._follow(root)
        for match in PYTHON_PATH.finditer(text):
            self.python_path = self._value(_in_quotes(match[1].encode()))

    def _follow(self, node: Node, conditional: bool = False) -> None:
        if node.type == "variable_assignment":
            self._assign(node, conditional)
        elif node.type == "command" or (node.type == "redirected_statement" and node.children[0].type == "command"):
            self._run(node, conditional)
        elif node.type not in ("string", "command_substitution"):
            for child in node.named_children:
                self._follow(child, conditional or node.type in BLOCKS)

    def _run(self, node: Node, conditional: bool) -> None:
        """Reads a sourced file, or keeps the words after train.py."""
        command = node if node.type == "command" else node.children[0]
        assignments = [child for child in command.named_children if child.type == "variable_assignment"]
        words = command.named_children[len(assignments) :]
        for redirect in node.named_children if node is not command else ():  # may take later words for destinations
            words += redirect.children_by_field_name("destination")[1:]
        if not words:
            return
        for assignment in assignments:  # of `A=1 B=2` the grammar takes the next line for the command
            if words[0].text in (b"source", b".") or assignment.end_point.row < words[0].start_point.row:
                self._assign(assignment, conditional)
        if words[0].text in (b"source", b"."):
            self._source(self._value(words[1]) if words[1:] else "")
        elif b"train" in _bytes(command).lower():
            self._note_launch(words)

    def _note_launch(self, command: Sequence[Node]) -> None:
        """Keeps the words after train.py; reads a command inside a word, as in `bash -c`."""
        self.met = {}
        words = [word for node in _joined(command) for word in self._expand(node)]
        for index, word in enumerate(words):
            name = word.rpartition("/")[2]
            if name in PROGRAMS:
                if self.launch is not None:
                    self.notes.append("the script runs training more than once; this is the last command")
                self.launch = Launch(name, tuple(words[index + 1 :]), tuple(self.met))
                return
            if any(f"{each} " in word for each in PROGRAMS):
                self.read(word)
                return

    def _assign(self, node: Node, conditional: bool) -> None:
        name, value = _text(node.child_by_field_name("name")), node.child_by_field_name("value")
        append, is_array = b"+=" in [child.text for child in node.children], value is not None and value.type == "array"
        self.met = {}
        if value is None:
            words = [""]
        elif is_array:
            items = _joined(child for child in value.named_children if child.type != "comment")
            words = [word for item in items for word in self._expand(item)]
        else:
            words = ["".join(self._expand(value, split=False))]
        known = self.variables.get(name)
        if conditional:
            is_certain = known is not None and not _is_open(known) and not self.doubts[name]
            if (is_certain and not append) or (known is not None and _is_open(words)):
                return
            self.met = {f"{name} is set under a condition; {legible(' '.join(words))[:80]!r} is taken": None}
        if append and known is not None:
            words = [*known, *words] if is_array else ["".join(known + words)]
            self.met |= self.doubts[name]
        self.variables[name], self.doubts[name] = words, self.met

    def _source(self, name: str) -> None:
        path = self._find(name)
        if path is None:
            self.notes.append(f"the sourced file {legible(name)[:80]!r} is not found; what it sets is missing")
        elif path.resolve() not in self.files:
            if len(self.files) > MAX_FILES:
                raise ValueError(f"the script sources more than {MAX_FILES} files.")
            self.files.add(path.resolve())
            text, directory = _text_of(path), self.directory
            self.directory = path.parent
            self.read(text)
            self.directory = directory

    def _find(self, name: str) -> Path | None:
        """The sourced file where the script says, or in slime's scripts/models next to or above the script."""
        paths = [] if _is_open([name]) else [self.directory / name]
        if "models/" in name:
            tail = name[name.rindex("models/") :]
            above = (self.directory, *self.directory.parents[:3])
            paths += [each / folder / tail for each in above for folder in ("", "scripts")]
        return next((path for path in paths if os.path.exists(path)), None)

    def _value(self, node: Node) -> str:
        """The text that a word expands to."""
        return "".join(self._expand(node, split=False))

    def _expand(self, node: Node, *, split: bool = True) -> list[str]:
        """The words that bash makes of a node; none for an unquoted variable that is empty."""
        words: list[str] = []
        is_open = False
        for values in self._pieces(node, split):
            for number, value in enumerate(values):
                if number or not is_open:
                    words.append("")
                words[-1] += value
                is_open = True
        return words

    def _pieces(self, node: Node, split: bool) -> Iterator[list[str]]:
        """The values of a word's pieces; the first value of a piece continues the current word."""
        if node.type in SUBSTITUTIONS:
            values = self._substitute(node)
            yield " ".join(values).split() if split else [" ".join(values)]
        elif node.type == "string":
            whole = WHOLE_VARIABLE.fullmatch(_text(node))
            if whole and (whole[2] or (whole[1].endswith("ARGS") and whole[1] not in self.variables)):
                values = self._look_up(whole[1], every=True)
                yield values if split else [" ".join(values)]
            else:
                yield ["".join(self._quoted(node))]
        elif node.type in ("raw_string", "ansi_c_string"):
            yield [_text(node).removeprefix("$")[1:-1]]
        elif node.named_child_count:
            for child in node.named_children:
                yield from self._pieces(child, split)
        else:
            yield [re.sub(r"\\(\n)?(.?)", r"\2", _text(node), flags=re.DOTALL)]

    def _quoted(self, node: Node) -> Iterator[str]:
        """The text between double quotes, expanded; blanks between two expansions are no nodes."""
        text, start = _bytes(node), 1
        for child in [child for child in node.children if child.type in SUBSTITUTIONS]:
            yield _unescaped(text[start : child.start_byte - node.start_byte])
            yield " ".join(self._substitute(child))
            start = child.end_byte - node.start_byte
        yield _unescaped(text[start:-1])

    def _substitute(self, node: Node) -> list[str]:
        """The value of an expansion; the directory for an idiom of the script's own, else the mark of an output."""
        text = _text(node)
        if node.type == "simple_expansion":
            return self._look_up(text[1:])
        if node.type == "expansion":
            return self._parameter(node, text[2:-1])
        body = text[2:-1].strip()
        directory = OWN_DIRECTORY.fullmatch(body)
        if directory:
            return [self._value(_in_quotes(directory[1].encode()))]
        is_own = body.startswith("dirname ") and SCRIPT_ITSELF.search(body)
        return [str(self.directory) if is_own else OUTPUT]

    def _parameter(self, node: Node, inner: str) -> list[str]:
        """The value of ${...}: a variable or an array, or either with a default."""
        match = PARAMETER.fullmatch(inner)
        if match is None:  # ${#X}, ${X%Y}, ${!X}, ${X[1]}
            return [OUTPUT]
        name, index, operator = match.groups()
        value = self.variables.get(name)
        is_set = value is not None and not ((operator or "").startswith(":") and value in ([], [""]))
        alternatives = node.named_children[1:]
        if operator and operator[-1] == "+":
            return [word for each in alternatives for word in self._expand(each)] if is_set else []
        if operator and operator[-1] in "-=" and not is_set:
            return ["".join(word for each in alternatives for word in self._expand(each, split=False))]
        return self._look_up(name, every=index is not None)

    def _look_up(self, name: str, *, every: bool = False) -> list[str]:
        """The words of a variable, or without `every` its first word. An unset array is uncertain and no word."""
        if name not in self.variables:
            if not every and not name.endswith("ARGS"):
                return [f"{UNSET}{name}{END}"]
            self.met[f"{name} is unset and expands to nothing"] = None
            return []
        self.met |= self.doubts[name]
        values = self.variables[name][: None if every else 1]
        self.expanded += sum(map(len, values)) + len(values)
        if self.expanded > MAX_EXPANDED_CHARACTERS:
            raise ValueError(f"the script's variables expand to more than {MAX_EXPANDED_CHARACTERS} characters.")
        return values


def _is_open(words: list[str]) -> bool:
    return any(UNSET in word for word in words)


def _error_row(node: Node) -> int:
    """The row of the first part of the script that is not bash."""
    broken = next((child for child in node.children if child.has_error), None)
    return node.start_point[0] if node.is_error or broken is None else _error_row(broken)


def _joined(nodes: Iterable[Node]) -> list[Node]:
    """The words of a command or an array; the grammar divides some words with several variables."""
    groups: list[list[Node]] = []
    for node in nodes:
        if groups and groups[-1][-1].end_byte == node.start_byte:
            groups[-1].append(node)
        else:
            groups.append([node])
    return [group[0] if len(group) == 1 else _in_quotes(b"".join(map(_bytes, group))) for group in groups]


def _in_quotes(text: bytes) -> Node:
    return BASH.parse(b'"' + text.replace(b'"', b"") + b'"').root_node


def _bytes(node: Node | None) -> bytes:
    return (node and node.text) or b""


def _text(node: Node | None) -> str:
    return _bytes(node).decode()


def _unescaped(quoted: bytes) -> str:
    return re.sub(r'\\(?:\n|([\\$`"]))', r"\1", quoted.decode())
