"""Reads the training command out of a bash launch script; executes nothing.

Supported: assignments (`=`, `+=`, arrays), `source`, quotes, here-documents, redirections, `$X`, `${X}`, `${X[@]}`,
`${X:-default}` and its relatives, and the script's own directory. The output of other commands and other expansions
become marks in the word. An assignment in a block counts if the variable has no other value, and a note names it.
"""

import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

MAX_SCRIPT_BYTES = 1 << 18
MAX_EXPANDED_CHARACTERS = 1 << 22
"""Characters that all variables of a script expand to, together."""
MAX_FILES, MAX_SOURCE_DEPTH, MAX_NESTING = 16, 4, 20
PROGRAMS = ("train.py", "train_async.py")

UNSET, END, DOUBT = "\ue000", "\ue001", "\ue002"
"""Marks in expanded words: UNSET NAME END for a variable without a value, DOUBT NAME END before a doubtful value."""
OUTPUT = UNSET + END
"""Mark in expanded words for the output of a command."""

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
TOKEN = re.compile(
    rf"""(?P<join>\\\n) | (?P<blank>[^\S\n]+ | (?<![^\s;|&()])\#[^\n]*)
    | (?P<array>{NAME}\+?=\() | (?P<arithmetic>\(\() | (?P<quote>\$?'|["`]|\$[({{])
    | (?P<heredoc><<-?[ \t]*(?!<)['"\\]?(?P<delimiter>[\w.-]+)['"]?)
    | (?P<redirect>(?:\d*|&)(?:<<<|>>|>\||<>|[<>])&?(?P<copied>(?<=&)(?:\d|-))?)
    | (?P<end>[\n;|&()]|\Z) | (?P<word>(?:[^\s\\'"`$();|&<>]+|\\.)+ | [$\\])""",
    re.VERBOSE | re.ASCII,
)
CLOSERS = {"'": "'", "$'": "'", '"': '"', "`": "`", "$(": ")", "${": "}", "(": ")"}
"""The end of a span, by its beginning."""
IN_QUOTES = re.compile(r'\\.|\$[({]|["`]', re.DOTALL)
UNQUOTED = re.compile(r"""\\.|(?<![^\s(;])#[^\n]*|\$?'|\$[({]|["`()}]""", re.DOTALL | re.ASCII)
SINGLE_QUOTED = {"'": re.compile(r"[^']*'"), "$'": re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL)}

PIECE = re.compile(r"""([^\\'"`$]+)|\\(.?)|\$?'|"|`|\$""", re.DOTALL)
QUOTED_PIECE = re.compile(r'((?:[^\\`$]|\\(?![\\$`"\n]))+)|\\(.)|`|\$', re.DOTALL)
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
PARAMETER = re.compile(rf"({NAME})(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
VARIABLE = re.compile(rf"\$({NAME}|[0-9@*#?$!-])")
WHOLE_VARIABLE = re.compile(rf"\$\{{?({NAME})(\[@\])?\}}?")
DOUBTS = re.compile(f"{DOUBT}([^{END}]*){END}")
SCRIPT_ITSELF = re.compile(r"\bBASH_SOURCE\b|\$0|\$\{0\}")
PYTHON_PATH = re.compile(
    rf"""^[^#\n]*PYTHONPATH\\?"?\s*[:=]\s*\\?["']?((?:[^"'\\\s`$]|\$\{{{NAME}\}}|\$(?={NAME}))+)""", re.MULTILINE
)
BLOCK_STARTS = {"if", "for", "while", "until", "case", "select", "{"}
BLOCK_ENDS = {"fi", "done", "esac", "}"}
KEYWORDS = BLOCK_STARTS | BLOCK_ENDS | {"then", "else", "elif", "do", "!", "time", "exec", "nohup", "sudo", "in"}
DECLARATIONS = {"export", "local", "declare", "readonly", "typeset"}


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
    reader.read(_text_of(path), depth=0)
    if not reader.launches:
        raise ValueError(f"{str(path)!r} has no command that runs {' or '.join(PROGRAMS)}; give a slime launch script.")
    if len(reader.launches) > 1:
        reader.notes.append(f"the script runs training {len(reader.launches)} times; this is the last command")
    program, words = reader.launches[-1]
    doubtful = {name for word in words for name in DOUBTS.findall(word)}
    reader.notes += [text for name, text in reader.doubts.items() if name in doubtful]
    sure = [DOUBTS.sub("", word) for word in words]
    words = [new for word, new in zip(words, sure, strict=True) if new or not word]
    entries = [
        each
        for each in dict.fromkeys(reader.python_path.split(":"))
        if each not in ("", f"{UNSET}PYTHONPATH{END}") and "Megatron-LM" not in each
    ]
    return Launch(program, tuple(words), tuple(reader.notes), tuple(entries))


def legible(word: str) -> str:
    """The word with its marks as bash writes them."""
    return re.sub(f"{UNSET}([^{END}]*){END}", lambda mark: f"${{{mark[1]}}}" if mark[1] else "$(...)", word)


def _text_of(path: Path) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{str(path)!r} is not a file; give a slime launch script.")
        if status.st_size > MAX_SCRIPT_BYTES:
            raise ValueError(f"{str(path)!r} has {status.st_size} bytes; a script has at most {MAX_SCRIPT_BYTES}.")
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not text: byte {error.start} is not UTF-8.") from None
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    if "\0" in text:
        raise ValueError(f"{str(path)!r} is not text: it has null bytes.")
    return re.sub(f"[{UNSET}{END}{DOUBT}]", "?", text).replace("\r\n", "\n")


def _commands(text: str) -> Iterator[list[str]]:
    """Yields the simple commands of a script as lists of raw words, with quotes and without redirections."""
    words: list[str] = []
    delimiters: list[str] = []
    word, is_redirected, index = "", False, 0
    while index <= len(text):
        token = TOKEN.match(text, index)
        assert token is not None
        kind, start, index = token.lastgroup, index, token.end() + (not token[0])
        if kind in ("quote", "array", "arithmetic"):
            index = _end_of_span(text, index - 1 if kind == "array" else start)
            word += text[start:index] * (kind != "arithmetic")
            continue
        if kind in ("word", "join"):
            word += token[0] * (kind == "word")
            continue
        if word and not is_redirected:
            words.append(word)
        is_redirected = (is_redirected and not word) if kind == "blank" else False
        is_redirected |= kind == "redirect" and token["copied"] is None
        word = ""
        delimiters += [token["delimiter"]] if kind == "heredoc" else []
        if kind == "end":
            if words:
                yield words
            words = []
        if token[0] == "\n":
            index = _end_of_documents(text, index, delimiters)
            delimiters = []


def _end_of_documents(text: str, index: int, delimiters: list[str]) -> int:
    """Returns the index behind the here-documents that begin at `index`."""
    for delimiter in delimiters:
        end = re.compile(rf"^\t*{re.escape(delimiter)}$", re.MULTILINE).search(text, index)
        index = end.end() if end else len(text)
    return index


def _end_of_span(text: str, start: int) -> int:
    """The index behind the quotes, substitution or parentheses that begin at `start`, in linear time."""
    closers: list[str] = []
    index = start
    while True:
        inner = closers[-1] if closers else ""
        token = (IN_QUOTES if inner in ('"', "`") else UNQUOTED).search(text, index)
        is_quote = token is not None and token[0] in SINGLE_QUOTED
        if token and is_quote:
            token = SINGLE_QUOTED[token[0]].match(text, token.end())
        if token is None or len(closers) > MAX_NESTING:
            line, opener = text.count("\n", 0, start) + 1, text[start : start + 2].strip()
            raise ValueError(f"line {line}: {opener!r} has no end, or spans nest more than {MAX_NESTING} deep.")
        index = token.end()
        if not is_quote and token[0] == inner:
            closers.pop()
        elif not is_quote and token[0] in CLOSERS and (token[0], inner) not in (("(", "}"), ('"', "`")):
            closers.append(CLOSERS[token[0]])
        if not closers:
            return index


@dataclass
class _Reader:
    """Follows the commands of a script, and expands words with the variables set so far."""

    directory: Path
    """Directory of the file that is read."""
    files: set[Path]
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Words by variable; one word for a variable that is not an array."""
    doubts: dict[str, str] = field(default_factory=dict)
    """Notes on variables, for which a mark in their words asks."""
    notes: list[str] = field(default_factory=list)
    launches: list[tuple[str, list[str]]] = field(default_factory=list)
    python_path: str = ""
    expanded: int = 0

    def read(self, text: str, depth: int) -> None:
        """Follows assignments, sourced files and training commands."""
        block = 0
        for words in _commands(text):
            command = list(dropwhile(KEYWORDS.__contains__, words))
            for word in words[: len(words) - len(command)]:
                block = max(0, block + (word in BLOCK_STARTS) - (word in BLOCK_ENDS))
            if command:
                self._follow(command, depth, conditional=block > 0)
        for match in PYTHON_PATH.finditer(text):
            self.python_path = self._value(f'"{match[1]}"')

    def _follow(self, words: list[str], depth: int, conditional: bool) -> None:
        if words[0] in DECLARATIONS:
            words = [word for word in words[1:] if not word.startswith("-")]
        command = list(dropwhile(ASSIGNMENT.fullmatch, words))
        if not command or command[0] in ("source", "."):
            for word in words[: len(words) - len(command)]:
                self._assign(word, conditional)
            if command[1:]:
                self._source(self._value(command[1]), depth)
        elif any("train" in word.lower() for word in command):
            self._note_launch(command, depth)

    def _note_launch(self, command: Iterable[str], depth: int) -> None:
        """Keeps the words after train.py; reads a command inside a word, as in `bash -c`."""
        program, words = "", list[str]()
        for raw in command:
            for word in self._expand(raw):
                name = DOUBTS.sub("", word).rpartition("/")[2]
                if program:
                    words.append(word)
                elif name in PROGRAMS:
                    program = name
                elif any(f"{each} " in word for each in PROGRAMS) and depth < MAX_SOURCE_DEPTH:
                    self.read(word, depth + 1)
                    return
        if program:
            self.launches.append((program, words))

    def _assign(self, word: str, conditional: bool) -> None:
        match = ASSIGNMENT.fullmatch(word)
        assert match is not None
        name, append, value = match.groups()
        is_array = value.startswith("(") and value.endswith(")")
        if is_array:
            words = [each for raws in _commands(value[1:-1]) for raw in raws for each in self._expand(raw)]
        else:
            words = ["".join(self._expand(value, split=False))]
        known = self.variables.get(name)
        if conditional:
            is_certain = known is not None and not any(UNSET in each or DOUBT in each for each in known)
            if (is_certain and not append) or (known is not None and _is_open(words)):
                return
            taken = DOUBTS.sub("", legible(" ".join(words)))[:80]
            self.doubts[name] = f"{name} is set under a condition; {taken!r} is taken"
            words = [f"{DOUBT}{name}{END}{word}" for word in words[:1]] + words[1:]
        if append and known is not None:
            words = [*known, *words] if is_array else ["".join(known + words)]
        self.variables[name] = words

    def _source(self, name: str, depth: int) -> None:
        path = self._find(name)
        if path is None:
            self.notes.append(f"the sourced file {legible(name)[:80]!r} is not found; what it sets is missing")
        elif path.resolve() not in self.files:
            if depth >= MAX_SOURCE_DEPTH or len(self.files) > MAX_FILES:
                raise ValueError(f"the script sources more than {MAX_FILES} files, or deeper than {MAX_SOURCE_DEPTH}.")
            self.files.add(path.resolve())
            text, directory = _text_of(path), self.directory
            self.directory = path.parent
            self.read(text, depth + 1)
            self.directory = directory

    def _find(self, name: str) -> Path | None:
        """The sourced file where the script says, or in slime's scripts/models next to or above the script."""
        places = [] if _is_open([name]) else [self.directory / name]
        if "models/" in name:
            tail = name[name.rindex("models/") :]
            above = (self.directory, *self.directory.parents[:3])
            places += [each / folder / tail for each in above for folder in ("", "scripts")]
        for place in places if name else ():
            try:
                if place.exists():
                    return place
            except (OSError, ValueError):
                continue
        return None

    def _value(self, raw: str) -> str:
        """The text that a raw word expands to."""
        return DOUBTS.sub("", "".join(self._expand(raw, split=False)))

    def _expand(self, raw: str, *, split: bool = True) -> list[str]:
        """The words that bash makes of a raw word; none for an unquoted variable that is empty."""
        words: list[list[str]] = []
        is_open = False
        for values in self._pieces(raw, split):
            for number, value in enumerate(values):
                if number or not is_open:
                    words.append([])
                words[-1].append(value)
                is_open = True
        return ["".join(parts) for parts in words]

    def _pieces(self, raw: str, split: bool) -> Iterator[list[str]]:
        """The values of a word's pieces; the first value of a piece continues the current word."""
        index = 0
        while index < len(raw):
            piece = PIECE.match(raw, index)
            assert piece is not None
            start, index = index, piece.end()
            if piece[1] or piece[0][0] == "\\":
                yield [piece[1] or piece[2]]
            elif piece[0][-1] == "'":
                index = _end_of_span(raw, start)
                yield [raw[piece.end() : index - 1]]
            elif piece[0] == '"':
                index = _end_of_span(raw, start)
                inner = raw[start + 1 : index - 1]
                whole = WHOLE_VARIABLE.fullmatch(inner)
                if whole and (whole[2] or (whole[1].endswith("ARGS") and whole[1] not in self.variables)):
                    values = self._look_up(whole[1], every=True)
                    yield values if split else [" ".join(values)]
                else:
                    yield ["".join(self._quoted(inner))]
            else:
                values, index = self._substitute(raw, start)
                yield " ".join(values).split() if split else [" ".join(values)]

    def _quoted(self, inner: str) -> Iterator[str]:
        """The text between double quotes, expanded."""
        index = 0
        while index < len(inner):
            piece = QUOTED_PIECE.match(inner, index)
            assert piece is not None
            if piece[1] or piece[2]:
                index = piece.end()
                yield piece[1] or piece[2].strip("\n")
            else:
                values, index = self._substitute(inner, index)
                yield " ".join(values)

    def _substitute(self, text: str, start: int) -> tuple[list[str], int]:
        """The value of the substitution that a `$` or a backquote begins, and the index behind it."""
        if text[start] == "`" or text.startswith(("$(", "${"), start):
            end = _end_of_span(text, start)
            is_parameter = text.startswith("${", start)
            return self._parameter(text[start + 2 : end - 1]) if is_parameter else self._run(text[start:end]), end
        match = VARIABLE.match(text, start)
        return (["$"], start + 1) if match is None else (self._look_up(match[1]), match.end())

    def _run(self, command: str) -> list[str]:
        """The directory if the command is an idiom for the script's own, else the mark of a command's output."""
        body = command[2:-1].strip()
        if body.startswith("cd ") and body.endswith("&& pwd"):
            return [self._value(body[3:-6].removeprefix("-- ").replace("&>/dev/null", "").strip())]
        is_own = body.startswith("dirname ") and SCRIPT_ITSELF.search(body)
        return [str(self.directory) if is_own else OUTPUT]

    def _parameter(self, inner: str) -> list[str]:
        """The value of ${...}: a variable or an array, or either with a default."""
        match = PARAMETER.fullmatch(inner)
        if match is None:  # ${#X}, ${X%Y}, ${!X}, ${X[1]}
            return [OUTPUT]
        name, index, operator, alternative = match.groups()
        value = self.variables.get(name)
        is_set = value is not None and not ((operator or "").startswith(":") and value in ([], [""]))
        if operator and operator[-1] == "+":
            return self._expand(alternative) if is_set else []
        if operator and operator[-1] in "-=" and not is_set:
            return [" ".join(self._expand(alternative, split=False))]
        return self._look_up(name, every=index is not None)

    def _look_up(self, name: str, *, every: bool = False) -> list[str]:
        """The words of a variable, or without `every` its first word. An unset array is a doubt and no word."""
        if name not in self.variables and (every or name.endswith("ARGS")):
            self.doubts[name] = f"{name} is unset and expands to nothing"
            return [f"{DOUBT}{name}{END}"]
        if name not in self.variables:
            return [f"{UNSET}{name}{END}"]
        values = self.variables.get(name, [])[: None if every else 1]
        self.expanded += sum(map(len, values)) + len(values)
        if self.expanded > MAX_EXPANDED_CHARACTERS:
            raise ValueError(f"the script's variables expand to more than {MAX_EXPANDED_CHARACTERS} characters.")
        return values


def _is_open(words: list[str]) -> bool:
    return any(UNSET in word for word in words)
