"""Calls of the Triton backend, and the comparison of their results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from assert_close import assert_close
from flash_attn.attention.backends import triton as backend
from flash_attn.call.calls import AttentionCall, GradientCall, attention_call

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


class Options(NamedTuple):
    """What a call may ask for, as both the backend and the reference take it."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: int = 0
    softmax_scale: float | None = None


class Lengths(NamedTuple):
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0


DENSE = Lengths()


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    options: Options,
    slopes: torch.Tensor | None,
    lengths: Lengths = DENSE,
) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv of the Triton backend."""
    call = attention_call(
        q, k, v, softmax_scale=options.softmax_scale or q.shape[-1] ** -0.5, causal=options.causal,
        window_size=options.window, softcap=options.softcap, alibi_slopes=slopes, **lengths._asdict(),
    )  # fmt: skip
    out, lse, _, _ = backend.forward(call)
    return out, lse, *differentiate(call, dout, out, lse)


def differentiate(
    call: AttentionCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *into: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv of the Triton backend, in these tensors or new ones."""
    gradients = into or tuple(torch.empty_like(x) for x in (call.q, call.k, call.v))
    backend.backward(GradientCall(call, dout, out, lse, *gradients))
    return gradients


def compare(got: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...], rough: tuple[torch.Tensor, ...]) -> None:
    for name, value, best, worse in zip(("out", "lse", "dq", "dk", "dv"), got, exact, rough, strict=True):
        assert_close(name, value, best, rough=None if name == "lse" else worse, tiny=2e-5 if name == "lse" else 1e-5)
