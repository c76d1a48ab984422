"""Checks of the layers against fp32: rotary embedding, norms, cross entropy."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.diagnosis.selftest.attention import Errors
from flash_attn.diagnosis.selftest.inputs import Draw, angles, turned
from flash_attn.diagnosis.selftest.reference import error, gradients_error
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn


def rotary(draw: Draw) -> Errors:
    x = draw(2, 70, 4, 64)
    cos, sin = angles(draw, 70, 64)
    out = apply_rotary_emb(x, cos, sin)
    exact = x.detach().float().requires_grad_()
    expected = torch.stack([turned(each, cos, sin) for each in exact])
    return error(out, expected), gradients_error(out, (x,), expected, (exact,), draw(*out.shape, grad=False))


def rms_norm(draw: Draw) -> Errors:
    x, residual, weight = draw(300, 1000), draw(300, 1000), draw(1000)
    out: Any = rms_norm_fn(x, weight, None, residual=residual, eps=1e-5)
    exact = [t.detach().float().requires_grad_() for t in (x, residual, weight)]
    total = exact[0] + exact[1]
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * exact[2]
    dout = draw(*out.shape, grad=False)
    return error(out, expected), gradients_error(out, (x, residual, weight), expected, exact, dout)


def layer_norm(draw: Draw) -> Errors:
    inputs = draw(300, 1000), draw(1000), draw(1000)
    out: Any = layer_norm_fn(*inputs, eps=1e-5)
    exact = [t.detach().float().requires_grad_() for t in inputs]
    expected = torch.nn.functional.layer_norm(exact[0], (1000,), exact[1], exact[2], 1e-5)
    return error(out, expected), gradients_error(out, inputs, expected, exact, draw(*out.shape, grad=False))


def cross_entropy(draw: Draw) -> Errors:
    logits = draw(200, 5003)
    labels = torch.randint(0, 5003, (200,), generator=torch.Generator().manual_seed(0)).to(draw.device)
    loss = CrossEntropyLoss()(logits, labels)
    exact = logits.detach().float().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels)
    return error(loss, expected), gradients_error(loss, (logits,), expected, (exact,), torch.ones_like(loss))
