"""Attention within chunks of the keys, as attention of shorter sequences."""

from __future__ import annotations

import torch


def split(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_k: int, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens_q, cu_seqlens_k) of the pieces of every sequence whose queries see no keys but each other's.

    Query i of a sequence stands at key i + seqlen_k - seqlen_q and sees keys of the chunk that this is in, chunks being
    counted from key 0. A piece is one chunk, its last query at its last key as in the whole, so that causal masks and
    windows mean the same; the first piece of a sequence are the queries before key 0, which see none. There are equally
    many pieces of each sequence, some of them empty. int32 in and out, no synchronisation.
    """
    starts_q, starts_k = cu_seqlens_q[:-1, None], cu_seqlens_k[:-1, None]
    lengths_q, lengths_k = (cu_seqlens.diff()[:, None] for cu_seqlens in (cu_seqlens_q, cu_seqlens_k))
    chunk = max(min(chunk, max_seqlen_k), 1)
    steps = torch.arange(-(-max_seqlen_k // chunk) + 1, dtype=torch.int32, device=cu_seqlens_k.device) * chunk
    stops_k = torch.minimum(steps, lengths_k)
    stops_q = (stops_k + lengths_q - lengths_k).clamp_min(0)
    return (
        torch.cat([cu_seqlens_q[:1], (starts_q + stops_q).flatten()]),
        torch.cat([cu_seqlens_k[:1], (starts_k + stops_k).flatten()]),
    )
