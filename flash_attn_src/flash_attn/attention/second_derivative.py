"""Attention of dense calls up to a size by PyTorch's own operations, which can be differentiated again and again.

No kernel has a formula for a second derivative, and torch.func transforms no kernel. A backward that may be
differentiated, under `create_graph=True`, computes the attention once more with all its scores in memory, and autograd
does the rest. The values of the gradients are the kernels', with and without `create_graph`.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.attention.backends.torch import scores as modifiers
from flash_attn.attention.backends.torch.attention import in_own_types
from flash_attn.attention.backends.torch.tiles import accumulation_dtype
from flash_attn.call.calls import AttentionCall, replace
from flash_attn.call.options import FIELDS, SECOND_DERIVATIVE
from flash_attn.call.tracing import refuse_transforms

# Scores (batch * heads * seqlen_q * seqlen_k) up to which a second derivative is served. So many take 128 MiB in fp32.
# The backward and its derivative hold about ten tensors of that size.
MAX_SCORES = 1 << 25
_NAMES = {"cu_seqlens_q": "attention of packed sequences", "dropout_p": "attention with dropout"}


def refused(call: AttentionCall) -> str | None:
    """What has no second derivative, for an error message; None for a call that has one."""
    name = SECOND_DERIVATIVE.unserved(call)
    if name is not None:
        return _NAMES.get(name, f"attention with {name}")
    scores = call.batch * call.q.shape[2] * call.q.shape[1] * call.k.shape[1]
    if scores > MAX_SCORES:
        return f"attention of {scores} scores, more than {MAX_SCORES},"
    return None


def transformed(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) of a checked call under torch.func or torch.vmap. Raises NotImplementedError for a call that
    `refused` names."""
    what = refused(call)
    if what is not None:
        refuse_transforms(what)
    with in_own_types(call.q.device.type):
        out, softmax_lse = _attention(call)
    return out.to(call.q.dtype), softmax_lse


class _WithHistory(torch.autograd.Function):
    """The gradient that a kernel computed. Its derivatives come from PyTorch's operations, which compute it too."""

    @staticmethod
    def forward(_ctx: Any, computed: torch.Tensor, _differentiable: torch.Tensor) -> torch.Tensor:
        return computed.view_as(computed)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


def gradients(
    computed: tuple[torch.Tensor | None, ...],
    call: AttentionCall,
    given: tuple[torch.Tensor, ...],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """`computed`, the gradients of `given` and of the options that have one, with a derivative.

    dout, dlse: the gradients of out and softmax_lse. call: one that `refused` does not name.
    given: (q, k, v), or the tensors that they are views of: (q, kv) or (qkv,).
    """
    # Aliases, because one tensor may come as q and as k, or k may be computed from q.
    tensors = [x.view_as(x) for x in given]
    learned = {name: getattr(call.options, name) for name in FIELDS[type(call.options)].learned}
    learned = {name: None if x is None else x.view_as(x) for name, x in learned.items()}
    inputs = (*tensors, *learned.values())
    q, k, v = tensors if len(tensors) == 3 else (*tensors[:-1], *tensors[-1].unbind(-3))
    call = replace(call, q=q, k=k, v=v, **learned)
    variables = [x for x in inputs if x is not None and x.requires_grad]
    with in_own_types(call.q.device.type):
        out, softmax_lse = _attention(call)
        pairs = [(y, dy.to(y.dtype)) for y, dy in ((out, dout), (softmax_lse, dlse)) if dy is not None]
        results, incoming = [y for y, _ in pairs], [dy for _, dy in pairs]
        again = iter(torch.autograd.grad(results, variables, incoming, create_graph=True, allow_unused=True))
    with_history = []
    for x, gradient in zip(inputs, computed, strict=True):
        other = next(again) if x is not None and x.requires_grad else None
        both = gradient is not None and other is not None
        with_history.append(_WithHistory.apply(gradient, other) if both else gradient)
    return tuple(with_history)


def _attention(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse (batch, heads, seqlen_q)), in the type in which sums are accumulated."""
    dtype, heads_k = accumulation_dtype(call.q.dtype), call.k.shape[2]
    group = call.q.shape[2] // heads_k
    q = call.q.to(dtype).unflatten(2, (heads_k, group))
    k, v = call.k.to(dtype), call.v.to(dtype)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k) * call.options.scale  # (batch, heads_k, group, seqlen_q, seqlen_k)
    seqlen_q, seqlen_k = scores.shape[-2:]
    every = slice(0, seqlen_q), slice(0, seqlen_k)
    options = modifiers.by_group(modifiers.by_head(call.options, call.batch, call.q.shape[2]), heads_k)
    options = modifiers.of_tile(options, *every, seqlen_q)
    places = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)[:, None]
    mask = options.mask
    seen = None if mask is None else modifiers.seen_by(mask, *every, heads_k)
    scores, _ = modifiers.modified(scores, options, places, torch.arange(seqlen_k, device=q.device), seen)
    if options.s_aux is not None:  # one more column of scores, which has no value
        scores = torch.cat((scores, options.s_aux.to(dtype).expand(*scores.shape[:-1], 1)), -1)
    if scores.shape[-1] == 0:
        scores = torch.cat((scores, scores.new_full((*scores.shape[:-1], 1), -torch.inf)), -1)
    origin = scores.detach().amax(-1, keepdim=True)
    origin = origin.masked_fill(origin == -torch.inf, 0.0)
    weights = torch.exp(scores - origin)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0.0
    total = total.masked_fill(empty, 1.0)
    out = torch.einsum("bhgqk,bkhd->bqhgd", weights[..., :seqlen_k] / total, v).flatten(2, 3)
    softmax_lse = (origin + total.log()).masked_fill(empty, torch.inf).squeeze(-1).flatten(1, 2)
    return out, softmax_lse
