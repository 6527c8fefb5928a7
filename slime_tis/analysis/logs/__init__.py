"""Metrics from the logs of other programs: W&B, TensorBoard, trainer_state.json, CSV and verl's console log."""
