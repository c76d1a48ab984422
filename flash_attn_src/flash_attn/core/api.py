"""Which release's API this installation has: one source tree serves several, and this says what differs.

The functions here are written as the newest release has them. `parameters` takes away from a signature what the
wheel's release does not have; names that a release has otherwise are chosen with `BEFORE_2_7` and `SINCE_2_8_4`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from flash_attn.core.build_info import VERSION

Function = TypeVar("Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


RELEASE = _numbers(VERSION)
BEFORE_2_7 = RELEASE < (2, 7)
SINCE_2_8_4 = RELEASE >= (2, 8, 4)


def parameters(
    *, since: dict[str, str] | None = None, until: dict[str, str] | None = None
) -> Callable[[Function], Function]:
    """Leave parameters out of a function where this release lacks them: name -> the first release with it, name ->
    the first without. They keep their defaults then; given all the same they raise TypeError, as upstream does."""
    absent = {name for name, release in (since or {}).items() if _numbers(release) > RELEASE}
    absent |= {name for name, release in (until or {}).items() if _numbers(release) <= RELEASE}

    def decorate(function: Function) -> Function:
        if not absent:
            return function
        whole = inspect.signature(function)
        signature = whole.replace(parameters=[p for name, p in whole.parameters.items() if name not in absent])

        @functools.wraps(function)
        def released(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__qualname__}() of flash_attn {VERSION}: {error}") from None
            return function(**bound.arguments)

        released.__signature__ = signature  # type: ignore[attr-defined]
        return released  # type: ignore[return-value]

    return decorate


def by_name(
    names: str, defaults: dict[str, Any] | None = None
) -> Callable[[Callable[[dict[str, Any]], _Result]], Callable[..., _Result]]:
    """Make a function of one dict, arguments by name, take these parameters as upstream's function does.

    For interfaces that hand on what they get: their parameters are data, not code. A name with "?" may be None. Raises
    TypeError as Python does.
    """
    defaults = defaults or {}
    every = tuple(name.rstrip("?") for name in names.split())
    known = sorted(every)
    signature = inspect.Signature([
        inspect.Parameter(
            name.rstrip("?"), inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=defaults.get(name.rstrip("?"), inspect.Parameter.empty),
            annotation="object | None" if name.endswith("?") else "object",
        )
        for name in names.split()
    ])  # fmt: skip

    def decorate(function: Callable[[dict[str, Any]], _Result]) -> Callable[..., _Result]:
        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> _Result:
            arguments = {**defaults, **dict(zip(every, args, strict=False)), **kwargs}
            twice = [name for name in every[: len(args)] if name in kwargs]
            if twice or len(args) > len(every) or sorted(arguments) != known:
                try:
                    signature.bind(*args, **kwargs)
                except TypeError as error:
                    raise TypeError(f"{function.__name__}() {error}") from None
            return function(arguments)

        named.__signature__ = signature  # type: ignore[attr-defined]
        return named

    return decorate
