"""Weight transports of the SGLang engine."""
