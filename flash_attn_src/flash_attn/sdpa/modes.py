"""What records a call instead of running it: torch.compile, torch.export, make_fx."""

from __future__ import annotations

from typing import Any

import torch

_KEYS = torch._C._TorchDispatchModeKey
_dispatch_mode = torch._C._get_dispatch_mode
_num_modes = torch._C._len_torch_dispatch_stack
_RECORDED = "torch._subclasses"


def recorder() -> Any:
    """The mode that writes calls into a graph now; None outside of a trace.

    A trace may run a call several times, but it records a call once.
    """
    return _dispatch_mode(_KEYS.PROXY) if _num_modes() else None


def is_symbolic() -> bool:
    """Whether calls run on tensors without data and nothing records them: a compiler asks for shapes alone."""
    return _dispatch_mode(_KEYS.PROXY) is None and _dispatch_mode(_KEYS.FAKE) is not None


def is_stand_in(x: object) -> bool:
    """Whether x is a tensor by which PyTorch traces: a FakeTensor or a FunctionalTensor."""
    return type(x).__module__.startswith(_RECORDED)
