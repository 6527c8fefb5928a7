"""Reports of a run: console, JSONL, TensorBoard, Prometheus and experiment trackers."""
