"""The kernels of the fused path through Triton's interpreter, in a process of its own; barriers with one program."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_cases import KINDS

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_the_reference(kind: str) -> None:
    path = os.pathsep.join([str(HERE), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, HERE / "gpu_cases.py", kind], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
