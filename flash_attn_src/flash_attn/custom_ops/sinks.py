"""The gradient of sinks, as a custom op: a derivative of it raises, as one of the other gradients does."""

from __future__ import annotations

import torch


def gradient(
    s_aux: torch.Tensor, softmax_lse: torch.Tensor, softmax_d: torch.Tensor | None, dlse: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of s_aux (heads,), from softmax_d = rowsum(dout * out) and the gradient of softmax_lse.

    A row gives its sink the weight p = exp(s_aux - softmax_lse). The sink has no value, so out changes by -p * out with
    the sink, and softmax_lse by p. softmax_lse, softmax_d and dlse are (batch, heads, seqlen_q) or (heads, total_q).
    """
    weights = torch.exp(s_aux.to(softmax_lse.dtype)[:, None] - softmax_lse)
    if softmax_d is None:
        assert dlse is not None
        change = dlse
    else:
        change = -softmax_d if dlse is None else dlse - softmax_d
    found = (weights * change).sum(-1)
    return (found.sum(0) if found.dim() == 2 else found).to(s_aux.dtype)


sink_gradient = torch.library.custom_op(
    "flash_attn::_sink_gradient",
    gradient,
    mutates_args=(),
    schema="(Tensor s_aux, Tensor softmax_lse, Tensor? softmax_d, Tensor? dlse) -> Tensor",
)
sink_gradient.register_fake(lambda s_aux, *_: torch.empty(s_aux.shape, dtype=s_aux.dtype, device=s_aux.device))
