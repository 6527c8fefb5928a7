"""Reads the training command out of a bash launch script; executes nothing.

tree-sitter parses the script. `LaunchScript` follows assignments (`=`, `+=`, arrays), `source`,
`$X`, `${X}`, `${X[@]}`, `${X:-default}`, `$((A * 2))`, and idioms for the directory of the script.
Any other expansion becomes a mark that contains its source text.

An assignment under a condition or in a loop counts if the variable has no other value. If the
command depends on such an assignment, a note names the variable.
"""

import ast
import operator
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
"""Operators that `_calculated` knows, by their classes in Python's grammar."""
PROGRAMS = ("train.py", "train_async.py")
VERL = ("verl.trainer.main_ppo", "main_ppo.py")
"""verl's program, as a module and as a file."""
TRL_COMMANDS = ("grpo", "rloo")
"""Commands of `trl` that sample."""
TRL_FLAGS = ("--use_vllm", "--use-vllm")
"""Flags that tell a user's program with TRL's options from others."""
TRAINING = re.compile(r"train|main_ppo|trl|\.py\b", re.IGNORECASE)
"""In all commands that run one of these programs; their flags may be in variables."""

# Marks in expanded text. `text_of` removes these characters from scripts.
OPEN = "\ue000"
"""Begins the source text of an unknown value."""
CLOSE = "\ue001"
"""Ends it."""
BREAK = "\ue002"
"""Divides words."""
QUOTE = "\ue003"
"""Begins quoted text, which is a word even if it is empty."""

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
# $X. Escapes and single quotes come first, because nothing is expanded in them.
UNBRACED = re.compile(rf"\\.|'[^']*'|\$({NAME})", re.DOTALL)
# ${X}, ${X[@]}, ${X:-default}
PARAMETER = re.compile(rf"\$\{{({NAME})(\[[@*]\])?(:-.*)?\}}", re.DOTALL)
# "$(dirname -- "${BASH_SOURCE[0]}")", and around it "$(cd -- … &>/dev/null && pwd)".
OWN_DIRECTORY = re.compile(r"\$\(dirname [^)]*(?:BASH_SOURCE|\$0|\$\{0\})")
CHANGED_DIRECTORY = re.compile(r"\$\(cd (?:-- )?([^&]*)(?:&>/dev/null *)?&& pwd\)")
# An export, or a key of the JSON that `ray job submit --runtime-env-json` takes.
PYTHON_PATH = re.compile(r"""^[^#\n]*PYTHONPATH[\\"' ]*[:=][\\"' ]*([^\s"'\\]+)""", re.MULTILINE)
# "${X[@]}"
WHOLE_ARRAY = re.compile(rf'"\$\{{{NAME}\[@\]\}}"')
# A mark belongs to the word around it, even if its source text has blanks.
WORD = re.compile(f"(?:{OPEN}[^{CLOSE}]*{CLOSE}|[^{OPEN}\\s])+")
UNKNOWN = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
UNSET_VARIABLE = re.compile(rf"{OPEN}\$\{{({NAME})\}}{CLOSE}")
# slime's scripts name groups of flags MODEL_ARGS, CKPT_ARGS, EVAL_ARGS, …
UNSET_ARRAY = re.compile(rf"{OPEN}\$\{{(\w*ARGS|\w+(?=\[))(?:\[[@*]\])?\}}{CLOSE}")
# An entry of PYTHONPATH without other expansions than variables. Megatron-LM is left out, because
# pyproject.toml pins megatron-core.
ENTRY = re.compile(rf"(?!.*(?:Megatron-LM|PYTHONPATH))(?:[\w./~@+,=-]|{UNSET_VARIABLE.pattern})+")
# Functions and loops count as conditions: the script may not run them.
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
    """The script and the sourced files; each is read once."""
    program: str = ""
    """train.py, train_async.py, verl or trl; empty before a training command was read."""
    program_file: str = ""
    """The word that names the program, such as grpo.py."""
    launcher: list[str] = field(default_factory=list)
    """The words before the program, such as those of accelerate."""
    words: list[str] = field(default_factory=list)
    """The expanded words after the program, with marks for unknown values."""
    notes: dict[str, None] = field(default_factory=dict)
    """Parts of the script that were not read, and uncertain values; a set that keeps the order."""
    python_path: list[str] = field(default_factory=list)
    """Known entries of the script's PYTHONPATH, without Megatron-LM."""
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Words by variable; one word for a variable that is not an array."""
    uncertain: dict[str, set[str]] = field(default_factory=dict)
    """By variable: notes on assignments under a condition that its words depend on."""
    doubts: set[str] = field(default_factory=set)
    """Such notes on the words that were expanded last."""
    expanded: int = 0
    """Characters of all expansions so far."""

    def read(self, text: str) -> None:
        """Follows assignments, sourced files and training commands."""
        # The grammar divides words of arrays such as $A:$B, but not ${A}:${B}.
        text = UNBRACED.sub(_braced, text)
        root = BASH.parse(text.encode()).root_node
        if root.has_error:
            broken = next((child for child in root.children if child.has_error), root)
            line = broken.start_point.row + 1
            self.notes[f"line {line} and what follows it are not understood"] = None
        self._follow(root)
        for match in PYTHON_PATH.finditer(text):
            # A later path replaces an earlier one, as a later assignment does.
            entries = self._value(_in_quotes(match[1])).split(":")
            self.python_path = [entry for entry in dict.fromkeys(entries) if ENTRY.fullmatch(entry)]

    def _follow(self, node: Node, conditional: bool = False) -> None:
        """Follows the assignments and commands in a node, in their order."""
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
        children = [child for child in command.named_children if child.type != "comment"]
        assignments = [child for child in children if child.type == "variable_assignment"]
        words = [child for child in children if child.type != "variable_assignment"]
        for redirect in node.named_children:
            # The grammar takes words after `> FILE` for further destinations.
            words += redirect.children_by_field_name("destination")[1:]
        is_source = bool(words) and words[0].text in (b"source", b".")
        for assignment in assignments:
            # Before a program, an assignment is for this program only. But the grammar takes the
            # line after `A=1 B=2` for the program, so the line of the assignment decides.
            is_earlier = bool(words) and assignment.end_point.row < words[0].start_point.row
            if is_source or is_earlier:
                self._assign(assignment, conditional)
        if is_source:
            # Words after the file are its arguments; `source` without a file is an empty name.
            self._source("".join(map(self._value, words[1:2])))
        elif TRAINING.search(_text(command)):
            expanded: list[str] = []
            doubts: list[tuple[int, set[str]]] = []
            for word in words:
                self.doubts = set()
                expanded += self._words([word])
                doubts.append((len(expanded), self.doubts))
            self._read_command(expanded, doubts)

    def _read_command(self, words: list[str], doubts: Sequence[tuple[int, set[str]]]) -> None:
        """Keeps the words after the program; reads a command inside a word, as in `bash -c`.

        `doubts` has the number of `words` up to each word of the script, and the doubts about it.
        """
        index = _program_index(words)
        if index is not None:
            if self.program:
                self.notes["the script runs training more than once; this is the last command"] = (
                    None
                )
            self._note_doubts(doubts, index)
            self.program = _program(words, index)
            self.program_file = words[index]
            self.launcher = words[:index]
            self.words = []
            for flag in words[index + 1 :]:
                self._keep(flag)
            return
        for position, word in enumerate(words):
            if any(f"{program} " in UNKNOWN.sub("", word) for program in (*PROGRAMS, *VERL)):
                self._note_doubts(doubts, position)
                self.read(legible(word))
                return

    def _note_doubts(self, doubts: Iterable[tuple[int, set[str]]], first: int) -> None:
        """Adds the doubts about words from the position `first` on to the notes."""
        texts: set[str] = set()
        for end, doubts_of_word in doubts:
            if end > first:
                texts |= doubts_of_word
        self.notes |= dict.fromkeys(sorted(texts))

    def _keep(self, word: str) -> None:
        """Keeps a word of the training command, unless it is an array without a value."""
        array = UNSET_ARRAY.fullmatch(word)
        if array is None:
            self.words.append(word)
        elif array[1] != "MODEL_ARGS":  # config.json has the values of MODEL_ARGS
            self.notes[f"{array[1]} is unset and expands to nothing"] = None

    def _assign(self, node: Node, conditional: bool) -> None:
        """Sets a variable, or appends to it.

        Under a condition, a value without marks replaces a value with marks, or is appended. A
        variable without a value takes any.
        """
        name = _text(node.child_by_field_name("name"))
        value = node.child_by_field_name("value")
        self.doubts = set()
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
            text = " ".join(words)
            if known is not None:
                is_taken = OPEN not in text and (append or OPEN in "".join(known))
                if not is_taken:
                    return
            self.doubts.add(f"{name} is set under a condition; {legible(text)[:80]!r} is taken")
        if append and known is not None:
            words = [*known, *words] if is_array else ["".join(known + words)]
            self.doubts |= self.uncertain[name]
        self.variables[name] = words
        self.uncertain[name] = {*self.doubts}

    def _source(self, name: str) -> None:
        """Reads a sourced file, if need be from scripts/models beside or above the script."""
        paths = [self.directory / name]
        if "models/" in name:
            tail = name[name.rindex("models/") :]
            for folder in (self.directory, *self.directory.parents[:3]):
                paths += [folder / tail, folder / "scripts" / tail]
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
            self.read(text_of(path))
            self.directory = outer

    def _words(self, nodes: Iterable[Node]) -> list[str]:
        """The words that bash makes of nodes; none for an unquoted variable that is empty."""
        expanded = BREAK.join(self._expand(node) for node in nodes if node.type != "comment")
        return [word.replace(QUOTE, "") for word in expanded.split(BREAK) if word]

    def _value(self, node: Node) -> str:
        """The text that an assigned word expands to."""
        return self._expand(node, split=False).replace(BREAK, " ").replace(QUOTE, "")

    def _expand(self, node: Node, split: bool = True) -> str:
        """The expanded text, with BREAK between words and QUOTE before quoted text.

        Args:
            node: A word, a part of a word, or a string.
            split: Whether blanks in values divide words, as they do outside of assignments.
        """
        text = _text(node)
        if node.type.endswith(SUBSTITUTIONS):
            value = " ".join(self._substitute(node))
            return BREAK.join(WORD.findall(value)) if split else value
        if node.type == "string":
            if WHOLE_ARRAY.fullmatch(text):
                # "${X[@]}" is a word for each word of the array
                words = self._substitute(node.named_children[0])
                return BREAK.join(QUOTE + word for word in words)
            return QUOTE + "".join(self._between_quotes(node))
        if node.type in ("raw_string", "ansi_c_string"):
            return QUOTE + text.removeprefix("$")[1:-1]
        if node.named_child_count:
            return "".join(self._expand(child, split) for child in node.named_children)
        # A backslash quotes the next character, and joins lines at the end of a line.
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
                if child.type != '"':
                    yield " ".join(self._substitute(child))
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
                self.doubts |= self.uncertain[name]
                # Of an array, $X and ${X} are the first word.
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
        if OWN_DIRECTORY.match(text):
            return [str(self.directory)]
        return [f"{OPEN}{text}{CLOSE}"]

    def _number(self, text: str) -> int | None:
        """The value of `$((…))` of integers and known variables; None for anything else."""

        def known(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            self.doubts |= self.uncertain.get(name, set())
            return " ".join(self.variables.get(name, ["?"]))

        expression = re.sub(rf"\$\{{({NAME})\}}|({NAME})", known, text[3:-2])
        if len(expression) > MAX_EXPRESSION or not re.fullmatch(r"[\d\s()+*/%-]+", expression):
            return None
        try:
            # `ast` only parses; `_calculated` knows a few operators.
            return _calculated(ast.parse(expression.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


def _calculated(node: ast.AST) -> int:
    """The value of an expression of integers. Division truncates, as in bash."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if not isinstance(node, ast.BinOp) or type(node.op) not in ARITHMETIC:
        raise ValueError("not arithmetic that is followed")
    operation = ARITHMETIC[type(node.op)]
    value: int = operation(_calculated(node.left), _calculated(node.right))
    if not 0 <= value <= MAX_NUMBER:
        raise ValueError("a number that no flag has")
    return value


def read_launch(path: str | Path) -> LaunchScript:
    """Returns a script with its last command that trains with slime, vime, verl or TRL."""
    path = Path(path)
    script = LaunchScript(path.parent.absolute(), files={path.resolve()})
    try:
        script.read(text_of(path))
    except RecursionError:
        raise ValueError(f"{str(path)!r} nests its commands too deeply to be read.") from None
    if not script.program:
        broken = "".join(f" ({note})" for note in script.notes if note.startswith("line "))
        raise ValueError(
            f"{str(path)!r} has no command that runs train.py{broken}, verl or TRL; give a launch"
            " script."
        )
    return script


def _braced(match: re.Match[str]) -> str:
    """A match of `UNBRACED`: $X becomes ${X}, the others stay."""
    if not match[1]:
        return match[0]
    return f"${{{match[1]}}}"


def _program_index(words: Sequence[str]) -> int | None:
    """The position of the training program in the words of a command; None without one."""
    for index in range(len(words)):
        if _program(words, index):
            return index
    return None


def _program(words: Sequence[str], index: int) -> str:
    """The training program that a word of a command names, or an empty text."""
    name = words[index].rpartition("/")[2]
    if name in TRL_COMMANDS and index > 0 and words[index - 1].rpartition("/")[2] == "trl":
        return "trl"
    if name.endswith(".py") and any(word.partition("=")[0] in TRL_FLAGS for word in words[index:]):
        return "trl"
    if name in VERL:
        return "verl"
    if name in PROGRAMS:
        return name
    return ""


def legible(word: str) -> str:
    """The word with its unknown values as the script writes them."""
    return UNKNOWN.sub(r"\1", word)


def text_of(path: Path) -> str:
    """The text of a script or of a file that it names; raises ValueError if it has none."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} cannot be read: it is not a file; give a launch script.")
    if path.stat().st_size > MAX_SCRIPT_BYTES:
        raise ValueError(
            f"{str(path)!r} is too large; a script has at most {MAX_SCRIPT_BYTES} bytes."
        )
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if "\ufffd" in text:
        raise ValueError(f"{str(path)!r} is not text in UTF-8; give a launch script.")
    return re.sub(f"[{OPEN}-{QUOTE}\0]", "?", text)


def _in_quotes(text: str) -> Node:
    return BASH.parse(b'"' + text.replace('"', "").encode() + b'"').root_node


def _text(node: Node | None) -> str:
    return (node.text if node and node.text else b"").decode()
