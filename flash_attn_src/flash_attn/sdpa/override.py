"""The kernel of aten::scaled_dot_product_attention that serves a call by flash_attn, or hands it to PyTorch.

PyTorch's function stays what it is: the dispatcher leads to this kernel, below autocast, vmap and the Python function,
and above the choice between PyTorch's own kernels. So nn modules, C++, TorchScript and names that were imported before
reach it too. The first use registers it, and it stays: to take a kernel away while another thread calls it is not safe.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from flash_attn.sdpa import attention as kernels
from flash_attn.sdpa import causal_bias, compiled, modes
from flash_attn.sdpa.report import count_passed_on, count_served

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
# GPUs, and CPUs, whose calls go to PyTorch and are counted. In inference mode tensors have no autograd key.
_KEYS = ("AutogradCUDA", "CUDA", "AutogradCPU", "CPU")

# Whether calls are served. Dynamo's guards read it by its name.
active = False
# Computes what PyTorch gets, from the reason, the query and a function that computes it: `python -m flash_attn.why`
# times it so.
watch: Callable[[str, torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor] | None = None

_users: set[object] = set()
_recorded: weakref.WeakKeyDictionary[Any, int] = (
    weakref.WeakKeyDictionary()
)  # recorder -> open `with` blocks in its graph
_library: list[Library] = []
_lock = threading.RLock()


def pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """PyTorch's own SDPA, which chooses between its kernels."""
    out: torch.Tensor = _SDPA.decompose(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """A call of SDPA. The dispatcher has checked the arguments' types."""
    recorder = modes.recorder()
    counted = recorder is not None or not modes.is_stand_in(query)
    if not counted:
        compiled.guard()
    if active or (recorder is not None and _recorded.get(recorder, 0) > 0):
        out = kernels.attention_or_reason(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if not isinstance(out, str):
            if counted:
                count_served()
            return out
        if counted:
            count_passed_on(out)
            if watch is not None:
                return watch(out, query, functools.partial(
                    pytorch, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                ))  # fmt: skip
    return pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _lower_right(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, scale: float | None, enable_gqa: bool
) -> torch.Tensor | None:
    """A call with PyTorch's causal_lower_right; None for a call that PyTorch computes and the report counts."""
    if not active or modes.recorder() is not None or modes.is_stand_in(query):
        return None
    out = kernels.attention_or_reason(
        query, key, value, None, dropout_p, False, scale=scale, enable_gqa=enable_gqa, is_lower_right=True
    )
    if isinstance(out, str):
        return None
    count_served()
    return out


def _register() -> None:
    """Registers the kernel if it is not registered yet. Graphs that were compiled before are compiled again."""
    with _lock:
        if _library:
            return
        library = Library("aten", "IMPL")
        for key in _KEYS:
            library.impl("scaled_dot_product_attention", _kernel, key)
        _library.append(library)
        causal_bias.serve(_lower_right)
        _SDPA._dispatch_cache.clear()  # what PyTorch's traces have looked up before
        if modes.recorder() is None and not modes.is_symbolic():
            compiled.forget_graphs()


def serve(user: object) -> None:
    """Serves calls until each user has ended it."""
    global active
    with _lock:
        _register()
        _users.add(user)
        active = True
        compiled.set_cache_tag(True)


def end(user: object) -> None:
    """Ends what `serve` began for this user. A second call does nothing."""
    global active
    with _lock:
        _users.discard(user)
        active = bool(_users)
        compiled.set_cache_tag(active)


# The same inside of compiled code, where a `with` block is a pair of calls in the graph. It changes the calls that are
# recorded between them, or, where the graph is run by Python (backend="eager"), the calls that run between them.
torch.library.define("flash_attn::_serve_sdpa", "(bool on) -> ()")


@torch.library.impl("flash_attn::_serve_sdpa", "CompositeImplicitAutograd")
def _serve_in_graph(on: bool) -> None:
    _register()
    recorder = modes.recorder()
    if recorder is not None:
        _recorded[recorder] = _recorded.get(recorder, 0) + (1 if on else -1)
    elif not modes.is_symbolic():
        (serve if on else end)(_serve_in_graph)


serve_in_graph = torch.ops.flash_attn._serve_sdpa.default
torch.fx.node.has_side_effect(serve_in_graph)
