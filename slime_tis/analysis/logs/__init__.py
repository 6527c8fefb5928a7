"""Metrics from other programs' logs: W&B, TensorBoard, trainer_state.json, CSV, verl's console."""
