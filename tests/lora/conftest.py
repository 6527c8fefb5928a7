"""Tiny models and the parallel state of one process."""

from tests.megatron.conftest import model, parallel  # noqa: F401  (fixtures)
