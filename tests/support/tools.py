"""Reports that this machine lacks a tool that a test needs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skips the test. In CI (the variable CI is set) the test is an error instead."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}. In CI a missing tool is an error, because a skipped test would go unnoticed")
    pytest.skip(reason)
