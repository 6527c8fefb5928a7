"""Reports of a run: console, JSONL, TensorBoard and Weights & Biases."""
