"""Scores of responses."""
