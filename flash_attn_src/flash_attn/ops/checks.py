"""Checks that the layer operations share: TypeError or ValueError naming the argument, what came, what was wanted."""

from __future__ import annotations

import operator

import torch

from flash_attn.call.arguments import check_strided, diagnose_switches, is_number

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_tensor(
    name: str,
    x: torch.Tensor,
    axes: tuple[str, ...] | None = None,
    *,
    like: torch.Tensor | None = None,
    shape: tuple[int, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:
    """x is a tensor, with these axes or this shape, of one of `dtypes` (default: floats; (): any), where `like` is."""
    check_strided(name, x)
    if dtypes is None:
        if x.dtype not in FLOATS and not (x.dtype is torch.float64 and not x.is_cuda):
            raise TypeError(f"{name}: got {x.dtype}, wanted float16, bfloat16 or float32 (float64 on a CPU only)")
    elif dtypes and x.dtype not in dtypes:
        raise TypeError(f"{name}: got {x.dtype}, wanted {' or '.join(str(each) for each in dtypes)}")
    if axes is not None and x.dim() != len(axes):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted ({', '.join(axes)})")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted {shape}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: got a tensor on {x.device}, wanted {like.device}")


def check_number(name: str, value: float, low: float, high: float, *, below: bool = False) -> float:
    """value as a float within low..high, high excluded if `below`; NaN is never."""
    number = value
    if type(value) is not float:
        if isinstance(value, bool) or not is_number(value):
            raise TypeError(f"{name}: got {value!r}, wanted a number")
        # A symbol of torch.compile passes for a float, and stays one: float() would fix its value.
        number = value if isinstance(value, (float, torch.SymInt, torch.SymFloat)) else float(value)
    if not (low <= number < high if below else low <= number <= high):
        raise ValueError(f"{name}: got {value}, wanted {low} to {high}{' (excluded)' if below else ''}")
    return number


def check_int(name: str, value: int, low: int = -(1 << 31), high: int = (1 << 31) - 1) -> int:
    """Returns value, an int or a symbolic int, checked to be within low..high."""
    if isinstance(value, (torch.Tensor, bool)):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted an int")
    try:
        # An int of torch.compile is of that type too. It stays symbolic, as one of torch.export does.
        number = value if type(value) is int or isinstance(value, torch.SymInt) else operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, wanted an int") from None
    if not low <= number <= high:
        raise ValueError(f"{name}: got {number}, wanted {low} to {high}")
    return number


def check_switches(**switches: bool) -> None:
    """Every value is a bool, or something that is equal to one."""
    for name, switch in switches.items():
        if switch is not True and switch is not False:
            diagnose_switches(None, **{name: switch})
