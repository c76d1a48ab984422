"""Sums of the parts that programs of a backward write."""

from __future__ import annotations

import math

import torch

from flash_attn.attention.backends.triton.inputs import named, strides_of
from flash_attn.attention.backends.triton.kernels import find_one
from flash_attn.core.protocol import launch
from flash_attn.kernels.variants import bucket


def add_up(partial: torch.Tensor, out: torch.Tensor, parts: int, group: int, strides: tuple[int, int, int]) -> None:
    """Writes out ((batch,) rows, heads, columns) by `sums.attn_sum`, each row the sum of so many rows of partial.

    strides: of the first ones of two rows of out, of groups of parts, of parts in a group.
    """
    *outer, columns = out.shape
    kernel, count = find_one("sum", out.get_device(), out.dtype, columns), math.prod(outer)
    row, by_group, by_part = strides
    launch(
        kernel,
        (-(-count // kernel.block_m), -(-columns // bucket(columns, "sum")), 1),
        {
            **named("out", strides_of(out, 1)), "partial": partial, "out": out,
            "stride_pm": row, "stride_ps": by_group, "stride_rs": by_part, "nheads": outer[-1], "seqlen_q": outer[-2],
            "head_dim": columns, "parts": parts, "group": group, "rows": count,
        },
    )  # fmt: skip
