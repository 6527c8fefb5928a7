"""Reads the training command out of a bash launch script; executes nothing.

tree-sitter parses the script. Followed are assignments (`=`, `+=`, arrays), `source`, `$X`, `${X}`,
`${X[@]}`, `${X:-default}`, `$((A * 2))`, and the script's own directory. Other expansions become
marks that carry their source text. An assignment in a block counts if the variable has no other
value; a note names it if the command depends on it.
"""

import ast
import operator
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

MAX_SCRIPT_BYTES = 1 << 18
MAX_EXPANDED_CHARACTERS = 1 << 22
"""Characters that all variables of a script expand to, together."""
MAX_FILES = 16
MAX_SHOWN = 80
"""Characters of a path in a note."""
MAX_EXPRESSION = 200
"""Characters of an arithmetic expansion."""
MAX_NUMBER = 1 << 53
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
"""Operators in `$((…))` that are calculated, by Python's names."""
PROGRAMS = ("train.py", "train_async.py")

# Marks in expanded text. `_text_of` removes these characters from scripts.
OPEN = "\ue000"
"""Begins the source text of an unknown value."""
CLOSE = "\ue001"
"""Ends it."""
BREAK = "\ue002"
"""Divides words."""
QUOTE = "\ue003"
"""Begins quoted text, which is a word even if it is empty."""

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
UNBRACED = re.compile(rf"\\.|'[^']*'|\$({NAME})", re.DOTALL)
PARAMETER = re.compile(rf"\$\{{({NAME})(\[[@*]\])?(:-.*)?\}}", re.DOTALL)
OWN_DIRECTORY = re.compile(r"\$\(dirname [^)]*(?:BASH_SOURCE|\$0|\$\{0\})")
CHANGED_DIRECTORY = re.compile(r"\$\(cd (?:-- )?([^&]*)(?:&>/dev/null *)?&& pwd\)")
PYTHON_PATH = re.compile(r"""^[^#\n]*PYTHONPATH[\\"' ]*[:=][\\"' ]*([^\s"'\\]+)""", re.MULTILINE)
WHOLE_ARRAY = re.compile(rf'"\$\{{{NAME}\[@\]\}}"')
WORD = re.compile(f"(?:{OPEN}[^{CLOSE}]*{CLOSE}|[^{OPEN}\\s])+")
UNKNOWN = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
UNSET_VARIABLE = re.compile(rf"{OPEN}\$\{{({NAME})\}}{CLOSE}")
UNSET_ARRAY = re.compile(rf"{OPEN}\$\{{(\w*ARGS|\w+(?=\[))(?:\[[@*]\])?\}}{CLOSE}")
ENTRY = re.compile(rf"(?!.*(?:Megatron-LM|PYTHONPATH))(?:[\w./~@+,=-]|{UNSET_VARIABLE.pattern})+")
BLOCKS = ("if_statement", "case_statement", "compound_statement", "do_group")
SUBSTITUTIONS = ("expansion", "_substitution")
"""Ends of the types of nodes that bash replaces by a value."""
BASH = Parser(Language(tree_sitter_bash.language()))


@dataclass
class LaunchScript:
    """A script whose commands are followed, with the training command that was read last."""

    directory: Path
    """Directory of the file that is read."""
    files: set[Path]
    program: str = ""
    """train.py or train_async.py; empty before a training command was read."""
    words: list[str] = field(default_factory=list)
    """The expanded words after the program, with marks for unknown values."""
    notes: dict[str, None] = field(default_factory=dict)
    """Parts of the script that were not read, and uncertain values."""
    python_path: list[str] = field(default_factory=list)
    """Known entries of the script's PYTHONPATH, without Megatron-LM."""
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Words by variable; one word for a variable that is not an array."""
    uncertain: dict[str, set[str]] = field(default_factory=dict)
    """Notes on the assignments under a condition that the words of a variable depend on."""
    met: set[str] = field(default_factory=set)
    """Such notes on the words that were expanded last."""
    expanded: int = 0

    def read(self, text: str) -> None:
        """Follows assignments, sourced files and training commands."""
        # The grammar divides words of arrays such as $A:$B, but not ${A}:${B}.
        text = UNBRACED.sub(lambda match: f"${{{match[1]}}}" if match[1] else match[0], text)
        root = BASH.parse(text.encode()).root_node
        if root.has_error:
            row = next((child for child in root.children if child.has_error), root).start_point.row
            self.notes[f"line {row + 1} and what follows it are not understood"] = None
        self._follow(root)
        for match in PYTHON_PATH.finditer(text):
            entries = dict.fromkeys(self._value(_in_quotes(match[1])).split(":"))
            self.python_path = [each for each in entries if ENTRY.fullmatch(each)]

    def _follow(self, node: Node, conditional: bool = False) -> None:
        if node.type == "variable_assignment":
            self._assign(node, conditional)
        elif node.type == "command" or (
            node.type == "redirected_statement" and node.children[0].type == "command"
        ):
            self._run(node, conditional)
        elif node.type not in ("string", "command_substitution"):
            for child in node.named_children:
                self._follow(child, conditional or node.type in BLOCKS)

    def _run(self, node: Node, conditional: bool) -> None:
        """Reads a sourced file, or keeps the words after train.py."""
        command = node if node.type == "command" else node.children[0]
        assignments = [
            child for child in command.named_children if child.type == "variable_assignment"
        ]
        words = [
            child
            for child in command.named_children
            if child.type not in ("variable_assignment", "comment")
        ]
        for redirect in node.named_children:  # may take later words for destinations
            words += redirect.children_by_field_name("destination")[1:]
        is_source = bool(words) and words[0].text in (b"source", b".")
        for each in assignments:  # of `A=1 B=2` the grammar takes the next line for the command
            if is_source or (words and each.end_point.row < words[0].start_point.row):
                self._assign(each, conditional)
        if is_source:
            self._source(self._value(words[1]) if words[1:] else "")
        elif "train" in _text(command).lower():
            expanded: list[str] = []
            for each in words:
                if not any(_program(word) for word in expanded):
                    self.met = set()
                expanded += self._words([each])
            self._read_command(expanded)

    def _read_command(self, words: list[str]) -> None:
        """Keeps the words after train.py; reads a command inside a word, as in `bash -c`."""
        met = dict.fromkeys(sorted(self.met))
        for index, word in enumerate(words):
            if name := _program(word):
                if self.program:
                    self.notes[
                        "the script runs training more than once; this is the last command"
                    ] = None
                self.notes |= met
                self.program = name
                self.words = []
                for each in words[index + 1 :]:
                    array = UNSET_ARRAY.fullmatch(each)
                    if array and array[1] == "MODEL_ARGS":
                        continue  # config.json has their values
                    if array:
                        self.notes[f"{array[1]} is unset and expands to nothing"] = None
                    else:
                        self.words.append(each)
                return
            if any(f"{each} " in UNKNOWN.sub("", word) for each in PROGRAMS):
                self.notes |= met
                self.read(legible(word))
                return

    def _assign(self, node: Node, conditional: bool) -> None:
        name = _text(node.child_by_field_name("name"))
        value = node.child_by_field_name("value")
        self.met = set()
        append = node.children[1].type == "+="
        is_array = value is not None and value.type == "array"
        if value is None:
            words = [""]
        elif is_array:
            words = self._words(value.named_children)
        else:
            words = [self._value(value)]
        known = self.variables.get(name)
        if conditional:
            if known is not None and (
                OPEN in "".join(words) or not (append or OPEN in "".join(known))
            ):
                return
            self.met.add(
                f"{name} is set under a condition; {legible(' '.join(words))[:80]!r} is taken"
            )
        if append and known is not None:
            words = [*known, *words] if is_array else ["".join(known + words)]
            self.met |= self.uncertain[name]
        self.variables[name] = words
        self.uncertain[name] = {*self.met}

    def _source(self, name: str) -> None:
        """Reads a sourced file, if need be from scripts/models beside or above the script."""
        paths = [self.directory / name]
        if "models/" in name:
            tail = name[name.rindex("models/") :]
            above = (self.directory, *self.directory.parents[:3])
            paths += [each / folder / tail for each in above for folder in ("", "scripts")]
        path = next((path for path in paths if os.path.exists(path)), None)
        if path is None:
            shown = legible(name)
            if len(shown) > MAX_SHOWN:  # the end of a path tells files apart
                shown = f"…{shown[-MAX_SHOWN:]}"
            self.notes[f"the sourced file {shown!r} is not found; what it sets is missing"] = None
        elif path.resolve() not in self.files:
            if len(self.files) > MAX_FILES:
                raise ValueError(f"the script sources more than {MAX_FILES} files.")
            self.files.add(path.resolve())
            outer = self.directory
            self.directory = path.parent
            self.read(_text_of(path))
            self.directory = outer

    def _words(self, nodes: Iterable[Node]) -> list[str]:
        """The words that bash makes of nodes; none for an unquoted variable that is empty."""
        expanded = BREAK.join(self._expand(node) for node in nodes if node.type != "comment")
        return [word.replace(QUOTE, "") for word in expanded.split(BREAK) if word]

    def _value(self, node: Node) -> str:
        """The text that an assigned word expands to."""
        return self._expand(node, split=False).replace(BREAK, " ").replace(QUOTE, "")

    def _expand(self, node: Node, split: bool = True) -> str:
        """The expanded text, with BREAK between words and QUOTE before quoted text."""
        text = _text(node)
        if node.type.endswith(SUBSTITUTIONS):
            value = " ".join(self._substitute(node))
            return BREAK.join(WORD.findall(value)) if split else value
        if node.type == "string":
            if WHOLE_ARRAY.fullmatch(text):
                return BREAK.join(
                    QUOTE + value for value in self._substitute(node.named_children[0])
                )
            return QUOTE + "".join(self._between_quotes(node))
        if node.type in ("raw_string", "ansi_c_string"):
            return QUOTE + text.removeprefix("$")[1:-1]
        if node.named_child_count:
            return "".join(self._expand(child, split) for child in node.named_children)
        return re.sub(r"\\(\n)?(.?)", r"\2", text, flags=re.DOTALL)

    def _between_quotes(self, node: Node) -> Iterator[str]:
        """Yields the expanded parts of a string. The grammar may put blanks into the next node."""
        text = _text(node).encode()
        start = 1  # after the opening quote
        for child in node.children[1:]:  # the last is the closing quote
            if child.type == '"' or child.type.endswith(SUBSTITUTIONS):
                end = child.end_byte - node.start_byte
                between = text[start : end - len(_text(child).lstrip().encode())].decode()
                yield re.sub(r'\\(?:\n|([\\$`"]))', r"\1", between)
                yield "" if child.type == '"' else " ".join(self._substitute(child))
                start = end

    def _substitute(self, node: Node) -> list[str]:
        """The words of a variable or default, the script's directory for its idioms, or a mark."""
        text = _text(node).lstrip()
        if node.type == "simple_expansion":
            text = f"${{{text[1:]}}}"
        if parameter := PARAMETER.fullmatch(text):
            name, index, default = parameter.groups()
            values = self.variables.get(name)
            if default and values in (None, [], [""]):
                return ["".join(map(self._value, node.named_children[1:]))]
            if values is not None:
                self.met |= self.uncertain[name]
                values = values if index else values[:1]
                self.expanded += sum(map(len, values)) + len(values)
                if self.expanded > MAX_EXPANDED_CHARACTERS:
                    raise ValueError(
                        f"its variables expand to more than {MAX_EXPANDED_CHARACTERS} characters."
                    )
                return values
        if node.type == "arithmetic_expansion":
            number = self._number(text)
            if number is not None:
                return [str(number)]
        if directory := CHANGED_DIRECTORY.fullmatch(text):
            return [self._value(_in_quotes(directory[1].strip()))]
        return [str(self.directory) if OWN_DIRECTORY.match(text) else f"{OPEN}{text}{CLOSE}"]

    def _number(self, text: str) -> int | None:
        """The value of `$((…))` with whole numbers and known variables; None for anything else."""

        def known(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            self.met |= self.uncertain.get(name, set())
            return " ".join(self.variables.get(name, ["?"]))

        expression = re.sub(rf"\$\{{({NAME})\}}|({NAME})", known, text[3:-2])
        if len(expression) > MAX_EXPRESSION or not re.fullmatch(r"[\d\s()+*/%-]+", expression):
            return None
        try:
            return _calculated(ast.parse(expression.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


def _calculated(node: ast.AST) -> int:
    """The value of an expression of whole numbers. Division truncates, as in bash."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    operation = ARITHMETIC.get(type(node.op)) if isinstance(node, ast.BinOp) else None
    if not isinstance(node, ast.BinOp) or operation is None:
        raise ValueError("not arithmetic that is followed")
    value: int = operation(_calculated(node.left), _calculated(node.right))
    if not 0 <= value <= MAX_NUMBER:
        raise ValueError("a number that no flag has")
    return value


def read_launch(path: str | Path) -> LaunchScript:
    """Returns a script with its last command that runs train.py or train_async.py."""
    path = Path(path)
    if path.suffix == ".py":
        raise ValueError(
            f"{str(path)!r} is a Python program; write `python train.py FLAGS` into a file for"
            " port."
        )
    script = LaunchScript(path.parent.absolute(), files={path.resolve()})
    try:
        script.read(_text_of(path))
    except RecursionError:
        raise ValueError(f"{str(path)!r} nests its commands too deeply to be read.") from None
    if not script.program:
        broken = "".join(f" ({note})" for note in script.notes if note.startswith("line "))
        raise ValueError(
            f"{str(path)!r} has no command that runs train.py{broken}; give a slime launch script."
        )
    return script


def _program(word: str) -> str:
    """The name of a training program that a word runs, or an empty text."""
    name = word.rpartition("/")[2]
    return name if name in PROGRAMS else ""


def legible(word: str) -> str:
    """The word with its unknown values as the script writes them."""
    return UNKNOWN.sub(r"\1", word)


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise ValueError(
            f"{str(path)!r} cannot be read: it is not a file; give a slime launch script."
        )
    if path.stat().st_size > MAX_SCRIPT_BYTES:
        raise ValueError(
            f"{str(path)!r} is too large; a script has at most {MAX_SCRIPT_BYTES} bytes."
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    if "\ufffd" in text:
        raise ValueError(f"{str(path)!r} is not text in UTF-8; give a slime launch script.")
    return re.sub(f"[{OPEN}-{QUOTE}\0]", "?", text)


def _in_quotes(text: str) -> Node:
    return BASH.parse(b'"' + text.replace('"', "").encode() + b'"').root_node


def _text(node: Node | None) -> str:
    return (node.text if node and node.text else b"").decode()
