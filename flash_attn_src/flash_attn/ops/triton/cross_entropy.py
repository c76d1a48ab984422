"""Cross entropy of logits, with label smoothing and a z-loss; a vocabulary may be spread over processes.

GPU tensors are served by two kernels. CPU tensors, and everything under torch.compile, by PyTorch's own operations,
which the compiler fuses and which are the kernels' oracle.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flash_attn.call.first_derivative import Gradients, first_only
from flash_attn.call.memory import refuse_shared
from flash_attn.call.tracing import arrived, is_traced
from flash_attn.core import layer
from flash_attn.core.api import parameters
from flash_attn.core.protocol import launch
from flash_attn.kernels.flags import LOSS_HAS_LSE, LOSS_IS_SPLIT
from flash_attn.ops.checks import check_int, check_number, check_switches, check_tensor

_INTS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_OVER_PROCESSES = "cross entropy over several processes"


@parameters(since={"precomputed_lse": "2.7"})
def cross_entropy_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    precomputed_lse: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, z_losses), fp32 (rows,): of s = logit_scale * logits and lse = log sum exp s, z_loss =
    lse_square_scale * lse ** 2 and loss = lse - (1 - label_smoothing) * s[label] - label_smoothing * mean(s) + z_loss.

    logits            (rows, classes) fp16, bf16 or fp32
    labels            int (rows,): 0 to classes - 1, or ignore_index, whose row gives 0. Another label raises
                      IndexError on a CPU; on a GPU, where it is not known in time, the row's loss is NaN
    precomputed_lse   fp32 (rows,): log sum exp of logits, where it is known; its gradient goes to logits all the same.
                      It stands for lse where logit_scale is 1 and label_smoothing 0, else lse is computed
    inplace_backward  the gradient may overwrite logits (on a GPU it does)
    process_group     of torch.distributed: logits hold this rank's equal part of the classes, labels count them all

    z_losses carry no gradient of their own: they are part of losses. Raises TypeError or ValueError naming the
    argument, what came and what was wanted.
    """
    _check(logits, labels, precomputed_lse)
    smoothing = check_options(
        label_smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward, process_group
    )
    if inplace_backward:
        refuse_shared({"logits": logits}, {"labels": labels, "precomputed_lse": precomputed_lse})
    options = (smoothing, float(logit_scale), float(lse_square_scale), ignore_index)
    if logit_scale != 1.0 or smoothing != 0.0:
        precomputed_lse = None
    if logits.is_cuda and not is_traced(logits, labels, precomputed_lse):
        return _CrossEntropy.apply(logits, labels, precomputed_lse, *options, inplace_backward, process_group)
    return reference(logits, labels, precomputed_lse, *options, process_group)


class CrossEntropyLoss:
    """The name that clients know: `apply` is cross_entropy_loss."""

    apply = staticmethod(cross_entropy_loss)


def _ranks(process_group: Any) -> tuple[int, int]:
    if process_group is None:
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def _gather(lse: torch.Tensor, process_group: Any, world: int) -> torch.Tensor:
    """log sum exp over all ranks' parts."""
    parts = [torch.empty_like(lse) for _ in range(world)]
    dist.all_gather(parts, lse.contiguous(), group=process_group)
    return torch.stack(parts).logsumexp(0)


def reference(
    logits: torch.Tensor,
    labels: torch.Tensor,
    precomputed_lse: torch.Tensor | None,
    smoothing: float,
    scale: float,
    square_scale: float,
    ignore_index: int,
    process_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cross_entropy_loss by PyTorch's operations, differentiable."""
    rank, world = _ranks(process_group)
    cols = logits.shape[1]
    first = rank * cols
    labels = labels.long()
    ignored = labels == ignore_index
    if world > 1:
        logits = _FirstOnly.apply(logits)
    s = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(ignored[:, None], 0.0) * scale
    if logits.is_cpu and not is_traced(logits):
        wrong = ~ignored & ((labels < 0) | (labels >= cols * world))
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise IndexError(f"labels: got {int(labels[row])} at row {row}, wanted 0 to {cols * world - 1} or "
                             f"ignore_index {ignore_index}")  # fmt: skip
    lse = s.logsumexp(1)
    place = labels - first
    here = (place >= 0) & (place < cols)
    picked = torch.where(here, s.gather(1, place.clamp(0, cols - 1)[:, None])[:, 0], 0.0)
    losses = -(1.0 - smoothing) * picked
    if smoothing > 0.0:
        losses = losses - smoothing * s.sum(1) / (cols * world)
    known = precomputed_lse
    if world > 1:
        with torch.no_grad():
            known = _gather(lse, process_group, world) if known is None else known
            total = losses.clone()
            dist.all_reduce(total, group=process_group)
        losses = losses + (total - losses).detach()
        lse = known + (lse - known).exp().detach() * (lse - lse.detach())
    elif known is not None:
        lse = lse + (known - lse).detach()
    z_losses = square_scale * lse * lse
    losses = (losses + lse + z_losses).masked_fill(ignored, 0.0)
    return losses, z_losses.detach().masked_fill(ignored, 0.0)


class _FirstOnly(torch.autograd.Function):
    """Cross entropy of logits that are split over processes.

    A second derivative would lack the parts of the other processes.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, dlogits: torch.Tensor) -> torch.Tensor | None:
        return first_only(_OVER_PROCESSES, lambda _, __, gradient: (gradient,), ctx, dlogits)[0]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        precomputed_lse: torch.Tensor | None,
        smoothing: float,
        scale: float,
        square_scale: float,
        ignore_index: int,
        inplace_backward: bool,
        process_group: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rank, world = _ranks(process_group)
        labels = labels.long().contiguous()
        options = (smoothing, scale, square_scale, ignore_index, logits.shape[1] * world, rank * logits.shape[1])
        losses, z_losses, lse = launch_forward(logits, labels, precomputed_lse, *options)
        if world > 1:
            dist.all_reduce(losses, group=process_group)
            lse = _gather(lse, process_group, world) if precomputed_lse is None else lse
            ignored = labels == ignore_index
            z_losses = (square_scale * lse.square()).masked_fill(ignored, 0.0)
            losses = losses + lse.masked_fill(ignored, 0.0) + z_losses
        ctx.save_for_backward(logits, labels, lse)
        ctx.options, ctx.is_split = (*options, inplace_backward), world > 1
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, dlosses: torch.Tensor, _: torch.Tensor) -> Gradients:
        dlosses = arrived(dlosses)
        if torch.is_grad_enabled() and not ctx.is_split:  # for a second derivative
            logits, labels, lse = ctx.saved_tensors
            return _gradient(logits, labels, lse, dlosses, *ctx.options[:5]), *(None,) * 8
        return *first_only(_OVER_PROCESSES, _by_kernel, ctx, dlosses), *(None,) * 8


def _by_kernel(ctx: Any, saved: tuple[torch.Tensor, ...], dlosses: torch.Tensor) -> Gradients:
    logits, labels, lse = saved
    dlogits = launch_backward(logits, labels, lse, dlosses, *ctx.options)
    if dlogits is logits:  # Autograd then refuses a second backward, which would read the gradient as logits.
        torch.autograd.graph.increment_version(logits)
    return (dlogits,)


def _gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    dlosses: torch.Tensor,
    smoothing: float,
    scale: float,
    square_scale: float,
    ignore_index: int,
    classes: int,
) -> torch.Tensor:
    """The gradient of logits by PyTorch's operations, which autograd can differentiate."""
    ignored = (labels == ignore_index)[:, None]
    s = logits.float().masked_fill(ignored, 0.0) * scale
    own = s.logsumexp(1)
    lse = own[:, None] + (lse - own).detach()[:, None].masked_fill(ignored, 0.0)
    p = (s - lse).exp() * (1.0 + 2.0 * square_scale * lse)
    picked = torch.arange(classes, device=labels.device) == labels[:, None]
    target = torch.where(picked, 1.0 - smoothing, 0.0) + smoothing / classes
    dlogits = dlosses[:, None] * scale * (p - target)
    return dlogits.masked_fill(ignored, 0.0).to(logits.dtype)


def launch_forward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    precomputed_lse: torch.Tensor | None,
    smoothing: float,
    scale: float,
    square_scale: float,
    ignore_index: int,
    classes: int,
    first_class: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses, z_losses, lse) of each row, fp32. With a part of the classes, losses lack the terms of lse."""
    logits = layer.dense_rows(logits)
    rows, cols = logits.shape
    losses, z_losses, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    flags = LOSS_IS_SPLIT if classes > cols else 0
    if precomputed_lse is not None:
        lse, flags = precomputed_lse.contiguous(), flags | LOSS_HAS_LSE
    kernel, unit = layer.find("cross-entropy-fwd", logits, cols, cols, logits.stride(0))
    launch(
        kernel,
        (rows, 1, 1),
        {
            "logits": logits, "labels": labels, "loss": losses, "lse": lse, "z_loss": z_losses,
            "smoothing": smoothing, "scale": scale, "square_scale": square_scale, "ignore_index": ignore_index,
            "classes": classes, "first_class": first_class,
            "cols": cols // unit, "stride": logits.stride(0) // unit, "flags": flags,
        },
    )  # fmt: skip
    return losses, z_losses, lse


def launch_backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    dlosses: torch.Tensor,
    smoothing: float,
    scale: float,
    square_scale: float,
    ignore_index: int,
    classes: int,
    first_class: int,
    inplace: bool,
) -> torch.Tensor:
    """Gradient of the losses with respect to logits, into logits themselves if inplace."""
    original, logits = logits, layer.dense_rows(logits)
    rows, cols = logits.shape
    dlogits = logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
    kernel, unit = layer.find("cross-entropy-bwd", logits, cols, cols, logits.stride(0), dlogits.stride(0))
    launch(
        kernel,
        (rows, -(-cols // kernel.block_n), 1),
        {
            "logits": logits, "labels": labels, "lse": lse, "dloss": dlosses.contiguous(), "dlogits": dlogits,
            "smoothing": smoothing, "scale": scale, "square_scale": square_scale, "ignore_index": ignore_index,
            "classes": classes, "first_class": first_class,
            "cols": cols // unit, "stride": logits.stride(0) // unit, "stride_d": dlogits.stride(0) // unit,
        },
    )  # fmt: skip
    return original.copy_(dlogits) if inplace and original is not logits else dlogits


def _check(
    logits: torch.Tensor,
    labels: torch.Tensor,
    precomputed_lse: torch.Tensor | None,
) -> None:
    check_tensor("logits", logits, ("rows", "classes"))
    if logits.shape[1] == 0:
        raise ValueError("logits: got 0 classes, wanted 1 or more")
    check_tensor("labels", labels, like=logits, shape=(logits.shape[0],), dtypes=_INTS)
    if precomputed_lse is not None:
        exact = (torch.promote_types(logits.dtype, torch.float32),)
        check_tensor("precomputed_lse", precomputed_lse, like=logits, shape=(logits.shape[0],), dtypes=exact)


def check_options(
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    ignore_index: int,
    inplace_backward: bool,
    process_group: Any,
) -> float:
    """label_smoothing, a float, of options of cross_entropy_loss that are right."""
    for name, value in (("logit_scale", logit_scale), ("lse_square_scale", lse_square_scale)):
        check_number(name, value, -3.0e38, 3.0e38)
    check_int("ignore_index", ignore_index)
    check_switches(inplace_backward=inplace_backward)
    if process_group is not None and not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
        raise TypeError(f"process_group: got {process_group!r}, wanted a process group of torch.distributed or None")
    return check_number("label_smoothing", label_smoothing, 0.0, 1.0)
