"""Rollouts that user functions make: requests, provenance of tokens, slime's interface."""
