"""The switch that serves PyTorch's flex_attention by these kernels, and ends it again."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.attention import flex_attention as torch_flex

from flash_attn.flex.attention import attention_or_reason
from flash_attn.flex.creation import create
from flash_attn.sdpa.report import Counts, Report

_counts = Counts("flex_attention")
_users: set[object] = set()
_lock = threading.RLock()


def flex_report() -> Report:
    """The calls of flex_attention so far: served by these kernels, and passed on, with reasons."""
    return _counts.report()


def _attend(*args: Any, **kwargs: Any) -> Any:
    """The result by these kernels, or the reason why PyTorch gets the call."""
    result = attention_or_reason(*args, **kwargs)
    if not isinstance(result, str):
        _counts.served()
        _needs_no_graph()
    return result


def _undisturbed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function that Dynamo, which runs torch.compile(flex_attention), may not trace."""
    if "torch._dynamo" not in sys.modules:
        return function(*args, **kwargs)
    return _disabled(function)(*args, **kwargs)


@cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function)


def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """torch.nn.attention.flex_attention.flex_attention by these kernels, or by PyTorch where they cannot serve a call.

    Arguments, results and errors are PyTorch's. Inside of a compiled function it is PyTorch's.
    """
    if is_compiling():
        return _pytorch(*args, **kwargs)
    result = _undisturbed(_attend, *args, **kwargs)
    if isinstance(result, str):
        reason, result = result, _pytorch(*args, **kwargs)
        _undisturbed(_counts.passed_on, reason)
    return result


def create_block_mask(*args: Any, **kwargs: Any) -> Any:
    """torch.nn.attention.flex_attention.create_block_mask, run as it is written: it needs no compiler.

    Inside of a compiled function it is PyTorch's.
    """
    if is_compiling():
        return _pytorch_mask(*args, **kwargs)
    return _undisturbed(_create, *args, **kwargs)


def _create(*args: Any, **kwargs: Any) -> Any:
    block_mask = create(_pytorch_mask, *args, **kwargs)
    _needs_no_graph()
    return block_mask


def _needs_no_graph() -> None:
    """Satisfies torch.compile(flex_attention, fullgraph=True), for which PyTorch 2.13 raises if it compiled no graph.

    PyTorch counts the graphs of such a call, from 0. Below 0 it does not count. A graph of one number is one, too.
    """
    count = getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count is None or "torch._dynamo" not in sys.modules:
        return
    if count(0) < 0:
        count(-1)
    else:
        _graph()(torch.zeros(()))


@cache
def _graph() -> Any:
    return torch.compile(torch.neg, backend="eager")


def _own(function: FunctionType) -> FunctionType:
    """PyTorch's function as another object, whose code stays."""
    own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _serving(function: FunctionType) -> CodeType:
    """The code that PyTorch's function has while it is served.

    With other code the function is the same object, under every name by which a program has imported it.
    """
    name, parameters = function.__name__, inspect.signature(function).parameters.values()
    plain = [x.name for x in parameters if x.kind is not x.KEYWORD_ONLY]
    named = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
    source = f"""
def {name}({", ".join([*plain, *(["*", *named] if named else [])])}):
    from flash_attn.flex.switch import {name}
    return {name}({", ".join([*plain, *(f"{x}={x}" for x in named)])})
"""
    made: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), made)
    code: CodeType = made[name].__code__
    return code


def _leave_alone(code: CodeType) -> None:
    """Tells Dynamo to run code as it is written, without an import of Dynamo, which takes seconds."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, default))
    else:
        skip_code = getattr(frames, "skip_code", None) or importlib.import_module("torch._dynamo.eval_frame").skip_code
        skip_code(code)


_function: Any = torch_flex.flex_attention
_mask_function: Any = torch_flex.create_block_mask
_pytorch, _pytorch_mask = _own(_function), _own(_mask_function)
_serving_code, _serving_mask_code = _serving(_function), _serving(_mask_function)
# torch.compile leaves this code alone: it runs as written, and what PyTorch gets is compiled.
for _own_function in (flex_attention, create_block_mask, _undisturbed, _disabled.__wrapped__):
    _leave_alone(_own_function.__code__)
for _code in (_serving_code, _serving_mask_code):
    _leave_alone(_code)


class ActiveFlex:
    """flex_attention on these kernels, from its creation on until `off()` or the end of a `with` block.

    A `with` block of an object that is off turns it on again. Several objects are independent: flex_attention is served
    while any is on.
    """

    def __init__(self) -> None:
        self.on()

    def on(self) -> None:
        """Serves flex_attention. Does nothing if the object is on."""
        with _lock:
            _users.add(self)
            _set_code()

    def off(self) -> None:
        """Ends it. flex_attention goes to PyTorch if no other object is on. A second call does nothing."""
        with _lock:
            _users.discard(self)
            _set_code()

    def __enter__(self) -> ActiveFlex:
        self.on()
        return self

    def __exit__(self, *_: object) -> None:
        self.off()


def _set_code() -> None:
    _function.__code__ = _serving_code if _users else _pytorch.__code__
    _mask_function.__code__ = _serving_mask_code if _users else _pytorch_mask.__code__


def use_for_flex() -> ActiveFlex:
    """Serves PyTorch's flex_attention by the kernels of this package, forward and backward, without a compiler.

    create_block_mask needs no compiler then, either.

    Served: tensors on a GPU in fp16, bf16 and fp32, head dims to 512, enable_gqa; masks of ranges, equal ids and blocks
    (causal, windows, documents, chunks, prefixes, padding and what joins them), and of a bounded size every other
    mask; score_mods that add to the score, cap it, scale it or hide keys. PyTorch computes every other call, and those
    inside of a compiled function; `flex_report()` tells which. torch.compile(flex_attention) is served, too.

    The result turns it off again: by its method `off()`, or as a context manager.
    """
    return ActiveFlex()
