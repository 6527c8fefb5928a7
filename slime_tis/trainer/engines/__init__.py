"""Rollout engines: the contract, weights on their way to an engine, and the two engines."""
