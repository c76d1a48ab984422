"""What FlashAttention-3's arguments become before the functions of flash_attn take them."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.torch.fp8 import is_fp8
from flash_attn.attention.fp8_cache import descales_of
from flash_attn.call.arguments import check_index, check_window
from flash_attn.call.calls import Descales, Window
from flash_attn.call.tracing import is_traced


def one_window(left: int, right: int, window_size: Window | None) -> Window:
    """The window of two arguments, or of the one that the private functions had before."""
    edges = check_window((left, right))
    if window_size is None:
        return edges
    window = check_window(window_size)
    if edges not in ((-1, -1), window):
        raise ValueError(
            f"window_size: got {window_size!r}, wanted None with window_size_left = {left}, window_size_right = {right}"
        )
    return window


def factors(q: torch.Tensor, k: torch.Tensor, batch: int, given: Descales) -> Descales:
    """Descales as flash_attn.fp8 takes them: one a query head for q."""
    if not is_fp8(q) and given[0] is given[1] is given[2] is None:
        return given
    descales = descales_of(q, k, batch, given)
    assert descales is not None
    return descales[0].repeat_interleave(q.shape[-2] // k.shape[-2], 1), descales[1], descales[2]


def check_used(name: str, used: torch.Tensor, lengths: torch.Tensor) -> None:
    """used: int32 (batch,), how many of each sequence's rows count. Its values are checked on a CPU."""
    check_index(name, used, lengths, 1)
    if used.shape != lengths.shape:
        raise ValueError(f"{name}: got {used.shape[0]} elements, wanted {lengths.shape[0]}, one a sequence")
    if used.is_cpu and not is_traced(used, lengths) and not bool(((used >= 0) & (used <= lengths)).all()):
        raise ValueError(f"{name}: got {used.tolist()}, wanted 0 to the lengths {lengths.tolist()}")


def used_rows(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits each sequence into three:

    its used rows, the unused queries (without keys), the unused keys (without queries).
    """
    offsets = []
    for name, cu_seqlens, used in (("seqused_q", cu_seqlens_q, seqused_q), ("seqused_k", cu_seqlens_k, seqused_k)):
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
        if used is None:
            used = ends - starts
        else:
            check_used(name, used, ends - starts)
        stops = torch.minimum(starts + used, ends)
        offsets.append((starts, stops, ends))
    (q_starts, q_stops, q_ends), (k_starts, k_stops, _) = offsets
    last_q, last_k = cu_seqlens_q[-1:], cu_seqlens_k[-1:]
    return (
        torch.cat([torch.stack([q_starts, q_stops, q_ends], 1).flatten(), last_q]),
        torch.cat([torch.stack([k_starts, k_stops, k_stops], 1).flatten(), last_k]),
    )


def chosen_rows(q: torch.Tensor, page_table: torch.Tensor, cache_batch_idx: torch.Tensor) -> torch.Tensor:
    check_index("page_table", page_table, q, 2)
    check_index("cache_batch_idx", cache_batch_idx, q, 1)
    if cache_batch_idx.is_cpu and not is_traced(cache_batch_idx):
        rows = page_table.shape[0]
        if not bool(((cache_batch_idx >= 0) & (cache_batch_idx < rows)).all()):
            raise ValueError(
                f"cache_batch_idx: got {cache_batch_idx.tolist()}, wanted 0 to {rows - 1}, rows of page_table"
            )
    return page_table.index_select(0, cache_batch_idx)
