"""SDPA in the terms of flash_attn_func: layout, mask, alignment of the causal mask, types under autocast.

SDPA's tensors are (batch, heads, seqlen, head_dim), or (batch, seqlen, head_dim) with one head. Its causal mask is
aligned to the top left: query i sees keys up to i.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from flash_attn.attention.autograd import attend, differentiable
from flash_attn.call.arguments.diagnosis import BELOW_ONE, DENSE, LEAST, MAX_HEAD_DIM, MOST
from flash_attn.call.calls import AttentionCall, Options
from flash_attn.core.store import KernelError
from flash_attn.flash_attn_interface import flash_attn_func
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.sdpa.modes import is_stand_in

_MOST_MASKED_DIM = OPERATIONS["sparse-fwd"].sizes[-1]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_transforms_active = torch._C._are_functorch_transforms_active
_flash_allowed = torch._C._get_flash_sdp_enabled
_efficient_allowed = torch._C._get_mem_efficient_sdp_enabled


def _is_plain(x: torch.Tensor) -> bool:
    """Whether x is a tensor with memory of its own, or what stands for it in a trace."""
    return type(x) in _PLAIN or is_stand_in(x)


def is_on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU. PyTorch computes all other tensors; tests replace this function."""
    return x.is_cuda


def reason_to_pass_on(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    scale: float | None = None,
    *,
    are_distributed: bool = False,
) -> str | None:
    """Why these kernels cannot serve a call; None where they can. are_distributed: the tensors are DTensors.

    A wrong call has a reason too: PyTorch then raises its own error.
    """
    if not (are_distributed or (_is_plain(query) and _is_plain(key) and _is_plain(value))):
        return "a tensor subclass"
    if _transforms_active():
        return "a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if not (_flash_allowed() or _efficient_allowed()):
        return "sdpa_kernel allows neither flash nor memory-efficient attention"
    if not (is_on_gpu(query) and query.device == key.device == value.device):
        return "tensors that are not on one GPU"
    # Each read of a tensor's attribute takes part of the call's time, so each is read once.
    try:
        shape, shape_k, shape_v = query.shape, key.shape, value.shape
    except RuntimeError:
        return "a nested tensor"
    ndim, dtype = len(shape), query.dtype
    if ndim not in (3, 4) or len(shape_k) != ndim or len(shape_v) != ndim:
        return "tensors of other than 3 or 4 dimensions"
    if dtype not in _DTYPES or key.dtype is not dtype or value.dtype is not dtype:
        return f"types {dtype}, {key.dtype}, {value.dtype}"
    if (shape_k != shape_v and shape_k[:-1] != shape_v[:-1]) or shape[0] != shape_k[0]:
        return "a batch, heads or keys that are broadcast"
    if shape[-1] != shape_k[-1] or not (0 < shape[-1] <= MAX_HEAD_DIM and 0 < shape_v[-1] <= MAX_HEAD_DIM):
        return f"head dims outside of 1 to {MAX_HEAD_DIM}, or not equal"
    if 0 in shape or 0 in shape_k:
        return "a size of 0"
    if ndim == 4 and shape[1] != shape_k[1] and not (enable_gqa and shape[1] % shape_k[1] == 0):
        return "heads that differ without enable_gqa, or do not divide"
    if not 0.0 <= dropout_p < 1.0:
        return "dropout_p outside of [0, 1)"
    if scale is not None and not (scale == 0.0 or LEAST <= abs(scale) <= MOST):
        return "a scale that fp32 does not hold as a normal number"
    return None if attn_mask is None else _reason_of_mask(query, key, attn_mask, dropout_p, is_causal)


def _reason_of_mask(
    query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor, dropout_p: float, is_causal: bool
) -> str | None:
    if not _is_plain(attn_mask):
        return "attn_mask: a tensor subclass"
    if is_causal:
        return "attn_mask together with is_causal"
    if dropout_p > 0.0:
        return "attn_mask together with dropout_p"
    if attn_mask.device != query.device:
        return "attn_mask: on another device"
    if attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
        return f"attn_mask: {attn_mask.dtype} for {query.dtype}"
    shape = (*query.shape[:-1], key.shape[-2])
    if attn_mask.dim() > len(shape) or attn_mask.dim() < 1:
        return "attn_mask: more dimensions than the scores, or none"
    sizes = (1,) * (len(shape) - attn_mask.dim()) + tuple(attn_mask.shape)
    if sizes[-1] != shape[-1]:
        return "attn_mask: its last axis does not have one element per key"
    if not all(size == 1 or size == full for size, full in zip(sizes, shape, strict=True)):
        return "attn_mask: a shape that does not broadcast to the scores"
    return None


def attention_or_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    is_lower_right: bool = False,
) -> torch.Tensor | str:
    """The result of SDPA by these kernels, or the reason why they cannot serve the call.

    The arguments are those of torch.nn.functional.scaled_dot_product_attention. is_lower_right: a causal mask that ends
    in the last query and the last key. Counts nothing.
    """
    reason = reason_to_pass_on(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, scale)
    if reason is not None:
        return reason
    try:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, is_lower_right=is_lower_right)
    except (KernelError, NotImplementedError) as error:
        return f"no kernel: {error}"


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    *,
    is_lower_right: bool = False,
) -> torch.Tensor:
    """The result of a call for which `reason_to_pass_on` is None, in SDPA's layout."""
    shape = query.shape
    has_heads = len(shape) == 4
    seqlen_q, seqlen_k = shape[-2], key.shape[-2]
    if is_causal and seqlen_q < seqlen_k:  # no query sees the keys behind
        key, value = key[..., :seqlen_q, :], value[..., :seqlen_q, :]
    if has_heads:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    else:
        q, k, v = query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
    # The window of query i reaches i + seqlen_k - seqlen_q + right. A causal mask from the top left ends at i.
    is_shifted = is_causal and seqlen_q > seqlen_k
    causal, window = (
        is_lower_right or (is_causal and not is_shifted),
        (-1, seqlen_q - seqlen_k) if is_shifted else (-1, -1),
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    out: object
    if _is_checked(query, key, value, attn_mask, dropout_p, is_causal, scale):
        options = Options(shape[-1] ** -0.5 if scale is None else scale, causal, window, 0.0, dropout_p)
        call = AttentionCall(q, k, v, options, deterministic)
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            out = differentiable(call, q, k, v)
        else:
            out = attend(None, call)
    elif (ids := _ids(attn_mask, shape, value.shape[-1])) is not None:
        from flash_attn.ranges import flash_attn_ranges_func  # registers operators, which takes time

        every = ids.new_ones((1, seqlen_q))
        out = flash_attn_ranges_func(q, k, v, ids_q=every, ids_k=ids, softmax_scale=scale)
    else:
        out = flash_attn_func(
            q, k, v, dropout_p, scale, causal, window, deterministic=deterministic,
            attn_bias=None if attn_mask is None else as_bias(attn_mask, query.dtype, len(shape), seqlen_q, seqlen_k),
        )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return laid_out(out.transpose(1, 2) if has_heads else out.squeeze(2), query)


def laid_out(out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """out with the strides that PyTorch's kernels give it.

    They are the query's, without gaps, if its rows are dense and values have its head dim. Else out is contiguous.
    """
    if out.shape != query.shape or query.stride(-1) != 1:
        return out.contiguous()
    if out.stride() == query.stride():
        return out
    layout = torch.empty_like(query)
    return out if out.stride() == layout.stride() else layout.copy_(out)


def _is_checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> bool:
    """Whether `reason_to_pass_on` has asked all that flash_attn_func would ask again, but for the little asked here."""
    return (
        attn_mask is None
        and query.layout is key.layout is value.layout is DENSE
        and dropout_p < BELOW_ONE
        and type(is_causal) is bool
        and (scale is None or (type(scale) is float and LEAST <= scale <= MOST))
        and type(query) is type(key) is type(value) is torch.Tensor
    )


def as_bias(attn_mask: torch.Tensor, dtype: torch.dtype, ndim: int, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """The mask as a bias (1 or batch, 1 or heads, seqlen_q, seqlen_k). Shared axes take no memory.

    dtype: the queries' type. ndim: 4, or 3 where the mask is that of (batch, seqlen_q, seqlen_k).
    """
    if attn_mask.dtype == torch.bool:  # True: the key is seen
        bias = torch.zeros(attn_mask.shape, dtype=dtype, device=attn_mask.device)
        attn_mask = bias.masked_fill_(attn_mask.logical_not(), -torch.inf)
    return _of_scores(attn_mask, ndim).expand(-1, -1, seqlen_q, seqlen_k)


def _of_scores(attn_mask: torch.Tensor, ndim: int) -> torch.Tensor:
    """The mask with axes for batch, heads, queries and keys."""
    if ndim == 3 and attn_mask.dim() == 3:
        attn_mask = attn_mask.unsqueeze(1)
    while attn_mask.dim() < 4:
        attn_mask = attn_mask.unsqueeze(0)
    return attn_mask


def _ids(attn_mask: torch.Tensor | None, shape: torch.Size, head_dim_v: int) -> torch.Tensor | None:
    """A boolean mask that all heads and queries share as ids of keys, int32 (1 or batch, seqlen_k): 1 where a key is
    visible, else 0. None for another mask, and for a call that kernels with a mask do not serve.

    Padding is such a mask. Its ids take 4 bytes for each key, and tiles of hidden keys are skipped.
    """
    if attn_mask is None or attn_mask.dtype is not torch.bool:
        return None
    if shape[-1] != head_dim_v or head_dim_v > _MOST_MASKED_DIM:
        return None
    seen = _of_scores(attn_mask, len(shape))
    if any(seen.shape[axis] != 1 and seen.stride(axis) != 0 for axis in (1, 2)):
        return None
    return seen[:, 0, 0].int()
