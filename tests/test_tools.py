"""A test without its tool is skipped on a developer's machine and is an error in CI."""

from __future__ import annotations

import pytest
import tools


@pytest.mark.parametrize("variable", ["", "true"])
def test_a_missing_tool(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", variable)
    expected = pytest.fail.Exception if variable else pytest.skip.Exception
    with pytest.raises(expected, match="no Chromium on this machine"):
        tools.missing("no Chromium on this machine")
