"""What is wrong with the options of a call: the slow paths of the checks. Each raises TypeError or ValueError.

An option that is a tensor is checked by its axes, so a new one needs no check of its own here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.compiler import is_compiling

from flash_attn.call.arguments.diagnosis import (
    BELOW_ONE,
    DTYPES,
    LEAST,
    MAX_HEAD_DIM,
    MOST,
    MOST_SOFTCAP,
    check_strided,
    check_window,
    is_number,
    refuse_gradients,
)
from flash_attn.call.options import FIELDS, Options


def are_fine(
    options: Options, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int, seqlen_k: int | None = None
) -> bool:
    """Whether the tensors and the options need no diagnosis, for the fast checks. May raise for wrong ones, too."""
    *_, heads, dim = q.shape
    shape_k, shape_v, dtype, device = k.shape, v.shape, q.dtype, q.device
    *_, heads_k, dim_k = shape_k
    left, right = options.window_size
    softcap, scale = options.softcap, options.softmax_scale
    return (
        (shape_k == shape_v or (shape_k[:-1] == shape_v[:-1] and 0 < shape_v[-1] <= MAX_HEAD_DIM))
        and dim == dim_k
        and 0 < dim <= MAX_HEAD_DIM
        and heads_k > 0
        and heads > 0
        and heads % heads_k == 0
        and dtype is k.dtype
        and dtype is v.dtype
        and dtype in DTYPES
        and q.layout is k.layout is v.layout is torch.strided
        and device == k.device
        and device == v.device
        and 0.0 <= options.dropout_p < BELOW_ONE
        and (softcap == 0.0 or LEAST <= softcap <= MOST_SOFTCAP)
        and type(left) is int
        and type(right) is int
        and _are_tensors_fine(options, q, batch, seqlen_k)
        and type(options.causal) is bool
        and (scale is None or (type(scale) is float and LEAST <= scale <= MOST))
    )


def _are_tensors_fine(options: Options, q: torch.Tensor, batch: int, seqlen_k: int | None) -> bool:
    """Raises what `_check_tensors` does. False for a traced call, since Dynamo would trace how a fast check catches
    that."""
    for name in FIELDS[type(options)].axes:
        if getattr(options, name) is not None:
            if is_compiling():
                return False
            _check_tensors(options, q, batch, seqlen_k)
            break
    return True


def diagnose_options(options: Options, q: torch.Tensor, batch: int, seqlen_k: int | None = None) -> tuple[int, int]:
    """The window of a call, whose q is checked. seqlen_k: keys of each sequence of a dense call, else None."""
    for name in ("dropout_p", "softcap"):
        number = getattr(options, name)
        if not is_number(number):
            raise TypeError(f"{name}: got {number!r}, wanted a float")
    if not 0.0 <= options.dropout_p < BELOW_ONE:
        raise ValueError(f"dropout_p: got {options.dropout_p}, wanted 0 <= dropout_p < 1 in fp32")
    softcap = options.softcap
    if not (softcap == 0.0 or LEAST <= softcap <= MOST_SOFTCAP):
        raise ValueError(f"softcap: got {softcap}, wanted 0 (off) or 2**-126 to {MOST_SOFTCAP:g}")
    window = check_window(options.window_size)
    _check_tensors(options, q, batch, seqlen_k)
    return window


def _check_tensors(options: Options, q: torch.Tensor, batch: int, seqlen_k: int | None) -> None:
    kind = FIELDS[type(options)]
    for name, axes in kind.axes.items():
        x = getattr(options, name)
        if x is None:
            continue
        _check_dtype(name, x, q, kind.dtypes[name])
        _BY_AXES[axes](name, x, q, batch, seqlen_k)
        if x.device != q.device:
            raise ValueError(f"{name}: got a tensor on {x.device}, wanted {q.device} where q is")
        if name not in kind.learned:
            refuse_gradients(**{name: x})
    if options.attn_bias is not None:
        _diagnose_beside_bias(options)


def _check_dtype(name: str, x: torch.Tensor, q: torch.Tensor, dtype: str) -> None:
    """Raises TypeError unless x is a tensor of a type that its option names: see `options._tensor`."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, wanted a tensor")
    types: tuple[torch.dtype, ...] = (torch.float32,)
    expected = "a float32 tensor"
    if dtype == "float":
        types, expected = DTYPES, "float16, bfloat16 or float32"
        if q.dtype is torch.float64:
            types = (*types, torch.float64)
    elif dtype == "q or fp32":
        types, expected = (q.dtype, torch.float32), f"{q.dtype} as q has, or float32"
    if x.dtype not in types:
        raise TypeError(f"{name}: got {x.dtype}, wanted {expected}")


def _of_batch_and_heads(name: str, x: torch.Tensor, q: torch.Tensor, batch: int, _: int | None) -> None:
    heads = q.shape[-2]
    shape = tuple(x.shape)  # torch.compile takes no `in` of symbolic shapes
    if shape != (heads,) and shape != (batch, heads):
        raise ValueError(f"{name}: got shape {shape}, wanted ({heads},) or ({batch}, {heads})")
    if x.stride(-1) != 1 and heads > 1:
        raise ValueError(f"{name}: got stride {x.stride(-1)} in its last dimension, wanted 1")


def _of_heads(name: str, x: torch.Tensor, q: torch.Tensor, _batch: int, _seqlen_k: int | None) -> None:
    check_strided(name, x)
    if x.dim() != 1 or x.shape[0] != q.shape[-2]:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted ({q.shape[-2]},), a number for each head of q")


def _of_scores(name: str, x: torch.Tensor, q: torch.Tensor, batch: int, seqlen_k: int | None) -> None:
    check_strided(name, x)
    if seqlen_k is None:
        raise NotImplementedError(f"{name}: got a tensor for packed sequences or a cache, wanted None there")
    _, seqlen_q, heads, _ = q.shape
    shape = tuple(x.shape)
    distances = max(seqlen_q + seqlen_k - 1, 0)
    fits = len(shape) == 4 and shape[2] == seqlen_q and shape[3] == seqlen_k
    fits = fits or (len(shape) == 3 and shape[2] == distances)
    if not fits or (shape[0] != 1 and shape[0] != batch) or (shape[1] != 1 and shape[1] != heads):
        planes = f"1 or {batch}, 1 or {heads}"
        raise ValueError(
            f"{name}: got shape {shape}, wanted ({planes}, {seqlen_q}, {seqlen_k}) for a bias of each score, or "
            f"({planes}, {distances}) for a table of distances: (1 or batch, 1 or heads, seqlen_q + seqlen_k - 1)"
        )


_BY_AXES: dict[str, Callable[[str, torch.Tensor, torch.Tensor, int, int | None], None]] = {
    "batch heads": _of_batch_and_heads,
    "heads": _of_heads,
    "scores": _of_scores,
}


def _diagnose_beside_bias(options: Options) -> None:
    if options.dropout_p > 0.0:
        raise NotImplementedError(
            f"attn_bias: got a bias and dropout_p {options.dropout_p}, wanted dropout_p=0 with a bias"
        )
    if options.alibi_slopes is not None:
        raise NotImplementedError("attn_bias: got a bias and alibi_slopes, wanted one of them: add ALiBi to the bias")
