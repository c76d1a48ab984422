"""SageAttention's functions by name and signature (2.2), on the kernels of flash_attn.

One kernel serves all of them: attention with INT8 queries and keys, and with 16 bits for weights and values
(`flash_attn.int8`). It is as precise as the most precise of SageAttention's kernels, whose options choose the precision
of weights and values: they are checked, and change nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from flash_attn import flash_attn_func
from flash_attn.call.arguments.diagnosis import check_strided, diagnose_switches
from flash_attn.call.tracing import refuse_transforms
from flash_attn.int8 import attend, flash_attn_varlen_int8_func, refuse_derivatives
from flash_attn.sdpa.attention import as_bias

_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_AXES = {"HND": ("batch", "heads", "seqlen", "head_dim"), "NHD": ("batch", "seqlen", "heads", "head_dim")}
# Options of SageAttention's kernels that have no counterpart here -> their values.
_PRECISIONS: dict[str, tuple[object, ...]] = {
    "pv_accum_dtype": ("fp32", "fp16", "fp16+fp32", "fp32+fp16", "fp32+fp32"),
    "qk_quant_gran": ("per_block", "per_warp", "per_thread"),
    "quantization_backend": ("triton", "cuda"),
    "smooth_v": (False, True),
}


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    **kwargs: Any,
) -> _Result:
    """Attention with INT8 queries and keys: `flash_attn.int8`, which has the errors and the GPUs.

    q, k, v: fp16 or bf16, head dims up to 128, (batch, heads, seqlen, head_dim) with tensor_layout "HND",
    (batch, seqlen, heads, head_dim) with "NHD". sm_scale: 1 / sqrt(head_dim) by default. Returns the output in the
    layout of q; with return_lse also the logsumexp, fp32 (batch, heads, seqlen_q).

    kwargs: smooth_k (True), subtract the mean key. attn_mask, boolean (True: the key is seen) or additive, which
    broadcasts to (batch, heads, seqlen_q, seqlen_k): flash_attn_func serves it, with 16 bits for all tensors, on every
    GPU. scale and softmax_scale, other names of sm_scale; causal, of is_causal. enable_gqa: heads of k and v may be
    fewer in any case. dropout_p has to be 0. pv_accum_dtype, qk_quant_gran, quantization_backend, smooth_v: see above.
    Other names may be None, False or 0, and window_size (-1, -1).

    ValueError for another layout or value, and for is_causal with a mask or with different numbers of queries and keys.
    NotImplementedError for dropout_p. TypeError for another argument.
    """
    return _dense(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, kwargs)


def sageattn_qk_int8_pv_fp16_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    **kwargs: Any,
) -> _Result:
    """sageattn with the arguments of SageAttention's function of this name."""
    named = {"quantization_backend": quantization_backend, "attn_mask": attn_mask, "smooth_k": smooth_k}
    return _dense(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, {**named, **kwargs})


def sageattn_qk_int8_pv_fp16_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    **kwargs: Any,
) -> _Result:
    """sageattn with the arguments of SageAttention's function of this name. It runs no CUDA."""
    named = {
        "qk_quant_gran": qk_quant_gran,
        "pv_accum_dtype": pv_accum_dtype,
        "smooth_k": smooth_k,
        "smooth_v": smooth_v,
    }
    return _dense(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, {**named, **kwargs})


def sageattn_qk_int8_pv_fp8_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    **kwargs: Any,
) -> _Result:
    """sageattn with the arguments of SageAttention's function of this name. Values keep 16 bits, it runs no CUDA."""
    named = {
        "qk_quant_gran": qk_quant_gran,
        "pv_accum_dtype": pv_accum_dtype,
        "smooth_k": smooth_k,
        "smooth_v": smooth_v,
    }
    return _dense(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, {**named, **kwargs})


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    **kwargs: Any,
) -> _Result:
    """sageattn with the arguments of SageAttention's function of this name. Values keep 16 bits, it runs no CUDA."""
    named = {"qk_quant_gran": qk_quant_gran, "pv_accum_dtype": pv_accum_dtype, "smooth_k": smooth_k}
    return _dense(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, {**named, **kwargs})


def sageattn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """Packed sequences: q (total_q, heads, head_dim), k and v (total_k, heads_k, head_dim), like q for the result.

    `flash_attn.int8.flash_attn_varlen_int8_func`, one sequence after the other. kwargs as in sageattn, without
    attn_mask. is_causal aligns the last query and the last key of each sequence.
    """
    options = _options({**kwargs, "smooth_k": smooth_k}, sm_scale, is_causal)
    if options.attn_mask is not None:
        raise NotImplementedError("attn_mask: got a mask, wanted None with packed sequences: call sageattn")
    return flash_attn_varlen_int8_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options.sm_scale, options.is_causal,
        options.smooth_k,
    )  # fmt: skip


class _Options(NamedTuple):
    """Keyword arguments by their meaning here."""

    attn_mask: torch.Tensor | None
    sm_scale: float | None
    is_causal: bool
    smooth_k: bool


def _options(arguments: dict[str, Any], sm_scale: float | None, is_causal: bool) -> _Options:
    """The keyword arguments of a call. Raises for a value that would be ignored."""
    for name, value in arguments.items():
        if name == "dropout_p":
            if value:
                raise NotImplementedError(f"dropout_p: got {value}, wanted 0: call scaled_dot_product_attention")
        elif name in _PRECISIONS:
            if not any(type(value) is type(known) and value == known for known in _PRECISIONS[name]):
                raise ValueError(f"{name}: got {value!r}, wanted one of {', '.join(map(str, _PRECISIONS[name]))}")
        elif name in ("scale", "softmax_scale"):
            if value is not None and sm_scale is not None and value != sm_scale:
                raise TypeError(f"{name}, sm_scale: got {value} and {sm_scale}, wanted one of them")
            sm_scale = value if sm_scale is None else sm_scale
        elif name == "causal":
            diagnose_switches(None, causal=value)
            is_causal = bool(value) or is_causal
        elif name not in ("attn_mask", "smooth_k", "enable_gqa") and not _changes_nothing(name, value):
            raise TypeError(f"sageattention got an unexpected keyword argument {name!r}, which no kernel here honours")
    return _Options(arguments.get("attn_mask"), sm_scale, is_causal, arguments.get("smooth_k", True))


def _changes_nothing(name: str, value: object) -> bool:
    """Whether a value stands for an option that is off."""
    if name == "window_size":
        return value is None or value == (-1, -1)
    return value is None or (isinstance(value, (bool, int, float)) and not value)


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float | None,
    return_lse: bool,
    options: dict[str, Any],
) -> _Result:
    axes = _AXES.get(tensor_layout) if isinstance(tensor_layout, str) else None
    if axes is None:
        raise ValueError(f"tensor_layout: got {tensor_layout!r}, wanted one of {', '.join(_AXES)}")
    attn_mask, sm_scale, is_causal, smooth_k = _options(options, sm_scale, is_causal)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_strided(name, x)
        if x.dim() != len(axes):
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted ({', '.join(axes)}) with {tensor_layout}")
    diagnose_switches(None, is_causal=is_causal, return_lse=return_lse, smooth_k=smooth_k)
    heads_first = tensor_layout == "HND"
    if heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if is_causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"is_causal: got {q.shape[1]} queries and {k.shape[1]} keys, wanted as many queries as keys")
    if attn_mask is None:
        out, lse = attend(q, k, v, sm_scale, is_causal, smooth_k, return_lse, heads_first)
    else:
        if is_causal:
            raise ValueError("is_causal: got True and attn_mask, wanted one of them")
        out, lse = _masked(q, k, v, attn_mask, sm_scale)
        out = out.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else out
    out = out.transpose(1, 2) if heads_first else out
    return (out, lse) if return_lse else out


def _masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor, sm_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in 16 bits. The tensors are (batch, seqlen, heads, head_dim)."""
    check_strided("attn_mask", attn_mask)
    scores = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if attn_mask.dtype not in (torch.bool, q.dtype, torch.float32):
        raise TypeError(f"attn_mask: got {attn_mask.dtype}, wanted bool, {q.dtype} or float32")
    sizes = (1,) * (len(scores) - attn_mask.dim()) + tuple(attn_mask.shape)
    # A compiler's symbol is equal to a size, and in no tuple.
    if len(sizes) != len(scores) or not all(
        size == 1 or size == full for size, full in zip(sizes, scores, strict=True)
    ):
        raise ValueError(f"attn_mask: got shape {tuple(attn_mask.shape)}, wanted a shape that broadcasts to {scores}")
    refuse_transforms("sageattention")
    refuse_derivatives(q, k, v, attn_mask)
    bias = as_bias(attn_mask, q.dtype, 4, q.shape[1], k.shape[1])
    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=sm_scale, attn_bias=bias, return_attn_probs=True)
    return out, lse
