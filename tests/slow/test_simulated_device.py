"""A part of the library's tests on the simulated device, which finds tensors of two devices in one operation."""

import subprocess
import sys

from tests.runs import ROOT

TESTS = ("tests/correction/test_simulated_device.py", "tests/correction/test_mean.py", "tests/policy/test_losses.py")


def test_the_library_on_another_device():
    # a process of its own: torch has the simulated device from then on
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "simulated", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout
