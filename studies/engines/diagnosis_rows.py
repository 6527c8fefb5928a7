"""The rows of diagnosis.csv."""

from dataclasses import dataclass
from pathlib import Path

DIAGNOSIS = Path(__file__).with_name("diagnosis.csv")


@dataclass(frozen=True, kw_only=True)
class DiagnosisRow:
    """What `slime-tis diagnose` says about one dump."""

    model: str
    case: str
    tokens: int
    cause: str
    """Of the first finding."""
    confidence: float
    expected: str
    """Right causes, with spaces between them."""
    verdict: str
    """`named` if the first finding is right; `candidate` if it leaves several causes open and one
    of them is right; else `misleading`."""
