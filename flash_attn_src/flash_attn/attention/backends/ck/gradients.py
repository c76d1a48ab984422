"""The gradients of attention by Composable Kernel."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.ck import dropout
from flash_attn.attention.backends.ck.fallback import Fallback
from flash_attn.attention.backends.ck.parameters import Parameters, aligned, padded, unsupported_reason, window_of
from flash_attn.call.calls import GradientCall, replace
from flash_attn.call.options import CK_BACKWARD
from flash_attn.core import ck_planner, device
from flash_attn.core.ck_planner import UnsupportedError
from flash_attn.kernels import planning


def backward(gradients: GradientCall, fallback: Fallback) -> torch.Tensor:
    """See `protocol.Backend.backward`."""
    call = gradients.forward
    reason = unsupported_reason(call.q, call.v)
    if reason is None and (name := CK_BACKWARD.unserved(call)) is not None:
        reason = f"{name}: the backward has none"
    if reason is None and call.options.dropout_p > 0.0:
        reason = dropout.unsupported_reason(call)
        if call.options.s_aux is not None:  # the forward drew its numbers in the pattern of the Triton kernels
            reason = "s_aux: not together with dropout_p"
    if reason is not None:
        return fallback.because("backward", reason).backward(gradients)

    packed = call.cu_seqlens_q is not None
    head_dim = next(dim for dim in planning.COMPOSABLE.head_dims if call.q.shape[-1] <= dim)
    dout, q, k, v, out = (padded(x, head_dim) for x in (gradients.dout, call.q, call.k, call.v, gradients.out))
    call = replace(call, q=q, k=k, v=v)
    nheads, nheads_k = q.shape[-2], k.shape[-2]
    dq, dk, dv, softmax_lse = gradients.dq, gradients.dk, gradients.dv, gradients.softmax_lse.contiguous()
    empty = 0 in (call.batch, call.longest_q, call.longest_k, q.shape[0], k.shape[0])
    if packed or empty:  # rows outside of every sequence, or without a key
        delta = torch.zeros_like(softmax_lse)
        for gradient in (dq, dk, dv):
            gradient.zero_()
        if empty:
            return delta
    else:
        delta = torch.empty_like(softmax_lse)
    new_dq = _as_result(dq, q.shape)
    # The kernels write a separate gradient of keys and values for each query head.
    shared = (*k.shape[:-2], nheads, head_dim)
    new_dk, new_dv = _as_result(dk, shared), _as_result(dv, shared)
    parameters = Parameters()
    address = parameters.address
    tensors = [field for x in (q, k, v, out, dout, new_dq, new_dk, new_dv) for field in parameters.rows(x)]
    lse_strides = (0 if packed else softmax_lse.stride(0), softmax_lse.stride(-2))
    shape = parameters.attention(call, window_of(call), lse_strides, call.options.rng_state)
    statistics = (address(softmax_lse), address(delta))
    rest = (q.shape[0] if packed else 0, int(call.deterministic), 0)
    workspace = ck_planner.backward_workspace(ck_planner.BACKWARD.pack(*shape, *tensors, *statistics, 0, *rest))
    sums = torch.zeros(workspace // 4, dtype=torch.float32, device=q.device)
    try:
        parameters.run("backward", ck_planner.BACKWARD.pack(*shape, *tensors, *statistics, address(sums), *rest))
    except UnsupportedError as error:
        if (
            call.options.dropout_p > 0.0
        ):  # the forward drew its numbers in another pattern than the Triton kernels would
            raise NotImplementedError(f"the CK backend cannot do this backward with dropout: {error}") from None
        return fallback.because("backward", str(error)).backward(gradients)
    for gradient, computed in ((dq, new_dq), (dk, new_dk), (dv, new_dv)):
        if computed is gradient:
            continue
        value = computed[..., : gradient.shape[-1]]
        if value.shape != gradient.shape:
            value = value.unflatten(-2, (nheads_k, nheads // nheads_k)).sum(-2)
        gradient.copy_(value)
    # The kernels keep it times 1 - dropout_p.
    return delta if call.options.dropout_p == 0.0 else delta / (1.0 - call.options.dropout_p)


def row_sums(gradients: GradientCall, delta: torch.Tensor) -> bool:
    """Fills delta with rowsum(dout * out) by the first kernel of CK's backward. Returns False if CK has no such kernel.

    delta is laid out as softmax_lse, and is zero in rows outside of sequences.
    """
    call = gradients.forward
    if call.q.shape[-1] not in planning.COMPOSABLE.head_dims or unsupported_reason(call.q, call.v) is not None:
        return False
    q, k, v, out, dout = (aligned(x) for x in (call.q, call.k, call.v, gradients.out, gradients.dout))
    packed = call.cu_seqlens_q is not None
    parameters = Parameters()
    # dq, dk and dv are not written, so tensors of the same form take their place.
    tensors = [field for x in (q, k, v, out, dout, q, q, q) for field in parameters.rows(x)]
    lse_strides = (0 if packed else delta.stride(0), delta.stride(-2))
    shape = parameters.attention(replace(call, q=q, k=k, v=v), window_of(call), lse_strides, None)
    address = parameters.address(delta)
    rest = (q.shape[0] if packed else 0, 0, 0)
    launches = ck_planner.plan("backward", ck_planner.BACKWARD.pack(*shape, *tensors, *(address,) * 3, *rest))
    dots = [launch for launch in launches if launch.kernel.startswith("dot-")]
    device.run(q, dots, parameters.tensors)
    return True


def _as_result(gradient: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The gradient itself if the kernels can write it, else a new tensor of a shape that they can write.

    A new tensor of packed sequences is zero outside of them.
    """
    if gradient.shape == shape and aligned(gradient) is gradient:
        return gradient
    make = torch.zeros if len(shape) == 3 else torch.empty
    return make(shape, dtype=gradient.dtype, device=gradient.device)
