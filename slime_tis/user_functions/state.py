"""What a call of a user's function must not change for the rest of the program."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (os.getcwd, os.chdir),
)
"""Getter and setter of everything that is put back where a function changed it."""


@contextmanager
def kept_state(seed: int) -> Iterator[None]:
    """Gives a function separate random numbers, and restores all settings that it may change.

    Within, the generators of torch and of Python (numpy's too, where it is loaded) begin at `seed`: the numbers drawn
    follow from the seed alone, so that a run that continues from a checkpoint draws the same. Afterwards the
    generators, grad mode, default dtype and device, deterministic algorithms, matmul precision, anomaly detection,
    the number of threads and the working directory are as before.
    """
    before = [getter() for getter, _ in SETTINGS]
    numpy = sys.modules.get("numpy")
    generators = random.getstate(), None if numpy is None else numpy.random.get_state()
    on_gpu = torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(generators[0])
            if numpy is not None:
                numpy.random.set_state(generators[1])
            for (getter, setter), value in zip(SETTINGS, before, strict=True):
                if getter() != value:
                    setter(value)
