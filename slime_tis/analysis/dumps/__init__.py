"""Per-token dumps of training: the table, its files, readers of other projects' dumps, and what-if."""
