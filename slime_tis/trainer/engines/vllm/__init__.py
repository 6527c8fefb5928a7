"""The rollout engine that samples from vLLM servers."""
