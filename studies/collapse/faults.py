"""Runs train.py with a fault in its rollout engine.

python -m studies.collapse.faults NAME FLAGS…
"""

import sys
from collections.abc import Mapping

import slime_tis.trainer.setup  # noqa: F401  evaluation has the sound engine, by its name in this module
from slime_tis.main import train
from studies.diagnosis.real_runs import Fault, nucleus, planted, replaced

FAULTS: Mapping[str, Fault] = {
    "wrong_log_probs": Fault(cause="broken_tokens", report=replaced((0.0, 0.001, 0.0), -30.0)),
    "stale_server": Fault(cause="weights_not_updated", servers=4),
    "top_p": Fault(cause="truncated_sampling", sampling=nucleus),
}
"""Faults that `faults` of a grid.yaml names, at the medium strength. In train.py, --rollout-top-p
has no such fault: the local engine then returns the sampling masks."""


if __name__ == "__main__":
    name, *flags = sys.argv[1:] or [""]
    if name not in FAULTS:
        sys.exit(
            f"error: {name!r} is no fault; give one of {', '.join(FAULTS)}, then flags of train.py."
        )
    with planted(FAULTS[name]):
        sys.exit(train(flags))
