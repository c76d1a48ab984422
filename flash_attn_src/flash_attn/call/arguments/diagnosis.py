"""What is wrong with an argument: the slow paths of the checks, each raises TypeError or ValueError."""

from __future__ import annotations

import numbers
import operator

import torch

from flash_attn.kernels.flags import OPEN_WINDOW

MAX_HEAD_DIM = 512
INT32_MAX = 0x7FFFFFFF
# Kernels compute in fp32. It holds these sizes of a scale or a cap, with room for a factor of log2(e), and rounds a
# probability from BELOW_ONE on to 1.
LEAST, MOST = 2.0**-126, 2.0**127
# The kernels' tanh errs by 2**-23, a score by softcap times as much: here by the rounding of an fp16 score of 1.
MOST_SOFTCAP = 4096.0
BELOW_ONE = 1.0 - 2.0**-25
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DENSE = torch.strided


def is_number(value: object) -> bool:
    """Whether value is a number or a symbolic number.

    torch.compile does not allow reading attributes of its symbols.
    """
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return True
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return not isinstance(value, (str, bytes)) and hasattr(value, "__float__") and getattr(value, "size", 1) == 1


def as_int(name: str, value: int | torch.Tensor) -> int:
    """A length given as an int or as a tensor of one element, which is read (on a GPU that synchronises)."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_floating_point():
            raise ValueError(f"{name}: got a {value.dtype} tensor of shape {tuple(value.shape)}, wanted one int")
        number = value.item()
        return number if isinstance(number, torch.SymInt) else int(number)
    if type(value) is int or isinstance(value, torch.SymInt):  # index() would fix a symbol's value
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, wanted an int or a tensor of one") from None


def check_strided(name: str, x: torch.Tensor, wanted: str = "a tensor") -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, wanted {wanted}")
    if x.is_nested:  # torch itself refuses to tell its shape
        raise TypeError(
            f"{name}: got a nested tensor, wanted a dense one: its values() and offsets(), as cu_seqlens, are packed "
            "sequences"
        )
    if x.layout is not DENSE:
        raise TypeError(f"{name}: got a tensor of layout {x.layout}, wanted a dense one")


def diagnose_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axes_q: tuple[str, ...],
    axes_k: tuple[str, ...] | None = None,
    name_k: str = "k",
    name_v: str = "v",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    dtype_k: torch.dtype | None = None,
    why_q: str = "",
    why_k: str = "",
) -> None:
    """dtype_k: the type of k and v where it is not the type of q. why_q, why_k: arguments that ask for these axes."""
    axes_k = axes_k or axes_q
    for name, x, axes, why in (("q", q, axes_q, why_q), (name_k, k, axes_k, why_k), (name_v, v, axes_k, why_k)):
        check_strided(name, x)
        if x.dim() != len(axes):
            with_ = f" with {why}" if why else ""
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted ({', '.join(axes)}){with_}")
        if dtype_k is not None and x is not q:
            if x.dtype is not dtype_k:
                raise TypeError(f"{name}: got {x.dtype}, wanted {dtype_k} as {name_k} has")
        elif x.dtype not in dtypes and not (x.dtype is torch.float64 and x.is_cpu):
            raise TypeError(f"{name}: got {x.dtype}, wanted float16, bfloat16 or float32 (float64 on a CPU only)")
        elif x.dtype is not q.dtype:
            raise TypeError(f"{name}: got {x.dtype}, wanted {q.dtype} as q has")
        if x.device != q.device:
            raise ValueError(f"{name}: got a tensor on {x.device}, wanted {q.device} where q is")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{name_k}: got head_dim {k.shape[-1]}, wanted {q.shape[-1]} as q has")
    for name, x in (("q", q), (name_v, v)):
        if not 0 < x.shape[-1] <= MAX_HEAD_DIM:
            view = ""
            if "cache" in name_k:  # torch.compile may trace the check and leave the error to eager mode
                view = (
                    f", or {name_v} as a view of the first columns of {name_k}, which is not seen under torch.compile: "
                    "@torch.compiler.disable the function that calls it"
                )
            raise ValueError(f"{name}: got head_dim {x.shape[-1]}, wanted 1 to {MAX_HEAD_DIM}{view}")
    if v.shape[:-1] != k.shape[:-1]:
        shape = (*k.shape[:-1], v.shape[-1])
        raise ValueError(f"{name_v}: got shape {tuple(v.shape)}, wanted {shape}: all but head_dim as {name_k} has")
    heads, heads_k = q.shape[-2], k.shape[-2]
    if heads == 0 or heads_k == 0 or heads % heads_k:
        raise ValueError(f"q: got {heads} heads, wanted a positive multiple of the {heads_k} of {name_k}")


def refuse_gradients(**constants: object) -> None:
    """Raises ValueError for a tensor that requires a gradient, which this call would not compute."""
    for name, x in constants.items():
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            remedy = (
                "multiply q by the tensor and pass softmax_scale=1.0, or detach it" if "scale" in name else "detach it"
            )
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, wanted a tensor "
                f"that does not, because this function computes no gradient for it: "
                f"{remedy}, or call under torch.no_grad()"
            )


def _is_fraction(value: object) -> bool:
    """Whether value is a number of a type that has fractions, such as 1.0."""
    if type(value) is bool:
        return False
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)


def diagnose_switches(softmax_scale: float | None, **switches: bool) -> None:
    """Raises TypeError or ValueError unless softmax_scale is None or a number that fp32 can hold, and unless every
    switch is a bool."""
    if softmax_scale is not None:
        if isinstance(softmax_scale, bool) or not is_number(softmax_scale):
            raise TypeError(f"softmax_scale: got {softmax_scale!r}, wanted a float or None")
        if not (softmax_scale == 0.0 or LEAST <= abs(softmax_scale) <= MOST):
            raise ValueError(
                f"softmax_scale: got {softmax_scale}, wanted 0 or 2**-126 to 2**127 of either sign, as fp32 holds"
            )
    for name, switch in switches.items():
        # Accepts 0, 1 and numpy's bool as False and True, but no string, because every non-empty string is true, and no
        # fraction, which stands in the place of another argument.
        try:
            fine = not _is_fraction(switch) and not isinstance(switch, (str, bytes)) and switch in (False, True)
        except (RuntimeError, TypeError, ValueError):  # of several elements
            fine = False
        if not fine:
            raise TypeError(f"{name}: got {switch!r}, wanted a bool")


def check_whole(**values: int) -> None:
    """Raises unless every value is an int from 0 to 2**31 - 1."""
    for name, value in values.items():
        if not 0 <= as_int(name, value) <= INT32_MAX:
            raise ValueError(f"{name}: got {value}, wanted 0 to 2**31 - 1")


def check_num_splits(num_splits: int, block_table: torch.Tensor | None) -> None:
    """num_splits of packed sequences, which concerns speed alone; as upstream, RuntimeError above 1 with pages."""
    check_whole(num_splits=num_splits)
    if num_splits > 1 and block_table is not None:
        raise RuntimeError(f"num_splits: got {num_splits}, num_splits > 1 is not supported with block_table, pass 0")


def check_window(window_size: tuple[int, int]) -> tuple[int, int]:
    """(left, right), -1 where open: negative, or wider than any sequence."""
    try:
        left, right = (operator.index(edge) for edge in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size: got {window_size!r}, wanted two ints (left, right), -1 open") from None
    return (left if 0 <= left < OPEN_WINDOW else -1), (right if 0 <= right < OPEN_WINDOW else -1)


def check_index(name: str, index: torch.Tensor, q: torch.Tensor, ndim: int) -> None:
    check_strided(name, index, "an int32 tensor")
    if index.dtype is not torch.int32:
        raise TypeError(f"{name}: got {index.dtype}, wanted int32")
    if index.dim() != ndim:
        raise ValueError(f"{name}: got shape {tuple(index.shape)}, wanted {ndim} dimension{'s' * (ndim > 1)}")
    if index.device != q.device:
        raise ValueError(f"{name}: got a tensor on {index.device}, wanted {q.device} where q is")
    if index.numel() and index.stride(-1) != 1 and index.shape[-1] > 1:
        raise ValueError(f"{name}: got stride {index.stride(-1)} in its last dimension, wanted 1")


def check_block_table(block_table: torch.Tensor, q: torch.Tensor, batch: int) -> None:
    """int32 (batch, pages), last dimension dense."""
    check_index("block_table", block_table, q, 2)
    if block_table.shape[0] != batch:
        raise ValueError(f"block_table: got {block_table.shape[0]} rows, wanted {batch}, one a sequence")


def check_per_sequence(q: torch.Tensor, count: int, **indexes: torch.Tensor | None) -> None:
    """Every index that is not None is int32 (count,)."""
    for name, index in indexes.items():
        if index is not None:
            check_index(name, index, q, 1)
            if index.shape[0] != count:
                raise ValueError(f"{name}: got {index.shape[0]} elements, wanted {count}, the batch size of q")


def check_alike(name: str, x: torch.Tensor, like: torch.Tensor, like_name: str, head_dim: int | None = None) -> None:
    """x is dense, with the shape, dtype and device of `like`, but for its last dimension where a head_dim is given."""
    check_strided(name, x)
    shape = tuple(like.shape) if head_dim is None else (*like.shape[:-1], head_dim)
    if x.dtype is not like.dtype or tuple(x.shape) != shape or x.device != like.device:
        raise ValueError(
            f"{name}: got {x.dtype} {tuple(x.shape)} on {x.device}, wanted {like.dtype} {shape} "
            f"on {like.device} as {like_name} is"
        )
