"""A diagnosis as text for a terminal."""

import textwrap

from slime_tis.analysis.diagnosis.diagnose import Diagnosis
from slime_tis.errors import one_line

WIDTH = 100


def as_text(diagnosis: Diagnosis, name: str, note: str = "") -> str:
    """Each finding with cause, confidence, evidence and fix, then the note."""
    tokens = f"{diagnosis.tokens:,} tokens of {diagnosis.samples:,} samples" if diagnosis.tokens else "metrics alone"
    lines = [f"{one_line(name, 200)}: {tokens}"]
    for number, finding in enumerate(diagnosis.findings, start=1):
        lines += ["", f"{number}. {finding.title}"]
        lines.append(f"   confidence {finding.confidence:.0%}, {finding.share:.0%} of the mismatch")
        for statement in finding.evidence:
            lines += textwrap.wrap(f"- {statement}", WIDTH, initial_indent="   ", subsequent_indent="     ")
        lines += textwrap.wrap(f"→ {finding.fix}", WIDTH, initial_indent="   ", subsequent_indent="     ")
    if note:
        lines += ["", *textwrap.wrap(note, WIDTH)]
    return "\n".join(lines)
