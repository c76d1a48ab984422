"""Simulated cycles against published figures of hardware: `python -m amdgpu_simulator calibrate` as a test."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tools

from amdgpu_simulator import accuracy, calibration, debian
from amdgpu_simulator.calibration import COUNTERS, ORDERS, Point
from rocm_wheels.errors import MissingTool


def whole(point: Point) -> calibration.Whole:
    try:
        return calibration.whole(point)
    except (MissingTool, debian.UnavailableError) as problem:
        tools.missing(str(problem))


@pytest.mark.long
@pytest.mark.parametrize("order", dict.fromkeys(point.order for point in ORDERS))
def test_the_order_of_kernels_is_the_order_on_hardware(order: str) -> None:
    points = [point for point in ORDERS if point.order == order]
    assert len(points) > 1
    points.sort(key=lambda point: -point.figure)
    useful = [whole(point).useful for point in points]
    assert all(faster > slower for faster, slower in pairwise(useful)), dict(zip(points, useful, strict=True))


@pytest.mark.long
def test_matrix_utilisation_is_near_the_counters() -> None:
    """The errors in docs/notes/clock.md are the limit. No latency is fitted to these counters."""
    errors = [100 * whole(point).busy / point.figure - 1 for point in COUNTERS]
    assert max(map(abs, errors)) < accuracy.error("gfx942") + 0.005
    assert sum(map(abs, errors)) / len(errors) < 0.085
