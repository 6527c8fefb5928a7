"""Prompts, samples and their files."""
