"""Dropout in the kernels of Composable Kernel: which calls may have it, and which random numbers they store."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.ck.parameters import window_of
from flash_attn.call.calls import AttentionCall


def unsupported_reason(call: AttentionCall) -> str | None:
    """The reason why CK's kernels cannot draw this call's random numbers.

    Forward and backward both call this, because both must draw the same pattern, and Triton's kernels draw another one.
    """
    q, k, batch, seqlen_q, seqlen_k = call.q, call.k, call.batch, call.longest_q, call.longest_k
    if call.options.softcap > 0.0:
        return "softcap: not together with dropout_p"
    if call.options.scale <= 0.0:
        return f"scale: {call.options.scale} is not above 0"
    if max(batch, q.shape[-2], -(-seqlen_q // 64)) > 65535:
        return f"dropout_p: a grid takes 65535 of batch {batch}, of {q.shape[-2]} heads, of {seqlen_q} / 64 queries"
    if call.options.alibi_slopes is not None and max(seqlen_q, seqlen_k) >= 65536:
        return "alibi_slopes: distances of 65536 and more do not fit the 16 bits of the kernels"
    # Bytes of the backward's fp32 sums of one sequence. No other tensor of the call takes more for a sequence.
    widest = 4 * max(seqlen_q * max(q.stride(-3), q.shape[-2] * 256), seqlen_k * k.stride(-3))
    return None if widest < 2**31 else "dropout_p: one sequence may take 2^31 bytes or more in the backward"


def signed_probabilities(call: AttentionCall, lse: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """S_dmask (batch, heads, seqlen_q, seqlen_k): the probabilities, negative where dropped; for tests only.

    random is what the kernels stored: below or at floor(255 * (1 - dropout_p)) where kept, (batch, heads, seqlen_q,
    seqlen_k) or (heads, total_q, seqlen_k).
    """
    q, k, alibi_slopes = call.q, call.k, call.options.alibi_slopes
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    left, right = window_of(call)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        sequences = list(zip(q, k, lse, random, strict=True))
    else:
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        spans = zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False)
        sequences = [(q[a:b], k[c:d], lse[:, a:b], random[:, a:b]) for a, b, c, d in spans]
    nheads = q.shape[-2]
    dmask = torch.zeros((len(sequences), nheads, call.longest_q, call.longest_k), dtype=q.dtype, device=q.device)
    for entry, (queries, keys, row_lse, numbers) in enumerate(sequences):
        rows, columns = queries.shape[0], keys.shape[0]
        keys = keys.repeat_interleave(nheads // keys.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", queries.float(), keys.float()) * call.options.scale
        place = torch.arange(rows, device=q.device)[:, None] + columns - rows
        distance = torch.arange(columns, device=q.device) - place
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[entry]
            scores -= slopes[:, None, None] * distance.abs()
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance >= -left
        if right >= 0:
            seen &= distance <= right
        p = torch.exp(scores - row_lse[..., None])
        kept = numbers[..., :columns] <= int(255 * (1.0 - call.options.dropout_p) + 1e-5)  # as fp32 rounds it
        # The sign must survive rounding to zero in the mask's type.
        signed = torch.where(kept, p, -p.clamp_min(torch.finfo(q.dtype).tiny)).masked_fill(~seen, 0.0)
        dmask[entry, :, :rows, :columns] = signed.to(q.dtype)
    return dmask
