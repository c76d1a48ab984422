"""The parameters of a planned call: addresses and strides of its tensors, and the tensors themselves.

An address is valid while its tensor lives. `Parameters` keeps every tensor whose address it gave until the launch.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from flash_attn.call.calls import AttentionCall, CacheCall
from flash_attn.core import ck_planner, device
from flash_attn.kernels import planning

DTYPES = {torch.float16: ck_planner.FP16, torch.bfloat16: ck_planner.BF16}
NO_TENSOR = (0, 0, 0, 0)


class Parameters:
    """The tensors of a call, in the form in which the planner takes them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def address(self, tensor: torch.Tensor | None) -> int:
        """0 for an absent tensor."""
        if tensor is None:
            return 0
        self.tensors.append(tensor)
        return tensor.data_ptr()

    def rows(self, tensor: torch.Tensor) -> tuple[int, int, int, int]:
        """Address and (batch, row, head) strides; (total, heads, dim) has batch stride 0."""
        self.tensors.append(tensor)
        strides = tensor.stride()
        if len(strides) == 4:
            return tensor.data_ptr(), strides[0], strides[1], strides[2]
        return tensor.data_ptr(), 0, strides[0], strides[1]

    def random(self, numbers: torch.Tensor | None) -> tuple[int, int, int, int]:
        """Address and (batch, head, row) strides of stored random numbers, zeros for None.

        (heads, total_q, keys) has batch stride 0.
        """
        if numbers is None:
            return NO_TENSOR
        strides = numbers.stride()
        return self.address(numbers), 0 if len(strides) == 3 else strides[0], strides[-3], strides[-2]

    def attention(
        self, call: AttentionCall, window: tuple[int, int], lse: tuple[int, int], rng_state: torch.Tensor | None
    ) -> tuple[int | float, ...]:
        """The fields of flash_attn_ck_shape; lse: the (batch, head) strides of softmax_lse."""
        q, options = call.q, call.options
        slopes = options.alibi_slopes
        return (
            DTYPES[q.dtype], call.batch, q.shape[-2], call.k.shape[-2], q.shape[-1], call.longest_q, call.longest_k,
            *window, options.scale, options.softcap, options.dropout_p, *lse, batch_stride(slopes),
            self.address(slopes), self.address(call.cu_seqlens_q), self.address(call.cu_seqlens_k),
            self.address(rng_state),
        )  # fmt: skip

    def cache(
        self, call: CacheCall, q: torch.Tensor, window: tuple[int, int], lse: tuple[int, int]
    ) -> tuple[int | float, ...]:
        """The fields of flash_attn_ck_shape for a call over a cache, whose queries are q (batch, rows, heads, dim)."""
        batch, rows, heads, head_dim = q.shape
        options = call.options
        slopes = options.alibi_slopes
        return (
            DTYPES[q.dtype], batch, heads, call.k_cache.shape[2], head_dim, rows, call.capacity,
            *window, options.scale, options.softcap, 0.0, *lse, batch_stride(slopes), self.address(slopes), 0, 0, 0,
        )  # fmt: skip

    def run(self, what: str, packed: bytes) -> None:
        """Plans a "forward", "backward" or "decode" and launches it on the tensors' device.

        Raises UnsupportedError before anything is launched.
        """
        launches = ck_planner.plan(what, packed)
        device.run(self.tensors[0], launches, self.tensors)


def batch_stride(alibi_slopes: torch.Tensor | None) -> int:
    return alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0


def unsupported_reason(tensor: torch.Tensor, v: torch.Tensor) -> str | None:
    """The reason why no CK kernel takes a q, k or v like this tensor with this v, or None."""
    if tensor.dtype not in DTYPES:
        return f"dtype: {tensor.dtype} is neither float16 nor bfloat16"
    if tensor.shape[-1] > planning.COMPOSABLE.head_dims[-1]:
        return f"head_dim: {tensor.shape[-1]} is above {planning.COMPOSABLE.head_dims[-1]}, the largest"
    if v.shape[-1] != tensor.shape[-1]:
        return f"v: head_dim {v.shape[-1]} is not the {tensor.shape[-1]} of q and k"
    if has_kernels(tensor):
        if device.loses_range(tensor.get_device(), tensor.dtype):
            target = device.of(tensor.get_device()).target
            return f"dtype: {tensor.dtype} loses numbers below 6.1e-5 on {target}, whose matrix unit flushes them"
        return None
    return f"target: this wheel has no CK kernels for {device.of(tensor.get_device()).target}"


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether this wheel has CK kernels for the GPU of a tensor."""
    index = tensor.get_device()
    answer: bool | None = device.kernels.get((index, "ck"))
    if answer is None:
        answer = device.kernels[index, "ck"] = device.of(index).has_composable_kernel()
    return answer


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its rows are dense and start at multiples of 16 bytes, else such a copy."""
    *outer, last = tensor.stride()
    misaligned = tensor.data_ptr() & 15
    for stride in outer:
        misaligned |= stride & 7
    return (
        tensor
        if last == 1 and not misaligned
        else torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)
    )


def padded(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    missing = head_dim - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else aligned(tensor)


def window_of(call: AttentionCall | CacheCall, *, one_query: bool = False) -> tuple[int, int]:
    """(left, right) of the window. A causal mask sets right to 0.

    one_query: there is a single query, the last one, which sees all keys under a causal mask.
    """
    left, right = call.options.window_size
    if call.options.causal:
        right = 0
    return (-1, -1) if one_query and left < 0 and right >= 0 else (left, right)


def has_window_over_pages(call: AttentionCall | CacheCall) -> bool:
    """Whether a window ends before keys in pages. Pages before a window may hold NaN, and Composable Kernel multiplies
    the values in the window's first tile by weights of 0."""
    return call.block_table is not None and call.options.window_size[0] >= 0
