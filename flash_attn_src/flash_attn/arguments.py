"""Checks of the public functions' arguments.

Each check has a fast path that only answers "all as it should be" and, on anything else, a slow one that
finds out what is wrong and raises TypeError or ValueError naming the argument, what came and what was wanted.
"""

from __future__ import annotations

import math
import operator

import torch

MAX_HEAD_DIM = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DENSE = torch.strided
_INT32_MAX = 0x7FFFFFFF


def check_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    return_attn_probs: bool,
) -> tuple[int, int]:
    """The window, -1 where it is open or reaches every key."""
    try:
        batch, seqlen_q, heads, dim = q.shape
        shape_k = k.shape
        batch_k, seqlen_k, heads_k, dim_k = shape_k
        left, right = window_size
        dtype = q.dtype
        device = q.device
        fine = (
            shape_k == v.shape
            and batch == batch_k
            and dim == dim_k
            and 0 < dim <= MAX_HEAD_DIM
            and heads_k > 0
            and heads > 0
            and heads % heads_k == 0
            and dtype is k.dtype
            and dtype is v.dtype
            and dtype in _DTYPES
            and q.layout is k.layout is v.layout is _DENSE
            and device == k.device
            and device == v.device
            and 0.0 <= dropout_p < 1.0
            and softcap >= 0.0
            and type(left) is int
            and type(right) is int
            and alibi_slopes is None
            and type(causal) is bool
            and (softmax_scale is None or (type(softmax_scale) is float and softmax_scale - softmax_scale == 0.0))
            and type(deterministic) is bool
            and type(return_attn_probs) is bool
        )
    except (AttributeError, TypeError, ValueError):
        fine = False
    if not fine:
        _diagnose_tensors(q, k, v, ("batch", "seqlen", "heads", "head_dim"))
        if q.shape[0] != k.shape[0]:
            raise ValueError(f"k: got batch {k.shape[0]}, wanted {q.shape[0]} as q has")
        _diagnose_switches(softmax_scale, causal, deterministic, return_attn_probs)
        left, right = _diagnose_options(q, q.shape[0], dropout_p, window_size, softcap, alibi_slopes)
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if left < 0 or left >= seqlen_k:
        left = -1
    if right < 0 or right >= seqlen_q:
        right = -1
    return left, right


def check_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    return_attn_probs: bool,
    block_table: torch.Tensor | None,
) -> tuple[int, int]:
    """The window as check_dense gives it. max_seqlen_* are ints here: see `as_int`."""
    try:
        _, heads, dim = q.shape
        shape_k = k.shape
        _, heads_k, dim_k = shape_k
        left, right = window_size
        dtype = q.dtype
        device = q.device
        shape_cu = cu_seqlens_q.shape
        fine = (
            shape_k == v.shape
            and dim == dim_k
            and 0 < dim <= MAX_HEAD_DIM
            and heads_k > 0
            and heads > 0
            and heads % heads_k == 0
            and dtype is k.dtype
            and dtype is v.dtype
            and dtype in _DTYPES
            and q.layout is k.layout is v.layout is _DENSE
            and device == k.device
            and device == v.device
            and len(shape_cu) == 1
            and shape_cu[0] > 0
            and shape_cu == cu_seqlens_k.shape
            and cu_seqlens_q.dtype is torch.int32
            and cu_seqlens_k.dtype is torch.int32
            and device == cu_seqlens_q.device
            and device == cu_seqlens_k.device
            and cu_seqlens_q.is_contiguous()
            and cu_seqlens_k.is_contiguous()
            and 0 <= max_seqlen_q <= _INT32_MAX
            and 0 <= max_seqlen_k <= _INT32_MAX
            and 0.0 <= dropout_p < 1.0
            and softcap >= 0.0
            and type(left) is int
            and type(right) is int
            and alibi_slopes is None
            and type(causal) is bool
            and (softmax_scale is None or (type(softmax_scale) is float and softmax_scale - softmax_scale == 0.0))
            and type(deterministic) is bool
            and type(return_attn_probs) is bool
            and block_table is None
        )
    except (AttributeError, TypeError, ValueError):
        fine = False
    if not fine:
        axes = ("total_k", "heads", "head_dim")
        axes_k = axes if block_table is None else ("pages", "page_size", "heads", "head_dim")
        _diagnose_tensors(q, k, v, ("total_q", "heads", "head_dim"), axes_k)
        _check_index("cu_seqlens_q", cu_seqlens_q, q, 1)
        _check_index("cu_seqlens_k", cu_seqlens_k, q, 1)
        if cu_seqlens_q.numel() == 0 or cu_seqlens_q.shape != cu_seqlens_k.shape:
            raise ValueError(
                f"cu_seqlens_q, cu_seqlens_k: got {cu_seqlens_q.numel()} and {cu_seqlens_k.numel()} "
                "elements, wanted batch + 1 each"
            )
        batch = cu_seqlens_q.numel() - 1
        for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if not 0 <= longest <= _INT32_MAX:
                raise ValueError(f"{name}: got {longest}, wanted 0 to 2**31 - 1")
        if block_table is not None:
            check_block_table(block_table, q, batch)
        _diagnose_switches(softmax_scale, causal, deterministic, return_attn_probs)
        left, right = _diagnose_options(q, batch, dropout_p, window_size, softcap, alibi_slopes)
    if left < 0 or left >= max_seqlen_k:
        left = -1
    if right < 0 or right >= max_seqlen_q:
        right = -1
    return left, right


def check_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    dtypes: tuple[torch.dtype, ...] = _DTYPES,
) -> tuple[int, int]:
    """The window, -1 where open; arguments as in flash_attn_with_kvcache, cache_seqlens an int, a tensor or None.

    The last ones are those of FlashAttention-3's interface, and the types that it takes.
    """
    try:
        left, right = window_size
        batch, _, heads, dim = q.shape
        shape = k_cache.shape
        batch_cache, _, heads_k, dim_k = shape
        dtype = q.dtype
        device = q.device
        fine = (
            shape == v_cache.shape
            and dim == dim_k
            and 0 < dim <= MAX_HEAD_DIM
            and heads_k > 0
            and heads > 0
            and heads % heads_k == 0
            and dtype is k_cache.dtype
            and dtype is v_cache.dtype
            and dtype in _DTYPES
            and device == k_cache.device
            and device == v_cache.device
            and k_cache.stride(3) == 1
            and v_cache.stride(3) == 1
            and softcap >= 0.0
            and type(left) is int
            and type(right) is int
            and rotary_cos is None
            and rotary_sin is None
            and cache_leftpad is None
            and alibi_slopes is None
            and cu_seqlens_q is None
            and cu_seqlens_k_new is None
            and rotary_seqlens is None
            and (type(cache_seqlens) is int or _is_index(cache_seqlens, (batch,), device))
            and (
                (batch_cache == batch if cache_batch_idx is None else _is_index(cache_batch_idx, (batch,), device))
                if block_table is None
                else cache_batch_idx is None and _is_index(block_table, (batch, block_table.shape[1]), device)
            )
            and (
                v is None
                if k is None
                else k.shape == v.shape
                and k.dtype is dtype
                and v.dtype is dtype
                and k.device == device
                and v.device == device
                and k.shape == (batch, k.shape[1], heads_k, dim)
            )
        )
    except (AttributeError, IndexError, TypeError, ValueError):
        fine = False
    if fine:
        return max(left, -1), max(right, -1)
    axes = ("batch", "seqlen", "heads", "head_dim")
    paged = block_table is not None
    axes_cache = ("pages", "page_size", "heads", "head_dim") if paged else axes
    axes_q = axes if cu_seqlens_q is None else ("total_q", "heads", "head_dim")
    _diagnose_tensors(q, k_cache, v_cache, axes_q, axes_cache, "k_cache", "v_cache", dtypes)
    batch = q.shape[0]
    if cu_seqlens_q is not None:
        _check_index("cu_seqlens_q", cu_seqlens_q, q, 1)
        if max_seqlen_q is None:
            raise ValueError("max_seqlen_q: got None, wanted the longest length, as cu_seqlens_q is given")
        batch = cu_seqlens_q.shape[0] - 1
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(-1) != 1:
            raise ValueError(f"{name}: got stride {cache.stride(-1)} in its last dimension, wanted 1: it is "
                             "written in place")  # fmt: skip
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: got a tensor, wanted None with block_table")
        check_block_table(block_table, q, batch)
    elif cache_batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(f"k_cache: got batch {k_cache.shape[0]}, wanted {batch} as q has, or cache_batch_idx")
    for name, index in (
        ("cache_seqlens", cache_seqlens),
        ("cache_batch_idx", cache_batch_idx),
        ("cache_leftpad", cache_leftpad),
        ("rotary_seqlens", rotary_seqlens),
    ):
        if index is not None and not isinstance(index, int):
            _check_index(name, index, q, 1)
            if index.shape[0] != batch:
                raise ValueError(f"{name}: got {index.shape[0]} elements, wanted {batch}, the batch of q")
    if (k is None) != (v is None):
        raise ValueError("k, v: got only one of them, wanted both or neither")
    if k is None and cu_seqlens_k_new is not None:
        raise ValueError("cu_seqlens_k_new: got a tensor, wanted None without k and v to append")
    if rotary_seqlens is not None and rotary_cos is None:
        raise ValueError("rotary_seqlens: got a tensor, wanted None without rotary_cos and rotary_sin")
    if k is not None and v is not None:
        axes_new = axes if cu_seqlens_k_new is None else ("total_new", "heads", "head_dim")
        _diagnose_tensors(q, k, v, axes_q, axes_new, dtypes=dtypes)
        if cache_seqlens is None:
            raise ValueError("cache_seqlens: got None, wanted the place where k and v go")
        if cu_seqlens_k_new is not None:
            _check_index("cu_seqlens_k_new", cu_seqlens_k_new, q, 1)
            if cu_seqlens_k_new.shape[0] != batch + 1:
                raise ValueError(
                    f"cu_seqlens_k_new: got {cu_seqlens_k_new.shape[0]} elements, wanted batch + 1 = {batch + 1}"
                )
            if k.shape[1] != k_cache.shape[2]:
                raise ValueError(f"k: got {k.shape[1]} heads, wanted {k_cache.shape[2]} as k_cache has")
        elif k.shape[0] != batch or k.shape[2] != k_cache.shape[2]:
            raise ValueError(
                f"k: got shape {tuple(k.shape)}, wanted batch {batch} and {k_cache.shape[2]} heads, "
                "those of q and k_cache"
            )
    _check_rotary(q, k, rotary_cos, rotary_sin)
    return _diagnose_options(q, batch, 0.0, window_size, softcap, alibi_slopes)


def check_block_table(block_table: torch.Tensor, q: torch.Tensor, batch: int) -> None:
    """int32 (batch, pages), last dimension dense."""
    _check_index("block_table", block_table, q, 2)
    if block_table.shape[0] != batch:
        raise ValueError(f"block_table: got {block_table.shape[0]} rows, wanted {batch}, one a sequence")


def check_packed(name: str, packed: torch.Tensor, ndim: int, parts: int) -> None:
    """A packed tensor of `ndim` dimensions has `parts` in its third from last one."""
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name}: got {type(packed).__name__}, wanted a tensor")
    if packed.dim() != ndim or packed.shape[-3] != parts:
        wanted = ("batch, seqlen" if ndim == 5 else "total") + f", {parts}, heads, head_dim"
        raise ValueError(f"{name}: got shape {tuple(packed.shape)}, wanted ({wanted})")


def as_int(name: str, value: int | torch.Tensor) -> int:
    """A length given as an int or as a tensor of one element, which is read (on a GPU that synchronises)."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_floating_point():
            raise ValueError(f"{name}: got a {value.dtype} tensor of shape {tuple(value.shape)}, wanted one int")
        return int(value.item())
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, wanted an int or a tensor of one") from None


def _diagnose_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axes_q: tuple[str, ...],
    axes_k: tuple[str, ...] | None = None,
    name_k: str = "k",
    name_v: str = "v",
    dtypes: tuple[torch.dtype, ...] = _DTYPES,
) -> None:
    axes_k = axes_k or axes_q
    for name, x, axes in (("q", q, axes_q), (name_k, k, axes_k), (name_v, v, axes_k)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, wanted a tensor")
        if x.layout is not _DENSE:
            raise TypeError(f"{name}: got a tensor of layout {x.layout}, wanted a dense one")
        if x.dim() != len(axes):
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted ({', '.join(axes)})")
        if x.dtype not in dtypes and not (x.dtype is torch.float64 and x.is_cpu):
            raise TypeError(f"{name}: got {x.dtype}, wanted float16, bfloat16 or float32 (float64 on a CPU only)")
        if x.dtype is not q.dtype:
            raise TypeError(f"{name}: got {x.dtype}, wanted {q.dtype} as q has")
        if x.device != q.device:
            raise ValueError(f"{name}: got a tensor on {x.device}, wanted {q.device} where q is")
        if x.shape[-1] != q.shape[-1]:
            raise ValueError(f"{name}: got head_dim {x.shape[-1]}, wanted {q.shape[-1]} as q has")
    if not 0 < q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"q: got head_dim {q.shape[-1]}, wanted 1 to {MAX_HEAD_DIM}")
    if v.shape != k.shape:
        raise ValueError(f"{name_v}: got shape {tuple(v.shape)}, wanted {tuple(k.shape)} as {name_k} has")
    heads, heads_k = q.shape[-2], k.shape[-2]
    if heads == 0 or heads_k == 0 or heads % heads_k:
        raise ValueError(f"q: got {heads} heads, wanted a positive multiple of the {heads_k} of {name_k}")


def _diagnose_options(
    q: torch.Tensor,
    batch: int,
    dropout_p: float,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> tuple[int, int]:
    for name, number in (("dropout_p", dropout_p), ("softcap", softcap)):
        if isinstance(number, str) or not hasattr(number, "__float__"):
            raise TypeError(f"{name}: got {number!r}, wanted a float")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {dropout_p}, wanted 0 <= dropout_p < 1")
    if not 0.0 <= softcap < float("inf"):
        raise ValueError(f"softcap: got {softcap}, wanted 0 (off) or a positive number")
    try:
        left, right = (operator.index(edge) for edge in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size: got {window_size!r}, wanted two ints (left, right), -1 open") from None
    if alibi_slopes is not None:
        if not isinstance(alibi_slopes, torch.Tensor) or alibi_slopes.dtype is not torch.float32:
            got = getattr(alibi_slopes, "dtype", type(alibi_slopes).__name__)
            raise TypeError(f"alibi_slopes: got {got}, wanted a float32 tensor")
        heads = q.shape[-2]
        if alibi_slopes.shape not in ((heads,), (batch, heads)):
            raise ValueError(
                f"alibi_slopes: got shape {tuple(alibi_slopes.shape)}, wanted ({heads},) or ({batch}, {heads})"
            )
        if alibi_slopes.device != q.device:
            raise ValueError(f"alibi_slopes: got a tensor on {alibi_slopes.device}, wanted {q.device} where q is")
        if alibi_slopes.stride(-1) != 1 and heads > 1:
            raise ValueError(f"alibi_slopes: got stride {alibi_slopes.stride(-1)} in its last dimension, wanted 1")
    return max(left, -1), max(right, -1)


def _is_index(index: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> bool:
    return (
        index is not None
        and index.shape == shape
        and index.dtype is torch.int32
        and index.device == device
        and index.stride(-1) == 1
    )


def _diagnose_switches(softmax_scale: float | None, causal: bool, deterministic: bool, return_attn_probs: bool) -> None:
    if softmax_scale is not None:
        if isinstance(softmax_scale, (str, bool)) or not hasattr(softmax_scale, "__float__"):
            raise TypeError(f"softmax_scale: got {softmax_scale!r}, wanted a float or None")
        if not -math.inf < softmax_scale < math.inf:
            raise ValueError(f"softmax_scale: got {softmax_scale}, wanted a finite number")
    for name, switch in (
        ("causal", causal),
        ("deterministic", deterministic),
        ("return_attn_probs", return_attn_probs),
    ):
        # 0, 1 and numpy's bool pass for False and True; a string, which is true whatever it says, does not.
        if isinstance(switch, (str, bytes)) or switch not in (False, True):
            raise TypeError(f"{name}: got {switch!r}, wanted a bool")


def _check_index(name: str, index: torch.Tensor, q: torch.Tensor, ndim: int) -> None:
    if not isinstance(index, torch.Tensor):
        raise TypeError(f"{name}: got {type(index).__name__}, wanted an int32 tensor")
    if index.dtype is not torch.int32:
        raise TypeError(f"{name}: got {index.dtype}, wanted int32")
    if index.dim() != ndim:
        raise ValueError(f"{name}: got shape {tuple(index.shape)}, wanted {ndim} dimension{'s' * (ndim > 1)}")
    if index.device != q.device:
        raise ValueError(f"{name}: got a tensor on {index.device}, wanted {q.device} where q is")
    if index.numel() and index.stride(-1) != 1 and index.shape[-1] > 1:
        raise ValueError(f"{name}: got stride {index.stride(-1)} in its last dimension, wanted 1")


def _check_rotary(q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None) -> None:
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos, rotary_sin: got only one of them, wanted both or neither")
    if cos is None or sin is None:
        return
    if k is None:
        raise ValueError("rotary_cos: got a tensor, wanted None without k and v to append")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, torch.Tensor):
            raise TypeError(f"{name}: got {type(table).__name__}, wanted a tensor")
        if table.layout is not _DENSE:
            raise TypeError(f"{name}: got a tensor of layout {table.layout}, wanted a dense one")
        if table.dtype is not q.dtype:
            raise TypeError(f"{name}: got {table.dtype}, wanted {q.dtype} as q has")
        if table.device != q.device:
            raise ValueError(f"{name}: got a tensor on {table.device}, wanted {q.device} where q is")
        if table.dim() != 2 or not 0 < 2 * table.shape[1] <= q.shape[-1]:
            raise ValueError(
                f"{name}: got shape {tuple(table.shape)}, wanted (places, rotary_dim / 2) with "
                f"rotary_dim at most {q.shape[-1]}"
            )
    if cos.shape != sin.shape:
        raise ValueError(f"rotary_sin: got shape {tuple(sin.shape)}, wanted {tuple(cos.shape)} as rotary_cos has")
