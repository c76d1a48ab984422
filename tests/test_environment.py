"""Upstream's switch means the same to build_rocm.sh, to pip and to the installed package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from rocm_wheels import environment
from rocm_wheels.errors import DataError
from rocm_wheels.package_modules import module
from rocm_wheels.paths import FLASH_ATTN_SRC

NAME = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
VALUES = {
    **dict.fromkeys(("TRUE", "true", "1", " on ", "Yes"), "triton"),
    **dict.fromkeys(("FALSE", "false", "0", "off", "no"), "ck"),
    **dict.fromkeys(("", " "), None),
}


@pytest.fixture(scope="module")
def of_pip() -> Callable[[dict[str, str]], str]:
    """The backend that `pip install` selects."""
    spec = importlib.util.spec_from_file_location("hatch_build", FLASH_ATTN_SRC / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    result: Callable[[dict[str, str]], str] = hook._backend
    return result


@pytest.mark.parametrize(("value", "backend"), VALUES.items(), ids=[repr(value) for value in VALUES])
def test_a_value_means_one_backend(value: str, backend: str | None, of_pip: Callable[[dict[str, str]], str]) -> None:
    env = {NAME: value}
    assert environment.backend(env) == backend
    assert of_pip(env) == (backend or "triton")
    assert module("core.environment").switch(env, NAME) is {"triton": True, "ck": False, None: None}[backend]


@pytest.mark.parametrize("value", ["maybe", "2", "ck", "TRUE FALSE"])
def test_invalid_value_raises_in_every_parser(value: str, of_pip: Callable[[dict[str, str]], str]) -> None:
    env = {NAME: value}
    expected = f"{NAME}={value} is neither TRUE nor FALSE"
    with pytest.raises(DataError, match=expected):
        environment.backend(env)
    with pytest.raises(SystemExit, match=f"error: {expected}"):
        of_pip(env)
    with pytest.raises(ValueError, match=expected):
        module("core.environment").switch(env, NAME)
