"""The custom op flash_attn::_extended_forward: the forward of a traced call that upstream's ops cannot express.

The ops of `operators.attention` have upstream's arguments, and lack options that upstream lacks. They draw
the seed of dropout themselves. A compiler would take two such calls for one, and a checkpoint would compute another
mask the second time. So the seed is an argument here. All options of `flash_attn.call.options` are.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.attention import backends
from flash_attn.attention.operators.autograd import keep, kept_gradients
from flash_attn.attention.operators.results import complete, fake_results
from flash_attn.call.calls import AttentionCall, new_out
from flash_attn.call.options import FIELDS, SCHEMA, Options, as_arguments, from_arguments, option_tensors
from flash_attn.call.tracing import refuse_tangents_of_an_op

# The fields of a call besides its options.
_FIELDS = {
    "return_softmax": "bool", "cu_seqlens_q": "Tensor?", "cu_seqlens_k": "Tensor?", "max_seqlen_q": "SymInt",
    "max_seqlen_k": "SymInt", "seqused_k": "Tensor?", "leftpad_k": "Tensor?", "block_table": "Tensor?",
    "deterministic": "bool",
}  # fmt: skip
_SCHEMA = (
    f"(Tensor q, Tensor k, Tensor v, {', '.join(f'{schema} {name}' for name, schema in _FIELDS.items())}, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)"
)
_NAMES = (*_FIELDS, *(argument.split()[1] for argument in SCHEMA.split(", ")))


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, more: tuple[Any, ...]) -> AttentionCall:
    fields = dict(zip(_FIELDS, more, strict=False))
    return AttentionCall(q, k, v, from_arguments(more[len(_FIELDS) :]), **fields)


@torch.library.custom_op("flash_attn::_extended_forward", mutates_args=(), schema=_SCHEMA)
def _extended_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, softmax_lse, S_dmask), of checked arguments; S_dmask is (0,) unless asked for."""
    call = _call(q, k, v, more)
    refuse_tangents_of_an_op(q, k, v, *option_tensors(call.options))
    call.out = new_out(q, v)  # of the fake's strides
    return complete(q, backends.select(q).forward(call))[:3]


@_extended_forward.register_fake
def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _call(q, k, v, more)
    *outer, heads, _dim = q.shape
    lse_shape = (heads, *outer) if call.cu_seqlens_q is not None else (outer[0], heads, outer[1])
    dmask_shape = (call.batch, heads, call.longest_q, call.longest_k)
    asked = call.return_softmax and call.options.dropout_p > 0.0
    return fake_results(q, v, lse_shape, dmask_shape if asked else (0,))[:3]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *more = inputs
    out, softmax_lse, s_dmask = output
    ctx.mark_non_differentiable(s_dmask)
    keep(ctx, _call(q, k, v, tuple(more)), out, softmax_lse)


def _backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    dq, dk, dv, *of_learned = kept_gradients(ctx, dout, dlse)
    gradients = dict(zip(FIELDS[Options].learned, of_learned, strict=True))
    return dq, dk, dv, *(gradients.get(name) for name in _NAMES)


_extended_forward.register_autograd(_backward, setup_context=_keep)


def forward_by_op(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, softmax_lse, S_dmask) of a checked call through the op, which a compiler sees."""
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.flash_attn._extended_forward(
        call.q, call.k, call.v, *[getattr(call, name) for name in _FIELDS], *as_arguments(call.options)
    )
    return result
