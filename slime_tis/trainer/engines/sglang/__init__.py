"""SGLang servers: their requests and their answers."""
