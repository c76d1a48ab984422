"""Tensor subclasses as any argument of any function: their values count, or an error names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton
from public_calls import Call, calls
from small_calls import Late


def _outcome(function: Callable[[], list[torch.Tensor]]) -> Any:
    try:
        return function()
    except (TypeError, NotImplementedError) as error:
        return str(error)


def _check(name: str, call: Call) -> None:
    expected = call.fresh().run()
    for argument in call.tensors:
        fresh = call.fresh()
        got = _outcome(lambda fresh=fresh, argument=argument: fresh.run(**{argument: Late(fresh.tensors[argument])}))
        if isinstance(got, str):
            assert got.startswith(f"{argument}: got Late"), (name, argument, got)
            continue
        for one, other in zip(got, expected, strict=True):
            assert_close(f"{name}, {argument}", one.value if isinstance(one, Late) else one, other)


def test_by_pytorch() -> None:
    with backends.using(oracle):
        for name, call in calls().items():
            _check(name, call)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of a CPU are in the interpreter's reach alone")
@pytest.mark.parametrize(
    "name", ["func, alibi and sinks", "func, bias", "varlen, pages", "kvcache, new", "kvcache, pages", "extension fwd"]
)
def test_by_kernels(name: str) -> None:
    with backends.using(triton):
        _check(name, calls(batch=1, seqlen_q=2, heads=1)[name])
