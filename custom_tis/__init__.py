"""Custom TIS functions in slime's contract, to use by path or to copy."""
