"""The properties of `properties.py` on a CPU, by hypothesis, for about half a minute. `hunt.py` is for a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties import DEVICE, PROPERTIES, Case, draw_case

_FEW = settings(
    max_examples=15 if DEVICE == "cpu" else 100, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__)
@_FEW
@given(seed=st.integers(0, 1 << 30))
def test_property(holds: Callable[[Case], None], seed: int) -> None:
    holds(draw_case(random.Random(seed)))
