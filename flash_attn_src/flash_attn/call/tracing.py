"""Whether a call is traced: under torch.compile, torch.export, a dispatch mode, or with a tensor subclass. And whether
torch.func transforms it."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flash_attn.core.protocol import recording

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state  # of torch.jit.trace
_transforms_active = torch._C._are_functorch_transforms_active


def is_transformed() -> bool:
    """Whether torch.vmap, torch.func.grad, jvp, jacrev or the like is at work. torch.compile takes the custom ops then,
    which raise."""
    return not is_compiling() and _transforms_active()


def refuse_transforms(what: str) -> None:
    """Raises NotImplementedError if torch.func transforms a call that it cannot transform correctly."""
    if is_transformed():
        raise NotImplementedError(
            f"{what}: torch.func and torch.vmap do not transform it, wanted torch.autograd.grad, or a loop over vmap's "
            "entries"
        )


def is_plain(x: object) -> bool:
    """Whether x is no tensor of a subclass, whose memory a kernel may not find."""
    return type(x) in _PLAIN or not isinstance(x, torch.Tensor)


def _is_observed() -> bool:
    """Whether something traces or transforms calls. A record of `call.plans` is a dispatch mode that does not."""
    if is_compiling() or _tracing() is not None or _transforms_active():
        return True
    modes: int = _dispatch_modes()
    return modes > (recording.tape is not None)


def is_plannable() -> bool:
    """Whether a call runs here and now, so that a plan may serve it."""
    return not _is_observed() and forward_ad._current_level < 0


def is_traced(x: torch.Tensor, *more: torch.Tensor | None) -> bool:
    """Whether a call with these has to go through the custom ops.

    The tensors are on one device. Raises NotImplementedError for a tangent of forward-mode differentiation on a GPU,
    because the kernels have no forward-mode derivative.
    """
    if _is_observed():
        return True
    if forward_ad._current_level >= 0:
        _refuse_tangents((x, *more))
    return type(x) not in _PLAIN or x.is_meta or not _PLAIN.issuperset(map(type, more))


def arrived(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory a kernel may read:

    x, or a copy if x is of a subclass, such as a value that another rank is still sending. For gradients, which may be
    of a subclass.
    """
    return x if type(x) in _PLAIN else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def refuse_tangents_of_an_op(*tensors: torch.Tensor | None) -> None:
    """Raises NotImplementedError for a tangent of forward-mode differentiation, which a custom op would drop."""
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NotImplementedError("flash_attn's custom ops have no forward-mode derivative; take reverse mode")


def _refuse_tangents(tensors: tuple[torch.Tensor | None, ...]) -> None:
    for x in tensors:
        if x is not None and x.is_cuda and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("flash_attn has no forward-mode derivative on a GPU; take reverse mode, or a CPU")
