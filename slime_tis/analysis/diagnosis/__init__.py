"""Diagnosis: from the tokens of a dump and the metrics of a run to the ranked causes of the mismatch."""

from slime_tis.analysis.diagnosis.diagnose import CAUSES, Diagnosis, diagnose

__all__ = ["CAUSES", "Diagnosis", "diagnose"]
