"""Per-token dumps: the table, its files, readers of other projects' dumps, and what-if."""
