"""megatron-core's calls of flash_attn, for inference, against attention by the book, on a GPU or the CPU.

    pip install --no-deps megatron-core==0.16.1 && python flash_attn_src/tests/clients/with_megatron.py

It takes flash-attn-3's functions where that wheel is installed. Its attention in training with context parallel is
TransformerEngine's, which needs CUDA: its own DotProductAttention refuses context parallel.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flash_attn
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import reference
from megatron.core.transformer import attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, HEADS_K, DIM, PAGE = 4, 2, 64, 256
# Of bf16, whose unit in the last place is 2^-8.
LIMIT = 2e-2


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, torch.bfloat16)


def a_layer() -> Any:
    """What the methods read of the module that they belong to."""
    layer = SimpleNamespace(training=False, config=None, batch_invariant_mode=False, softmax_scale=None)
    layer._flash_attention_3_forward_wrapper = attention.Attention._flash_attention_3_forward_wrapper.__get__(layer)
    return layer


def check(name: str, got: torch.Tensor, *tensors: torch.Tensor) -> None:
    best, _ = reference.attention(*(x[None] for x in tensors), causal=True)
    error = float((got.float() - best[0]).abs().max())
    assert error < LIMIT, f"{name}: error {error:.2e}"
    print(f"{name}: as by the book")


def static_batches() -> None:
    """One token for each of two sequences, rotated and appended to their caches."""
    q, k, v = (draw(1, 2, heads, DIM) for heads in (HEADS, HEADS_K, HEADS_K))
    caches = [draw(40, 2, HEADS_K, DIM) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    cos, sin = (draw(40, DIM // 2) for _ in range(2))
    lengths = (7, 11)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out = attention.Attention.flash_decode(a_layer(), seqlens, q, k, v, *caches, cos, sin)
    for i, n in enumerate(lengths):
        turned_q, turned_k = (reference.rotate(x[:, i], cos, sin, [n], False).to(x.dtype) for x in (q, k))
        keys = torch.cat((before[0][:n, i], turned_k))
        values = torch.cat((before[1][:n, i], v[:, i]))
        check("flash_decode", out[i], turned_q, keys, values)


def dynamic_batches() -> None:
    """Pages: a sequence that decodes beside one that begins, then one token for both."""
    pages = [draw(8, PAGE, HEADS_K, DIM) for _ in range(2)]
    lengths, new = (300, 20), (1, 20)
    table, seqlens, ends_q, ends_k = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE)
        for x in ([[3, 0], [5, 1]], lengths, [0, 1, 21], [0, 300, 320])
    )
    kept = [[x[table[i].long()].flatten(0, 1)[:n] for x in pages] for i, n in enumerate(lengths)]
    for tokens, decodes in ((new, False), ((1, 1), True)):
        q = draw(sum(tokens), 1, HEADS, DIM)
        out = attention.Attention.flash_decode_and_prefill(
            a_layer(), q, *pages, max(tokens), max(lengths), ends_q, ends_k, seqlens, table, decodes
        )
        parts = zip(out.split(tokens), q.split(tokens), kept, strict=True)
        for got, rows, (keys, values) in parts:
            check("decode" if decodes else "decode and prefill", got[:, 0], rows[:, 0], keys, values)


def main() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        static_batches()
        dynamic_batches()
    number = 3 if attention.HAVE_FA3 else 2
    print(f"megatron-core, flash_attn {flash_attn.__version__}, FlashAttention-{number}'s functions: {DEVICE.type}")


if __name__ == "__main__":
    main()
