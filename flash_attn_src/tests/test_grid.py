"""How many programs a kernel has: the edges of each rule."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from flash_attn.attention.backends.triton import attention, gradients, grid, inputs
from flash_attn.call.calls import GradientCall, attention_call


@pytest.mark.parametrize(
    ("group", "programs", "rows", "most", "splits"),
    [
        (8, 100, 4096, 8, 4),
        (8, 150, 4096, 8, 2),  # three programs for each of 100 multiprocessors are enough
        (8, 10, 4096, 8, 4),  # at most half the group
        (8, 10, 4096, 2, 2),
        (6, 10, 4096, 8, 3),
        (8, 10, 511, 8, 1),  # a program has fewer queries than the sum is worth
        (8, 10, 512, 8, 4),
        (8, 0, 4096, 8, 1),
        (1, 10, 4096, 8, 1),
    ],
)
def test_sharing_of_query_heads(group: int, programs: int, rows: int, most: int, splits: int) -> None:
    with mock.patch.object(grid.device, "of", return_value=mock.Mock(compute_units=100)):
        assert grid.splits_of(group, programs, rows, most, 0) == splits


def test_the_parts_take_no_more_memory_than_dq_would() -> None:
    q, k = torch.zeros(2, 600, 8, 64, dtype=torch.float16), torch.zeros(2, 300, 2, 64, dtype=torch.float16)
    call, lse = attention_call(q, k, k, softmax_scale=1.0), torch.zeros(2, 8, 600)
    given = GradientCall(call, q, q, lse, torch.empty_like(q), torch.empty_like(k), torch.empty_like(k))
    kernel = mock.Mock(block_m=64, block_n=64, num_xcds=1, arguments=mock.Mock(pointers=()))
    with (
        mock.patch.object(gradients, "find", return_value=(kernel, kernel)),
        mock.patch.object(gradients, "launch"),
        mock.patch.object(gradients, "splits_of", return_value=1) as asked,
    ):
        gradients.backward(given)
    assert asked.call_args.args[3] == 8 * 600 // (2 * 2 * 300)


@pytest.mark.parametrize(
    ("options", "even"),
    [({}, True), ({"causal": True}, False), ({"causal": True, "window_size": (0, -1)}, True)],
    ids=str,
)
def test_blocks_of_equal_work(options: dict[str, Any], even: bool) -> None:
    q = torch.zeros(1, 4, 1, 8)
    assert grid.is_even(attention_call(q, q, q, softmax_scale=1.0, **options)) is even


def test_a_window_wider_than_any_sequence_is_open() -> None:
    """An operator's own caller may pass any number, to which kernels add places of keys."""
    q, wide = torch.zeros(1, 4, 1, 8), (1 << 31) - 1
    call = attention_call(q, q, q, softmax_scale=1.0, window_size=(wide, wide))
    assert inputs.window_of(call) == (inputs.OPEN_WINDOW, inputs.OPEN_WINDOW)


@pytest.mark.parametrize(
    ("more", "op"),
    [
        ({}, "fwd-paged-whole"),
        ({"leftpad_k": torch.zeros(2, dtype=torch.int32)}, "fwd-paged"),  # blocks of keys begin within pages
        ({"dtype": torch.float32}, "fwd-paged"),
        ({"page": 80}, "fwd-paged"),
    ],
    ids=["whole", "padding", "fp32", "page of 80"],
)
def test_the_kernel_for_pages(more: dict[str, Any], op: str) -> None:
    more = {"dtype": torch.float16, "page": 128, **more}
    dtype, page = more.pop("dtype"), more.pop("page")
    q, k = torch.zeros(2, 4, 2, 64, dtype=dtype), torch.zeros(9, page, 2, 64, dtype=dtype)
    call = attention_call(q, k, k, softmax_scale=1.0, block_table=torch.zeros(2, 4, dtype=torch.int32), **more)
    with mock.patch.object(attention, "find", return_value=(mock.Mock(block_n=64),)):
        assert attention.forward_ops(call, "plain") == (op,)


def test_a_grid_of_packed_rows() -> None:
    """The grid has the blocks of the packed rows if that is below 2/3 of the blocks of equally long sequences."""
    assert grid.grid_of(64, 640, 6, 4, 64 * 34)[:2] == (10, 24)
    assert grid.grid_of(64, 640, 6, 4, 64 * 33)[:2] == (39, 4)
    assert grid.grid_of(64, 0, 6, 4, 1)[0] == 1
