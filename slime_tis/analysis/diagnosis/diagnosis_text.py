"""The text of a diagnosis for a terminal."""

import textwrap

from slime_tis.analysis.diagnosis.diagnose import Diagnosis
from slime_tis.analysis.diagnosis.metric_rules import MIN_NAMED_CONFIDENCE
from slime_tis.errors import one_line
from slime_tis.health import Finding

OVERLAP = (
    "The shares add up to more than 100%, because several of these causes cover the same tokens."
)
TERMINAL_WIDTH = 100
"""Columns of the text."""


def certainty(finding: Finding, *, has_tokens: bool) -> str:
    """Returns confidence and share in words; empty for `not_measured`, which has none."""
    if finding.cause == "not_measured":
        return ""
    confidence = f"confidence {finding.confidence:.0%}"
    if finding.confidence < MIN_NAMED_CONFIDENCE and finding.cause != "unexplained":
        confidence = f"only a candidate: {confidence}"
    if not has_tokens or finding.cause == "healthy":
        return confidence
    if finding.share == 0:
        return f"{confidence}, from the run's metrics"
    return f"{confidence}; its pattern covers {min(finding.share, 1.0):.0%} of the mismatch"


def as_text(diagnosis: Diagnosis, name: str, note: str = "") -> str:
    """Returns each finding with cause, confidence, evidence and fix, then the note."""
    size = "only metrics"
    if diagnosis.tokens:
        size = f"{diagnosis.tokens:,} tokens of {diagnosis.samples:,} samples"
    elif diagnosis.samples:
        size = f"{diagnosis.samples:,} samples without a trained token"
    lines = [f"{one_line(name, 200)}: {size}"]
    for number, finding in enumerate(diagnosis.findings, start=1):
        lines += ["", f"{number}. {finding.title}"]
        confidence = certainty(finding, has_tokens=diagnosis.tokens > 0)
        if confidence:
            lines.append(f"   {confidence}")
        for fact in finding.evidence:
            lines += _wrapped(f"- {fact}", indent="   ")
        lines += _wrapped(f"→ {finding.fix}", indent="   ")
    if diagnosis.concentration:
        lines += ["", *_wrapped(f"Which samples? {diagnosis.concentration}.")]
    if diagnosis.overlaps:
        lines += ["", *_wrapped(OVERLAP)]
    if note:
        lines += ["", *_wrapped(note)]
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Returns the lines of a paragraph; those after the first line of an item hang."""
    later = indent
    if indent:
        later += "  "
    # Flags and paths stay in one piece, so that they can be copied.
    return textwrap.wrap(
        text,
        TERMINAL_WIDTH,
        initial_indent=indent,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
