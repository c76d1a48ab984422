"""The gradient of sinks, as a custom op. Like the other gradients, it raises if it is differentiated again."""

from __future__ import annotations

import torch


def gradient(
    s_aux: torch.Tensor, softmax_lse: torch.Tensor, softmax_d: torch.Tensor | None, dlse: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of s_aux (heads,), from softmax_d = rowsum(dout * out) and the gradient of softmax_lse.

    A row gives its sink the weight p = exp(s_aux - softmax_lse). The sink has no value, so out changes by -p * out with
    the sink, and softmax_lse by p. softmax_lse, softmax_d and dlse are (batch, heads, seqlen_q) or (heads, total_q).
    """
    weights = (s_aux[:, None] - softmax_lse).exp_()
    rows = (0, 2) if softmax_lse.dim() == 3 else 1
    if dlse is None:
        assert softmax_d is not None
        ds_aux = weights.mul_(softmax_d).sum(rows).neg_()
    else:
        ds_aux = weights.mul_(dlse if softmax_d is None else dlse - softmax_d).sum(rows)
    return ds_aux.to(s_aux.dtype)


sink_gradient = torch.library.custom_op(
    "flash_attn::_sink_gradient",
    gradient,
    mutates_args=(),
    schema="(Tensor s_aux, Tensor softmax_lse, Tensor? softmax_d, Tensor? dlse) -> Tensor",
)
sink_gradient.register_fake(lambda s_aux, *_: torch.empty(s_aux.shape, dtype=s_aux.dtype, device=s_aux.device))
