"""Checks that compare with no reference: dropout, equal bits in two runs, captured graphs."""

from __future__ import annotations

import math
from typing import Any

import torch

import flash_attn
from flash_attn.diagnosis.selftest import reference
from flash_attn.diagnosis.selftest.attention import Errors
from flash_attn.diagnosis.selftest.inputs import Draw

_api: Any = flash_attn


def dropout(draw: Draw, *, head_dim: int) -> Errors:
    """The rate of dropout, its independence of the seed, and that the backward drops what the forward dropped.

    With q = 0 every weight is 1 / seqlen, and with v = the unit matrix the result shows which of them were dropped.
    """
    p, heads, length = 0.17, 8, head_dim
    q = torch.zeros(4, 256, heads, head_dim, device=draw.device, dtype=draw.dtype)
    k = draw(4, length, heads, head_dim)
    unit = torch.eye(length, device=draw.device, dtype=draw.dtype)
    v = unit[None, :, None, :].expand(4, length, heads, head_dim).contiguous().requires_grad_()

    def kept(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        out = _api.flash_attn_func(q, k, v, dropout_p=p)
        return out, out.detach() != 0

    out, mask = kept(1)
    bound = 5 * math.sqrt(p * (1 - p) / mask.numel())
    if abs(1 - float(mask.float().mean()) - p) > bound:
        raise AssertionError(
            f"{1 - float(mask.float().mean()):.4f} of the weights are dropped, wanted {p} +- {bound:.4f}"
        )
    if not torch.equal(mask, kept(1)[1]):
        raise AssertionError("the same seed drops other weights in a second call")
    if abs(float((mask == kept(2)[1]).float().mean()) - (p * p + (1 - p) ** 2)) > 10 * bound:
        raise AssertionError("two seeds do not drop independently")
    weight = 1 / (length * (1 - p))
    forward = float((out.detach().float() - mask * weight).abs().max() / weight)
    # dv[j] is the sum over queries of weight[i, j] * dout[i]. dout has query 0 to length - 1 in a column of its own.
    dout = torch.zeros_like(out)
    dout[:, :length] = unit[None, :, None, :]
    (dv,) = torch.autograd.grad(out, v, dout)
    expected = (mask[:, :length] * weight).transpose(1, 3)
    return forward, float((dv.float() - expected).abs().max() / weight)


def repeats(draw: Draw, *, head_dim: int) -> Errors:
    """Two runs give equal bits: the forward, and the backward with deterministic=True."""
    q, k, v = (draw(2, 512, 4, head_dim) for _ in range(3))
    dout = draw(2, 512, 4, head_dim, grad=False)
    runs = []
    for _ in range(2):
        out = _api.flash_attn_func(q, k, v, causal=True, deterministic=True)
        runs.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for name, first, second in zip(("out", "dq", "dk", "dv"), *runs, strict=True):
        if not torch.equal(first, second):
            raise AssertionError(f"{name} differs between two runs")
    return 0.0, 0.0


def steady(draw: Draw, *, head_dim: int, times: int) -> Errors:
    """The error of a causal forward, whose result and log-sum-exp have equal bits in `times` runs."""
    q, k, v = (draw(2, 700, 8, head_dim, grad=False) for _ in range(3))

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, _ = _api.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        return out, lse

    first = run()
    changes = torch.zeros(2, dtype=torch.int64, device=draw.device)  # read once, because each read waits for the GPU
    for _ in range(times - 1):
        changes += torch.stack([(result != other).sum() for result, other in zip(run(), first, strict=True)])
    for name, count in zip(("out", "the log-sum-exp"), changes.tolist(), strict=True):
        if count:
            raise AssertionError(f"{name} differs in {count} values between {times} runs")
    return reference.error(first[0], reference.attention(q, k, v, causal=True)), None


def captured(draw: Draw) -> Errors:
    """A forward in a captured graph gives the same bits as an eager forward."""
    q, k, v = (draw(2, 512, 4, 64, grad=False) for _ in range(3))
    expected = _api.flash_attn_func(q, k, v, causal=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _api.flash_attn_func(q, k, v, causal=True)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _api.flash_attn_func(q, k, v, causal=True)
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(out, expected):
        raise AssertionError("the captured graph gives another result than the eager call")
    return 0.0, None
