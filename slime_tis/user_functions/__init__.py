"""User functions: table of signatures, loading, calls, checks of returned tensors."""

from slime_tis.user_functions.calling import accepted, call, calling, describe
from slime_tis.user_functions.loading import load_custom_tis, load_function, load_user_function
from slime_tis.user_functions.table import USER_FUNCTIONS
from slime_tis.user_functions.tensors import call_custom_tis

__all__ = [
    "USER_FUNCTIONS",
    "accepted",
    "call",
    "call_custom_tis",
    "calling",
    "describe",
    "load_custom_tis",
    "load_function",
    "load_user_function",
]
