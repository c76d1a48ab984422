"""How the tests are spread over processes: a module in one, and in the same one those that share compiled kernels."""

from __future__ import annotations

import pytest

_BUILDS_WHEELS = ("test_end_to_end", "test_pipeline")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.path.stem
        item.add_marker(pytest.mark.xdist_group("wheels" if name in _BUILDS_WHEELS else name))
