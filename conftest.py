"""How the tests are spread over processes: a module in one, and in the same one those that share compiled kernels."""

from __future__ import annotations

import pytest

_BUILD_WHEELS = ("test_end_to_end", "test_pipeline")


def pytest_itemcollected(item: pytest.Item) -> None:
    name = item.path.stem
    item.add_marker(pytest.mark.xdist_group("wheels" if name in _BUILD_WHEELS else name))
