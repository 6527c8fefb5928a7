"""Lets tools that still call setup.py install the project; pyproject.toml declares everything."""

from setuptools import setup

setup()
