"""Fixtures that several test modules share."""

from __future__ import annotations

import pytest

from rocm_wheels.cells import Cell
from rocm_wheels.versions import Versions, load


@pytest.fixture(scope="session")
def data() -> Versions:
    """The versions.toml of this repository."""
    return load()


@pytest.fixture(scope="session")
def cell() -> Cell:
    """The cell of the README."""
    return Cell(flash_attn="2.8.3", python="3.11", torch="2.5.1", rocm="6.2", backend="triton")
