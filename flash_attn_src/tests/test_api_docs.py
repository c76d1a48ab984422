"""docs/api.md says what the code does: the page's table is made anew and compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

_SCRIPT = Path(__file__).resolve().parent.parent.parent / "docs" / "generate_api.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script runs kernels in Triton's interpreter")
def test_the_page_is_what_the_code_does() -> None:
    done = subprocess.run([sys.executable, _SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
