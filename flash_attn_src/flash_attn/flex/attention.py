"""flex_attention in the terms of flash_attn's functions."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch

from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from flash_attn.flex.plan import Part, Parts, Plan, Sparse, plan
from flash_attn.flex.request import request
from flash_attn.flex.terms import UntraceableError
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.runtime.store import KernelError
from flash_attn.sdpa.attention import laid_out, reason_to_pass_on
from flash_attn.sdpa.modes import is_stand_in, recorder
from flash_attn.sparse import flash_attn_block_sparse_func

_MOST_SPARSE_DIM = OPERATIONS["sparse-fwd"].sizes[-1]
_MOST_SOFTCAP = 4096.0
# PyTorch's mask of no block has blocks of this size.
_NO_MASK_BLOCK = 1 << 30

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
    reason = reason_to_pass_on(query, key, value, None, 0.0, False, enable_gqa, scale)
    reason = reason or _reason(query, key, score_mod, block_mask, return_lse, kernel_options, return_aux)
    if reason is not None:
        return reason
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if block_mask is not None and block_mask.BLOCK_SIZE[0] >= _NO_MASK_BLOCK:
        block_mask = None
    try:
        asked = request(score_mod, block_mask, sizes, query.device)
        factor = (query.shape[-1] ** -0.5 if scale is None else scale) * asked.score.factor
        if not factor > 0.0:
            return "a scale that is not positive"
        if asked.score.softcap > _MOST_SOFTCAP:
            return f"a soft cap above {_MOST_SOFTCAP:g}"
        has_gradient = wants_lse and torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        if (has_gradient and asked.score.softcap) or (wants_lse and asked.is_learned):
            return "a gradient of the logsumexp through a soft cap or a learned score_mod"
        made = plan(asked)
        if isinstance(made, str):
            return made
        out, lse = _attention(made, query, key, value, factor, asked.score.softcap)
    except UntraceableError as error:
        return f"score_mod or mask_mod: {error}"
    except (KernelError, NotImplementedError) as error:
        return f"no kernel: {error}"
    out = laid_out(out.transpose(1, 2), query)
    if not wants_lse:
        return out if return_aux is None else (out, _auxiliary(return_aux, None))
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)  # a query that sees no key
    if has_gradient:
        lse = _Logsumexp.apply(query, key, lse, made, factor)
    return (out, lse) if return_aux is None else (out, _auxiliary(return_aux, lse))


def _auxiliary(asked: Any, lse: torch.Tensor | None) -> Any:
    from torch.nn.attention.flex_attention import AuxOutput

    assert not asked.max_scores
    return AuxOutput(lse=lse, max_scores=None)


def _reason(
    query: torch.Tensor, key: torch.Tensor, score_mod: Any, block_mask: Any, return_lse: Any, kernel_options: Any,
    return_aux: Any,
) -> str | None:  # fmt: skip
    """Why these kernels cannot serve a call whose tensors they take; a wrong call has a reason, too."""
    if query.dim() != 4:
        return "tensors of other than 4 dimensions"
    if query.dtype is torch.float32 and torch.is_autocast_enabled(query.device.type):
        return "fp32 under autocast"
    if kernel_options:
        return "kernel_options, which are for PyTorch's kernels"
    if not (score_mod is None or callable(score_mod)) or type(return_lse) is not bool:
        return "arguments of other types"
    if return_aux is not None and (return_lse or return_aux.max_scores):
        return "max_scores, or return_lse together with return_aux"
    if block_mask is None:
        return None
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        return "arguments of other types"
    lists = block_mask.kv_num_blocks
    if lists.device != query.device:
        return "block_mask: on another device"
    if lists.dim() != 3 or lists.shape[0] not in (1, query.shape[0]) or lists.shape[1] not in (1, query.shape[1]):
        return "block_mask: of another batch or other heads"
    wanted = (query.shape[2], key.shape[2])
    if block_mask.BLOCK_SIZE[0] < _NO_MASK_BLOCK and tuple(block_mask.shape[-2:]) != wanted:
        return "block_mask: of another length"
    return None


def _attention(
    made: Plan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float
) -> _Result:
    """Out (batch, seqlen_q, heads, head_dim) and the logsumexp, fp32 (batch, heads, seqlen_q)."""
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(made, Sparse):
        if not q.shape[-1] == v.shape[-1] <= _MOST_SPARSE_DIM:
            raise NotImplementedError(f"blocks with a head dim above {_MOST_SPARSE_DIM}, or another one of v")
        result = flash_attn_block_sparse_func(q, k, v, made.mask, scale, made.causal, return_lse=True)
        return result[0], result[1]
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "softcap": softcap,
        "alibi_slopes": made.alibi_slopes,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "return_attn_probs": True,
    }
    if isinstance(made, Parts):
        return _by_parts(made.parts, q, k, v, options)
    out, lse, _ = flash_attn_func(q, k, v, window_size=made.window, attn_bias=made.attn_bias, **options)
    return out, lse


def _by_parts(parts: list[Part], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any) -> _Result:
    sizes = q.shape[:2]
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out = q.new_zeros((*q.shape[:2], v.shape[-1]))
    lse = torch.full((q.shape[1], q.shape[0]), torch.inf, device=q.device)
    for part in parts:
        of_part, lse_of_part, _ = flash_attn_varlen_func(
            _taken(q, part.rows), _taken(k, part.keys), _taken(v, part.keys), part.ends_q, part.ends_k,
            part.longest_q, part.longest_k, window_size=part.window, **options,
        )  # fmt: skip
        if part.rows is None:
            out, lse = of_part, lse_of_part
        else:
            out, lse = out.index_copy(0, part.rows, of_part), lse.index_copy(1, part.rows, lse_of_part)
    return out.unflatten(0, sizes), lse.unflatten(1, sizes).transpose(0, 1)


class _Logsumexp(torch.autograd.Function):
    """The logsumexp of the scaled scores with its gradient, by the attention P of the call:

    dq = scale * dlse * (P @ k), a forward with k for v; dk = scale * P^T @ (dlse * q), its gradient of v.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, made: Plan, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key)
        ctx.made, ctx.scale = made, scale
        return lse.view_as(lse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key = (x.detach() for x in ctx.saved_tensors)
        with torch.enable_grad():
            value = key.clone().requires_grad_()
            out, _ = _attention(ctx.made, query, key, value, ctx.scale, 0.0)
        scaled = (ctx.scale * dlse)[..., None]
        (dk,) = torch.autograd.grad(out, value, (scaled * query).to(out.dtype).transpose(1, 2))
        return (scaled * out.detach().transpose(1, 2)).to(query.dtype), dk, None, None, None


def _taken(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x.index_select(0, rows)
