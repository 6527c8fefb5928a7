"""Output directories of a run: locks, checkpoints, exports and their owners."""
