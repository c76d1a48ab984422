"""What a wheel lacks, as Triton's JIT makes it for an AMD GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parent


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("test_triton_backend.py", "test_masks_and_lengths and 70-41-both"),
        pytest.param(
            "test_kvcache_kernels.py", "test_pairs_of_options and append and rotary_seqlens", marks=pytest.mark.long
        ),
    ],
)
def test_kernels_of_a_gpu_that_no_wheel_is_for(file: str, words: str) -> None:
    """Runs in another process, because Triton interprets kernels in this process."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--gfx", "gfx1031", "--jit", "-k", words, _TESTS / file],
        env={name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
