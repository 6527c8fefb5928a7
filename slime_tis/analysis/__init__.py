"""Per-token dumps: readers, diagnosis, what-if and the report page."""
