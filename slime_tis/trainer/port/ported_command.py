"""A command of `train.py` that `slime-tis port` composes, and its text with comments."""

import re
import shlex
import textwrap
from dataclasses import dataclass, field

from slime_tis.options.flags import Flag
from slime_tis.trainer.port.launch_script import OPEN, UNSET_VARIABLE, legible

COMMENT_WIDTH = 110
"""Columns of a comment."""

TODO = "to do by hand"
CHANGED = "changed"
ADDED = "added because the script's trainer has another default"
NO_OPS = "dropped because they have no effect"
RESTATES = "dropped because config.json or this program has the value"
UNSUPPORTED = "not supported"
REFUSED = "train.py refuses"
MEMORY = "memory"
MISSING = "not on this machine (the checks used stand-ins)"
TITLES = (TODO, CHANGED, ADDED, NO_OPS, RESTATES, UNSUPPORTED, REFUSED, MEMORY, MISSING)
"""Titles of the comments, in their order."""


@dataclass
class Ported:
    """A command line under construction."""

    script: str
    """Name of the script."""
    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=lambda: {title: [] for title in TITLES})
    """Comments by title."""
    other_experiments: dict[str, list[str]] = field(default_factory=dict)
    """Flags of experiments that train.py cannot run, by the reason."""
    python_path: list[str] = field(default_factory=list)
    """Directories of the script's PYTHONPATH."""
    launcher: list[str] = field(default_factory=list)
    """torchrun and its flags."""
    engine: str = "sglang"
    """The engine of the script's servers, a name in `SERVER_ENGINES`."""
    spellings: dict[str, str] = field(default_factory=dict)
    """Options of verl or TRL in the script, by the flag of train.py that replaces them."""

    @property
    def refusals(self) -> list[str]:
        """Messages of train.py that refuse the command."""
        return self.notes[REFUSED]

    @property
    def server_prefix(self) -> str:
        """The beginning of all flags of the engine's servers."""
        return f"--{self.engine}-"

    def shown(self, flag: Flag) -> str:
        """The flag as the script writes it; long ones are cut."""
        if flag.name in self.spellings:
            return self.spellings[flag.name][:160]
        values = [legible(value)[:160] for value in flag.values[:8]]
        return " ".join([flag.name[:80], *values])

    def for_engine(self, text: str) -> str:
        """A text of the tables, which name SGLang's flags, with the flags of the engine."""
        return text.replace("--sglang-", self.server_prefix)

    @property
    def command(self) -> str:
        """The command for a shell, one flag per line."""
        program = [*self.launcher, "train.py"]
        if self.python_path:
            program.insert(0, f"PYTHONPATH={_quoted(':'.join(self.python_path))}")
        lines = [program]
        for name, values in self.flags.items():
            lines.append([_quoted(name), *map(_quoted, values)])
        return " \\\n   ".join(map(" ".join, lines))

    @property
    def text(self) -> str:
        """The command with its comments; a command that train.py refuses is a comment, too."""
        lines = [f"# {self.script!r} for train.py; nothing of it was executed."]
        if self.refusals:
            lines.append("# train.py refuses this command; the reasons are below.")
            lines += [f"# {line}" for line in self.command.splitlines()]
        else:
            lines.append(self.command)
        for title, notes in self.notes.items():
            if not notes:
                continue
            lines += ["#", f"# {title}:"]
            if title == RESTATES:
                # These are the flags of a script's MODEL_ARGS; they share a line.
                notes = [", ".join(notes)]
            for note in notes:
                lines += _comment(note)
        return "\n".join(lines) + "\n"


def _quoted(word: str) -> str:
    """The word for bash. Variables without a value stay, and nothing else is expanded."""
    if OPEN not in word:
        return shlex.quote(word)
    escaped = [re.sub(r'([\\"$`])', r"\\\1", part) for part in UNSET_VARIABLE.split(word)]
    # UNSET_VARIABLE has one group, so every second part is the name of a variable.
    for index in range(1, len(escaped), 2):
        escaped[index] = f"${{{escaped[index]}}}"
    return f'"{"".join(escaped)}"'


def _comment(text: str) -> list[str]:
    """The text as comment lines; control characters are escaped."""
    text = " ".join(text.splitlines())
    printable = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    # Flags and paths stay in one piece, so that they can be copied.
    wrapper = textwrap.TextWrapper(
        COMMENT_WIDTH, "#   ", "#     ", break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(printable)
