"""Lets tools that still call setup.py install the project; everything is declared in pyproject.toml."""

from setuptools import setup

setup()
