"""Experiments that are not part of the installed package."""
