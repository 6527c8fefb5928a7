"""Advantages and policy losses: pure torch functions."""
