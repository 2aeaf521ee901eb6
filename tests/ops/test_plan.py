"""Plans of launches, in a process of its own: here others run the kernels in Triton's interpreter."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is on some platforms only")


@pytest.mark.exhaustive
def test_on_a_gpu_that_does_nothing():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--noconftest", "tests/ops/dry_launches.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
