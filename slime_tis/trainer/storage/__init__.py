"""What a run writes to disk and whose it is: locks, the files of checkpoints and exports, resumption."""
