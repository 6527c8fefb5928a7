"""Rollouts: prompts in, sampled and scored responses out."""
