"""Puts the package's source tree and the test helpers on the path, and chooses where Triton kernels run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parent
for _directory in (_TESTS, _TESTS.parent):
    if str(_directory) not in sys.path:
        sys.path.insert(0, str(_directory))

import torch  # noqa: E402 - after the path

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it is set before any test module is imported.
    os.environ["TRITON_INTERPRET"] = "1"
