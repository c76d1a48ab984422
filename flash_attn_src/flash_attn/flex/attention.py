"""flex_attention in the terms of flash_attn's functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import NoneType
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention as _flex
from torch.nn.attention import flex_attention as torch_flex

from flash_attn.attention.operators.lse import with_gradient
from flash_attn.attention.operators.sharding import is_distributed, replicated
from flash_attn.call.arguments import check_dense
from flash_attn.call.arguments.diagnosis import LEAST, MOST
from flash_attn.call.block_mask import BlockMask
from flash_attn.call.calls import AttentionCall, Options
from flash_attn.core.store import KernelError
from flash_attn.flash_attn_interface import flash_attn_func
from flash_attn.flex.masks import Masked
from flash_attn.flex.plan import Plan, plan
from flash_attn.flex.request import request
from flash_attn.flex.terms import UntraceableError
from flash_attn.flex.values import values
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.sdpa.attention import laid_out, reason_to_pass_on
from flash_attn.sdpa.modes import is_stand_in, recorder

_MOST_MASKED_DIM = OPERATIONS["sparse-fwd"].sizes[-1]
_MOST_SOFTCAP = 4096.0
# PyTorch's mask of no block has blocks of this size.
_NO_MASK_BLOCK = 1 << 30

# Options of PyTorch's kernels that change no result, with or without `fwd_` and `bwd_`.
_HINTS = """
    BLOCK_M BLOCK_N BLOCK_M1 BLOCK_N1 BLOCK_M2 BLOCK_N2 num_warps num_stages kpack matrix_instr_nonkdim waves_per_eu
    PRESCALE_QK ROWS_GUARANTEED_SAFE BLOCKS_ARE_CONTIGUOUS WRITE_DQ FORCE_USE_FLEX_ATTENTION USE_TMA SPLIT_KV
"""

_Result = tuple[torch.Tensor, torch.Tensor]


def attention_or_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """The result of flex_attention by these kernels, or the reason why they cannot serve the call.

    The arguments are those of torch.nn.attention.flex_attention.flex_attention. The report does not count the call.
    """
    if is_stand_in(query) or recorder() is not None:
        return "a trace of PyTorch"
    if type(scale) not in (int, float, NoneType):
        return "arguments of other types"
    query, key, value = _cast(query, key, value)
    are_distributed = all(map(is_distributed, (query, key, value)))
    reason = reason_to_pass_on(query, key, value, None, 0.0, False, enable_gqa, scale, are_distributed=are_distributed)
    reason = reason or _reason(query, key, score_mod, block_mask, return_lse, kernel_options, return_aux)
    if reason is not None:
        return reason
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    if block_mask is not None and block_mask.BLOCK_SIZE[0] >= _NO_MASK_BLOCK:
        block_mask = None
    try:
        understood = _understood(query, key, value, score_mod, block_mask, scale)
    except Exception as error:  # PyTorch computes what is not understood, or raises its own error
        return f"score_mod or mask_mod: {error if isinstance(error, UntraceableError) else repr(error)}"
    if isinstance(understood, str):
        return understood
    made, query, factor, softcap = understood
    try:
        out, lse = _attention(made, query, key, value, factor, softcap, wants_lse)
    except (KernelError, NotImplementedError) as error:
        return f"no kernel: {error}"
    out = laid_out(out.transpose(1, 2), query)
    if not wants_lse:
        return out if return_aux is None else (out, _auxiliary(return_aux, None))
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)  # a query that sees no key
    return (out, lse) if return_aux is None else (out, _auxiliary(return_aux, lse))


def _cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's type, if autocast is on and PyTorch's flex_attention casts them, too."""
    if not (torch._C._is_any_autocast_enabled() and all(isinstance(x, torch.Tensor) for x in tensors)):
        return tensors
    kind = tensors[0].device.type
    rule = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}.get(kind)
    if not torch.is_autocast_enabled(kind) or rule not in _flex.py_kernels:
        return tensors
    cast_dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(cast_dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in tensors)


def _understood(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any, scale: float | None
) -> tuple[Plan, torch.Tensor, float, float] | str:  # fmt: skip
    """(plan, the query times factors of its own, the scale, the soft cap), or why PyTorch gets the call."""
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    asked = request(score_mod, block_mask, sizes, query.device)
    factor = (query.shape[-1] ** -0.5 if scale is None else scale) * asked.score.factor
    if not factor > 0.0:
        return "a scale that is not positive"
    if not LEAST <= factor <= MOST:
        return "a scale that fp32 does not hold as a normal number"
    if asked.score.softcap > _MOST_SOFTCAP:
        return f"a soft cap above {_MOST_SOFTCAP:g}"
    has_masks = query.shape[-1] == value.shape[-1] <= _MOST_MASKED_DIM
    made = plan(asked, query.dtype, has_masks=has_masks)
    if isinstance(made, str):
        return made
    for term in asked.score.factors:
        query = (query * replicated(values(term, asked.places(), query.device), query)).to(query.dtype)
    return made, query, factor, asked.score.softcap


def _auxiliary(asked: Any, lse: torch.Tensor | None) -> Any:
    assert not asked.max_scores
    return torch_flex.AuxOutput(lse=lse, max_scores=None)


def _reason(
    query: torch.Tensor, key: torch.Tensor, score_mod: Any, block_mask: Any, return_lse: Any, kernel_options: Any,
    return_aux: Any,
) -> str | None:  # fmt: skip
    """Why these kernels cannot serve a call whose tensors they take; a wrong call has a reason, too."""
    if query.dim() != 4:
        return "tensors of other than 4 dimensions"
    if kernel_options and not _are_hints(kernel_options):
        return "kernel_options that are no hints"
    if not (score_mod is None or callable(score_mod)) or type(return_lse) is not bool:
        return "arguments of other types"
    if return_aux is not None and (return_lse or return_aux.max_scores):
        return "max_scores, or return_lse together with return_aux"
    if block_mask is None:
        return None
    if not isinstance(block_mask, torch_flex.BlockMask):
        return "arguments of other types"
    lists = block_mask.kv_num_blocks
    if is_distributed(lists):
        return "block_mask: of DTensors"
    if lists.device != query.device:
        return "block_mask: on another device"
    if lists.dim() != 3 or lists.shape[0] not in (1, query.shape[0]) or lists.shape[1] not in (1, query.shape[1]):
        return "block_mask: of another batch or other heads"
    lengths = (query.shape[2], key.shape[2])
    if block_mask.BLOCK_SIZE[0] < _NO_MASK_BLOCK and tuple(block_mask.shape[-2:]) != lengths:
        return "block_mask: of another length"
    return None


def _beside(q: torch.Tensor, x: Any) -> Any:
    """What a mask_mod or score_mod computed, alike on all ranks, for a call of q."""
    if isinstance(x, BlockMask):
        return BlockMask(replicated(x.seen, q), x.block_size)
    return replicated(x, q) if isinstance(x, torch.Tensor) else x


def _are_hints(kernel_options: Any) -> bool:
    return type(kernel_options) is dict and all(
        isinstance(name, str) and name.removeprefix("fwd_").removeprefix("bwd_") in _HINTS.split()
        for name in kernel_options
    )


def _attention(
    made: Plan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float,
    wants_lse: bool,
) -> _Result:  # fmt: skip
    """Out (batch, seqlen_q, heads, head_dim) and the logsumexp, fp32 (batch, heads, seqlen_q), which has a gradient if
    it is wanted."""
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(made, Masked):
        from flash_attn.ranges import flash_attn_ranges_func  # registers operators, which takes time

        mask = {field.name: _beside(q, getattr(made, field.name)) for field in fields(made)}
        result = flash_attn_ranges_func(q, k, v, **mask, softmax_scale=scale, softcap=softcap, return_lse=True)
        return result[0], result[1]
    alibi_slopes, attn_bias = _beside(q, made.alibi_slopes), _beside(q, made.attn_bias)
    options = Options(scale, False, made.window, softcap, alibi_slopes=alibi_slopes, attn_bias=attn_bias)
    call = AttentionCall(q, k, v, options, torch.are_deterministic_algorithms_enabled())
    out, lse, _ = flash_attn_func(
        q, k, v, softmax_scale=scale, softcap=softcap, window_size=made.window, alibi_slopes=alibi_slopes,
        attn_bias=attn_bias, deterministic=call.deterministic, return_attn_probs=True,
    )  # fmt: skip
    if wants_lse and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, attn_bias)):
        check_dense(call)
        lse = with_gradient(call, lse)
    return out, lse
