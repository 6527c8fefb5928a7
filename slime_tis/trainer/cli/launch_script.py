"""Reads the training command out of a bash launch script without running any of it.

    MODEL_ARGS=(--num-layers 36)            arrays and variables, also from files that the script sources
    ray job submit -- python3 train.py ${MODEL_ARGS[@]} --lr "$LR"

What is known only when the script runs (the output of a command, arithmetic, the environment) is a mark in the word
that has it; an assignment under a condition counts where the variable has no other value.
"""

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LARGEST = 1 << 20
"""Size of a script, in bytes."""
MOST_FILES, DEEPEST = 16, 4
"""Files that a script sources, in all and inside one another."""
LONGEST_VALUE = 1 << 16
"""Characters that one word expands to."""
MOST_WORDS = 10_000
"""Words of a command or an array."""
PROGRAMS = ("train.py", "train_async.py")

UNSET, END, OUTPUT = "\ue000", "\ue001", "\ue002"
"""Marks in expanded words: UNSET NAME END for a variable without a value, OUTPUT for the output of a command."""

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
PARAMETER = re.compile(rf"({NAME})(\[(?:@|\*|\d+)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
HERE = re.compile(r"\bdirname\b.*(?:\bBASH_SOURCE\b|\$0|\$\{0\})(?P<after>.*)", re.DOTALL)
UP = re.compile(r"/\.\.")
OPENERS = {"if", "for", "while", "until", "case", "select", "{"}
CLOSERS = {"fi", "done", "esac", "}"}
PREFIXES = {"then", "else", "elif", "do", "!", "time", "exec", "nohup", "sudo", "in"}
DECLARATIONS = {"export", "local", "declare", "readonly", "typeset"}


@dataclass(frozen=True)
class Launch:
    """The training command of a script."""

    program: str
    """train.py or train_async.py."""

    words: tuple[str, ...]
    """What follows it, expanded, with marks for what is known only when it runs."""

    notes: tuple[str, ...]
    """What could not be read, or was read with a doubt."""


@dataclass
class _State:
    """What is known while a script is read."""

    directory: Path
    variables: dict[str, list[str]] = field(default_factory=dict)
    arrays: set[str] = field(default_factory=set)
    conditional: dict[str, str] = field(default_factory=dict)
    """Variables that were set under a condition, and the value taken."""
    doubts: dict[str, set[str]] = field(default_factory=dict)
    """Variables whose value depends on those, and on which."""
    touched: set[str] = field(default_factory=set)
    """Variables that were looked at since this was last emptied."""
    used: set[str] = field(default_factory=set)
    """Variables set under a condition that a training command depends on."""
    files: set[Path] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    launches: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)


def read_launch(path: str | Path) -> Launch:
    """The last command of a script that runs train.py or train_async.py.

    Raises:
        ValueError: the script cannot be read, has quotes or parentheses without an end, or no such command.
    """
    path = Path(path)
    state = _State(directory=path.parent)
    try:
        _read(_text_of(path), state, depth=0)
    except RecursionError:
        raise ValueError(f"{str(path)!r} nests quotes or substitutions too deeply.") from None
    if not state.launches:
        raise ValueError(
            f"{str(path)!r} has no command that runs {' or '.join(PROGRAMS)}; give a launch script of slime."
        )
    if len(state.launches) > 1:
        state.notes.append(f"the script runs training {len(state.launches)} times; this is the last one")
    program, words = state.launches[-1]
    state.notes += [
        f"{name} is set under a condition; {legible(value)[:80]!r} is taken"
        for name, value in state.conditional.items()
        if name in state.used
    ]
    return Launch(program, words, tuple(state.notes))


def _text_of(path: Path) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{str(path)!r} is not a file; give a launch script of slime.")
        if status.st_size > LARGEST:
            raise ValueError(f"{str(path)!r} has {status.st_size} bytes, more than the {LARGEST} of a launch script.")
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not text: byte {error.start} is not UTF-8.") from None
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    if "\0" in text:
        raise ValueError(f"{str(path)!r} is not text: it has null bytes.")
    return re.sub(f"[{UNSET}{END}{OUTPUT}]", "?", text).replace("\r\n", "\n")


def _read(text: str, state: _State, depth: int) -> None:
    """Follows the commands of a script: assignments, sourced files, and the training command."""
    block = 0
    for words in _commands(text):
        while words and words[0] in OPENERS | CLOSERS | PREFIXES:
            block = max(0, block + (words[0] in OPENERS) - (words[0] in CLOSERS))
            words = words[1:]
        if words:
            _follow(words, state, depth, conditional=block > 0)


def _follow(words: list[str], state: _State, depth: int, conditional: bool) -> None:
    if words[0] in DECLARATIONS:
        words = [word for word in words[1:] if not word.startswith("-")]
    assigned = 0
    while assigned < len(words) and ASSIGNMENT.fullmatch(words[assigned]):
        assigned += 1
    if assigned == len(words):
        for word in words:
            _assign(word, state, conditional)
    elif words[0] in ("source", ".") and len(words) > 1:
        _source("".join(_expand(words[1], state)), state, depth)
    elif any("train" in word for word in words):
        _note_launch(words, state, depth)


def _note_launch(words: list[str], state: _State, depth: int) -> None:
    """Keeps what follows train.py in a command; looks into the words of a command that is handed to a shell."""
    program, found = "", list[str]()
    for raw in words:
        for word in _expand(raw, state):
            name = word.rpartition("/")[2]
            if program:
                found.append(word)
            elif name in PROGRAMS:
                program = name
                state.touched.clear()
            elif any(f"{each} " in word for each in PROGRAMS) and depth < DEEPEST:  # bash -c "python train.py …"
                _read(word, state, depth + 1)
                return
    if program:
        state.used = _roots(state)
        state.launches.append((program, _without_redirections(found)))


def _without_redirections(words: list[str]) -> tuple[str, ...]:
    arguments: list[str] = []
    skip = False
    for word in words[:MOST_WORDS]:
        if skip:
            skip = False
        elif re.fullmatch(r"(?:\d|&)?(?:>>?|<)(?:&\d)?", word):
            skip = not word.endswith(("&1", "&2"))
        elif not re.match(r"(?:\d|&)?(?:>>?|<)", word):
            arguments.append(word)
    return tuple(arguments)


def _assign(word: str, state: _State, conditional: bool) -> None:
    match = ASSIGNMENT.fullmatch(word)
    assert match is not None
    name, append, value = match.groups()
    is_array = value.startswith("(") and value.endswith(")")
    state.touched.clear()
    if is_array:
        words = [each for command in _commands(value[1:-1]) for each in command]
        fields = [field for each in words for field in _expand(each, state)]
    else:
        fields = ["".join(_expand(value, state, split=False))]
    doubts, known = _roots(state), state.variables.get(name)
    if conditional:
        certain = known is not None and not _is_marked(known) and name not in state.doubts
        if (certain and not append) or (known is not None and _is_marked(fields)):
            return
        if not is_array:
            state.conditional[name] = fields[0]
            doubts = {name}
    if append:
        before = known or []
        doubts |= state.doubts.get(name, set())
        fields = [*before, *fields] if is_array else ["".join(before + fields)]
    if len(fields) > MOST_WORDS or sum(map(len, fields)) > 16 * LONGEST_VALUE:
        raise ValueError(f"the variable {name[:80]} of the script grows beyond {MOST_WORDS} words.")
    state.variables[name] = fields
    state.doubts.pop(name, None)
    if doubts:
        state.doubts[name] = doubts
    (state.arrays.add if is_array else state.arrays.discard)(name)


def _roots(state: _State) -> set[str]:
    """The variables set under a condition that what was looked at depends on."""
    return {root for name in state.touched for root in state.doubts.get(name, ())}


def _is_marked(fields: list[str]) -> bool:
    return any(mark in field for field in fields for mark in (UNSET, OUTPUT))


def _source(name: str, state: _State, depth: int) -> None:
    path = _find(name, state.directory)
    if path is None:
        state.notes.append(f"{legible(name)[:80]!r}, which the script sources, is not here: what it sets is missing")
        return
    if depth >= DEEPEST or len(state.files) >= MOST_FILES:
        raise ValueError(f"the script sources more than {MOST_FILES} files, or {DEEPEST} inside one another.")
    if path.resolve() in state.files:
        return
    state.files.add(path.resolve())
    _read(_text_of(path), state, depth + 1)


def _find(name: str, directory: Path) -> Path | None:
    """The sourced file: where the script says, or where slime keeps it, scripts/models, next to or above the script."""
    if _is_marked([name]) or not name or "\n" in name:
        return None
    places = [directory / name]
    if "models/" in name:
        tail = name[name.rindex("models/") :]
        places += [above / folder / tail for above in (directory, *directory.parents[:3]) for folder in ("", "scripts")]
    for place in places:
        try:
            if place.exists():
                return place
        except (OSError, ValueError):
            continue
    return None


def legible(word: str) -> str:
    """The word with its marks as bash writes them."""
    return re.sub(f"{UNSET}([^{END}]*){END}", r"${\1}", word).replace(OUTPUT, "$(…)")


# --- words of a script


def _commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a script as lists of raw words, quotes and substitutions still in them."""
    words: list[str] = []
    word = ""
    heredocs: list[str] = []
    place, size = 0, len(text)

    while place < size:
        letter = text[place]
        if letter == "\\":
            word += "" if text[place : place + 2] == "\\\n" else text[place : place + 2]
            place += 2
            continue
        if letter == "#" and not word:
            end = text.find("\n", place)
            place = size if end < 0 else end
            continue
        if letter in "'\"`" or text[place : place + 2] in ("$(", "${", "$'"):
            end = _span(text, place)
            word, place = word + text[place:end], end
            continue
        if letter == "(":
            end = _span(text, place)
            if re.fullmatch(rf"{NAME}\+?=", word):
                word += text[place:end]
            elif text[place : place + 2] != "((" and text[place:end] != "()":
                if word:
                    words, word = [*words, word], ""
                if words:
                    yield words
                words = []
                yield from _commands(text[place + 1 : end - 1])
            place = end
            continue
        if text[place : place + 2] == "<<" and text[place : place + 3] != "<<<":
            match = re.compile(r"<<-?\s*(['\"]?)([A-Za-z0-9_.-]+)\1").match(text, place)
            if match:
                heredocs.append(match[2])
                place = match.end()
                continue
        is_redirection = letter == "&" and (word.endswith((">", "<")) or text[place + 1 : place + 2] == ">")
        if letter in "\n;|&)" and not is_redirection:
            if word:
                words.append(word)
            if words:
                yield words
            words, word = [], ""
            place += 1
            if letter == "\n":
                for delimiter in heredocs:
                    place = _after_heredoc(text, place, delimiter)
                heredocs = []
            continue
        if letter in " \t":
            if word:
                words.append(word)
            word = ""
        else:
            word += letter
        place += 1
    if word:
        words.append(word)
    if words:
        yield words


def _after_heredoc(text: str, place: int, delimiter: str) -> int:
    match = re.compile(rf"^\t*{re.escape(delimiter)}$", re.MULTILINE).search(text, place)
    return len(text) if match is None else match.end()


def _span(text: str, start: int) -> int:
    """Where what opens at `start` ends: quotes, a substitution, or parentheses.

    Raises:
        ValueError: it does not end.
    """
    opener = text[start : start + 2]
    if text[start] == "'" or opener == "$'":
        end = _closing_quote(text, start + (2 if opener == "$'" else 1), escapes=opener == "$'")
    else:
        closer = {'"': '"', "`": "`", "(": ")"}.get(text[start]) or {"$(": ")", "${": "}"}[opener]
        inside = start + (2 if opener in ("$(", "${") else 1)
        end = _closing(text, inside, closer, quoted=text[start] in '"`')
    if end < 0:
        line = text.count("\n", 0, start) + 1
        raise ValueError(f"line {line} of the script opens {text[start : start + 2].strip()!r} without an end.")
    return end + 1


def _closing_quote(text: str, place: int, escapes: bool) -> int:
    while place < len(text) and text[place] != "'":
        place += 2 if escapes and text[place] == "\\" else 1
    return place if place < len(text) else -1


def _closing(text: str, place: int, closer: str, quoted: bool) -> int:
    """Index of the closer, past what is nested and escaped; -1 without one."""
    while place < len(text):
        letter = text[place]
        nested = text[place : place + 2] in ("$(", "${") or (letter == "`" and closer != "`")
        if not quoted:
            nested = nested or letter in "'\"" or (letter == "(" and closer == ")")
        if letter == closer:
            return place
        if letter == "\\":
            place += 2
        elif nested:
            place = _span(text, place)
        elif letter == "#" and closer == ")" and text[place - 1] in " \t\n(":
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
        else:
            place += 1
    return -1


# --- their expansion


def _expand(raw: str, state: _State, *, split: bool = True) -> list[str]:
    """The fields that bash would make of a raw word; none for an unquoted variable that is empty."""
    fields: list[str] = []
    current: str | None = None
    place = 0

    def add(parts: list[str], joined: bool) -> None:
        """Appends parts of which the first continues the current field and the last one stays open."""
        nonlocal current
        for number, part in enumerate([" ".join(parts)] if joined else parts):
            if number:
                fields.append(current or "")
                current = None
            current = (current or "") + part
            if len(current) > LONGEST_VALUE:
                raise ValueError(f"a word of the script expands to more than {LONGEST_VALUE} characters.")

    while place < len(raw):
        letter = raw[place]
        end = place + 1
        if letter == "\\":
            end = place + 2
            add([raw[place + 1 : end]], True)
        elif letter == "'" or raw.startswith("$'", place):
            end = _span(raw, place)
            add([raw[place:end].lstrip("$")[1:-1]], True)
        elif letter == '"':
            end = _span(raw, place)
            inner = raw[place + 1 : end - 1]
            array = re.fullmatch(rf"\$\{{({NAME})\[@\]\}}", inner)
            if array and array[1] in state.variables:
                state.touched.add(array[1])
                add(state.variables[array[1]], not split)
            else:
                add(_quoted(inner, state), True)
        elif letter in "$`":
            value, end = _substitute(raw, place, state)
            parts = [part for field in value for part in field.split()] if split else value
            if parts:
                add(parts, not split)
        else:
            add([letter], True)
        place = end
        if len(fields) > MOST_WORDS:
            raise ValueError(f"a command of the script has more than {MOST_WORDS} words.")
    return fields if current is None else [*fields, current]


def _quoted(inner: str, state: _State) -> list[str]:
    """The text between double quotes, expanded, as the parts of one field."""
    parts: list[str] = []
    place, size = 0, 0
    while place < len(inner):
        if inner[place] == "\\" and inner[place + 1 : place + 2] in ("$", "`", '"', "\\", "\n"):
            parts.append(inner[place + 1].strip("\n"))
            place += 2
        elif inner[place] in "$`":
            value, place = _substitute(inner, place, state)
            parts.append(" ".join(value))
        else:
            parts.append(inner[place])
            place += 1
        size += len(parts[-1])
        if size > LONGEST_VALUE:
            raise ValueError(f"a word of the script expands to more than {LONGEST_VALUE} characters.")
    return ["".join(parts)]


def _substitute(text: str, place: int, state: _State) -> tuple[list[str], int]:
    """The value of what a `$` or a backquote begins, and where it ends."""
    if text[place] == "`" or text.startswith("$(", place):
        end = _span(text, place)
        return [_directory(text[place:end], state)], end
    if text.startswith("${", place):
        end = _span(text, place)
        return _parameter(text[place + 2 : end - 1], state), end
    match = re.compile(rf"\$({NAME}|[0-9@*#?$!-])").match(text, place)
    if match is None:
        return ["$"], place + 1
    state.touched.add(match[1])
    return state.variables.get(match[1], [f"{UNSET}{match[1]}{END}"])[: None if match[1] else 1], match.end()


def _directory(command: str, state: _State) -> str:
    """The script's own directory where the command is the idiom for it; else the mark of a command's output."""
    idiom = HERE.search(command)
    if idiom is None:
        return OUTPUT
    directory = state.directory
    for _ in UP.findall(idiom["after"]):
        directory = directory / ".."
    return str(directory)


def _parameter(inner: str, state: _State) -> list[str]:
    """The value of ${…}: a variable, an array, or either with a default."""
    match = PARAMETER.fullmatch(inner)
    if match is None:  # ${#x}, ${x%y}, ${!x}: known only when it runs
        inside = re.search(NAME, inner)
        return [f"{UNSET}{inside[0]}{END}" if inside and not state.variables.get(inside[0]) else OUTPUT]
    name, index, operator, alternative = match.groups()
    state.touched.add(name)
    value = state.variables.get(name)
    if value is not None and index and index[1:-1].isdecimal():
        value = value[int(index[1:-1]) : int(index[1:-1]) + 1] or None
    elif value is not None and not index and name in state.arrays:
        value = value[:1]
    is_set = value is not None and not (operator and operator.startswith(":") and value == [""])
    if operator in ("+", ":+"):
        return _expand(alternative or "", state) if is_set else []
    if is_set or not operator or operator.endswith("?"):
        return [f"{UNSET}{name}{END}"] if value is None else value
    return [" ".join(_expand(alternative or "", state, split=False))]
