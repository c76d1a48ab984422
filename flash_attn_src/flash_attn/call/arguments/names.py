"""Errors with the names that the caller's function has for its arguments."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

from torch.compiler import is_compiling

Function = TypeVar("Function", bound=Callable[..., Any])

_ERRORS = (TypeError, ValueError, NotImplementedError, IndexError, RuntimeError)


def renaming(**names: str) -> Callable[[Function], Function]:
    """A decorator: an error that names an argument of an inner function names the argument of this function instead.

    names: inner name -> own name. torch.compile traces the function itself, without the decorator.
    """
    inner = re.compile(rf"\b({'|'.join(names)})\b")

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except _ERRORS as error:
                if type(error) not in _ERRORS or not inner.search(str(error)):
                    raise
                message = inner.sub(lambda match: names[match[1]], str(error))
                raise type(error)(message).with_traceback(error.__traceback__) from None

        return renamed  # type: ignore[return-value]

    return decorate
