"""User functions: loaded from a path, called so that any failure is one message, held to a contract."""

from slime_tis.user_functions.contract import TisResult, call_custom_tis, check_metric_names, leads_to, load_custom_tis
from slime_tis.user_functions.loading import load_function, load_hook
from slime_tis.user_functions.messages import calling, check_signature, describe

__all__ = [
    "TisResult",
    "call_custom_tis",
    "calling",
    "check_metric_names",
    "check_signature",
    "describe",
    "leads_to",
    "load_custom_tis",
    "load_function",
    "load_hook",
]
