"""Cross entropy as a module."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.core.api import parameters
from flash_attn.ops.checks import check_switches
from flash_attn.ops.triton.cross_entropy import check_options, cross_entropy_loss


class CrossEntropyLoss(torch.nn.Module):
    """torch.nn.CrossEntropyLoss with a z-loss, a gradient in place and a vocabulary spread over processes.

    reduction         "mean" over rows whose target is not ignore_index, "sum" or "none"
    return_z_loss     returns (loss, z_loss), both reduced alike; z_loss is part of loss and carries no gradient
    The other options: flash_attn.ops.triton.cross_entropy.cross_entropy_loss.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise NotImplementedError(f"reduction: got {reduction!r}, wanted 'mean', 'sum' or 'none'")
        check_options(label_smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward, process_group)
        check_switches(return_z_loss=return_z_loss)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    @parameters(since={"precomputed_lse": "2.7"})
    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - upstream's name
        target: torch.Tensor,
        precomputed_lse: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The loss of input (rows, classes) and target, int (rows,).

        The errors call them logits and labels, as `cross_entropy_loss` does.
        """
        known = {} if precomputed_lse is None else {"precomputed_lse": precomputed_lse}
        loss, z_loss = cross_entropy_loss(
            input,
            target,
            **known,
            label_smoothing=self.label_smoothing,
            logit_scale=self.logit_scale,
            lse_square_scale=self.lse_square_scale,
            ignore_index=self.ignore_index,
            inplace_backward=self.inplace_backward,
            process_group=self.process_group,
        )
        if self.reduction != "none":
            loss, z_loss = loss.sum(), z_loss.sum()
            if self.reduction == "mean":
                counted = (target != self.ignore_index).sum()
                loss, z_loss = loss / counted, z_loss / counted
        return (loss, z_loss) if self.return_z_loss else loss
