"""Weight transports of the servers."""
