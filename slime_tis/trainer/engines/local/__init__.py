"""The in-process rollout engine on transformers."""
