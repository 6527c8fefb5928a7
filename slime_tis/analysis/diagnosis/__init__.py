"""Diagnosis: from the tokens of a dump and the metrics of a run to the causes of the mismatch, ranked."""

from slime_tis.analysis.diagnosis.causes import CAUSES, Cause, Finding
from slime_tis.analysis.diagnosis.diagnose import Diagnosis, diagnose

__all__ = ["CAUSES", "Cause", "Diagnosis", "Finding", "diagnose"]
