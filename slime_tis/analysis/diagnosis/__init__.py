"""Ranks the causes of a mismatch from the tokens of a dump and the metrics of a run."""

from slime_tis.analysis.diagnosis.causes import CAUSES
from slime_tis.analysis.diagnosis.diagnose import Diagnosis, diagnose

__all__ = ["CAUSES", "Diagnosis", "diagnose"]
