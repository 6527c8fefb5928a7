"""Reports of a run: console, JSONL, TensorBoard, Weights & Biases and the summary plot."""
