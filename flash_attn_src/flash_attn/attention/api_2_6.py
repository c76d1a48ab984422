"""The private functions of flash_attn_interface as flash-attn 2.6 has them: a window as one tuple, more results."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from flash_attn.attention import operators as custom_ops
from flash_attn.call.arguments import as_int, check_dense, check_varlen
from flash_attn.call.calls import attention_call, maybe_contiguous
from flash_attn.core.api import by_name

_OPTIONS = "dropout_p softmax_scale causal window_size softcap alibi_slopes?"
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_GRADIENTS = "dout q k v out softmax_lse dq? dk? dv?"
# What is checked here; the ops check the rest.
_CALL = frozenset(f"q k v {_LENGTHS} {_OPTIONS} return_softmax deterministic block_table".replace("?", "").split())

_Named = dict[str, Any]
Forward = tuple[torch.Tensor, ...]
Backward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _padded(x: torch.Tensor, head_dim: int | None = None) -> torch.Tensor:
    """x, padded to head_dim, which is less than 8 above its own; without it, to the next multiple of 8.

    Anything that cannot be padded is returned unchanged, and the op refuses it.
    """
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.dim() == 0:
        return x
    missing = -x.shape[-1] % 8 if head_dim is None else head_dim - x.shape[-1]
    return maybe_contiguous(pad(x, (0, missing)) if 0 < missing < 8 else x)


def _checked(named: _Named) -> _Named:
    """The arguments of a custom op, of a call that is checked: its lengths are ints, its window is two numbers."""
    named = {name: as_int(name, x) if name in ("max_seqlen_q", "max_seqlen_k") else x for name, x in named.items()}
    call = attention_call(**{name: x for name, x in named.items() if name in _CALL})
    (check_varlen if "cu_seqlens_q" in named else check_dense)(call)
    named["window_size_left"], named["window_size_right"] = call.options.window_size
    del named["window_size"]
    return named


def _forward(named: _Named, op: Any) -> Forward:
    named = _checked(named)
    head_dim = named["v"].shape[-1]
    named |= {name: _padded(named[name]) for name in "qkv"}
    out, softmax_lse, dmask, rng_state = op(**named)
    return out[..., :head_dim], named["q"], named["k"], named["v"], out, softmax_lse, dmask, rng_state


def _backward(named: _Named, op: Any) -> Backward:
    named = _checked(named)
    named |= {name: _padded(named[name], named["v"].shape[-1]) for name in ("dout", "out")}
    named |= {f"d{name}": torch.empty_like(named[name]) for name in "qkv" if named[f"d{name}"] is None}
    softmax_d = op(**named)
    return named["dq"], named["dk"], named["dv"], softmax_d


@by_name(f"q k v {_OPTIONS} return_softmax")
def _flash_attn_forward(named: _Named) -> Forward:
    """(out, q, k, v, out_padded, softmax_lse, S_dmask, rng_state): q, k, v, out_padded with their head dim padded."""
    return _forward(named, custom_ops._flash_attn_forward)


@by_name(
    f"q k v {_LENGTHS} {_OPTIONS} return_softmax block_table? leftpad_k? seqused_k?",
    {"window_size": (-1, -1), "softcap": 0.0, "return_softmax": False}
    | dict.fromkeys(("alibi_slopes", "block_table", "leftpad_k", "seqused_k")),
)
def _flash_attn_varlen_forward(named: _Named) -> Forward:
    """The same for packed sequences."""
    return _forward(named, custom_ops._flash_attn_varlen_forward)


@by_name(f"{_GRADIENTS} {_OPTIONS} deterministic rng_state?", {"rng_state": None})
def _flash_attn_backward(named: _Named) -> Backward:
    """Writes dq, dk, dv, new ones for None; returns (dq, dk, dv, softmax_d). dout and out may lack the padding of q,
    k, v."""
    return _backward(named, custom_ops._flash_attn_backward)


@by_name(f"{_GRADIENTS} {_LENGTHS} {_OPTIONS} deterministic rng_state?", {"rng_state": None})
def _flash_attn_varlen_backward(named: _Named) -> Backward:
    """The same for packed sequences."""
    return _backward(named, custom_ops._flash_attn_varlen_backward)
