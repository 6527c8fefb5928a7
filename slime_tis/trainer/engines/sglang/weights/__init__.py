"""New weights for SGLang servers: what every way has in common, and the two ways."""
