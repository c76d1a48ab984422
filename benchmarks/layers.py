"""Rotary embedding, norms and cross entropy on the GPU here: time and memory rate, beside PyTorch's own operations.

    python benchmarks/layers.py

GB/s counts what each operation must read and write once. Times are the median of many calls, with the caches of the
GPU flushed between them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import measuring
import torch

DTYPE = torch.bfloat16
_FLUSH_BYTES = 512 << 20
_REPEATS = 30


def measure(call: Callable[[], object]) -> float:
    """Median seconds of a call."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call()
    times = []
    for _ in range(_REPEATS):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[_REPEATS // 2]


def row(name: str, moved: int, ours: Callable[[], object], plain: Callable[[], object]) -> None:
    seconds, beside = measure(ours), measure(plain)
    print(f"| {name} | {seconds * 1e6:.0f} | {moved / seconds / 1e9:.0f} | {beside * 1e6:.0f} |")


def gradient_of(call: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> Callable[[], object]:
    """The backward alone, of one forward."""
    out = call()
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    version = measuring.installed()
    if not torch.cuda.is_available():
        raise SystemExit("error: this measures a GPU, and torch sees none")
    from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_torch
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, flash_attn {version}, {DTYPE}")
    print("| operation | µs | GB/s | PyTorch, µs |")
    print("|-|-|-|-|")
    torch.manual_seed(0)
    for batch, seqlen, heads in ((1, 8192, 32), (128, 1, 32)):
        x = torch.randn(batch, seqlen, heads, 128, device="cuda", dtype=DTYPE)
        cos, sin = torch.rand(2, seqlen, 64, device="cuda").to(DTYPE)
        for interleaved in (False, True):
            row(
                f"rotary {batch} x {seqlen} x {heads} x 128{', interleaved' * interleaved}, in place",
                2 * x.nbytes,
                lambda x=x, cos=cos, sin=sin, i=interleaved: apply_rotary_emb(x, cos, sin, i, inplace=True),
                lambda x=x, cos=cos, sin=sin, i=interleaved: apply_rotary_emb_torch(x, cos, sin, i),
            )
    for rows, dim in ((8192, 4096), (8192, 8192), (128, 4096), (524288, 64), (524288, 128)):
        x, residual = torch.randn(2, rows, dim, device="cuda", dtype=DTYPE).requires_grad_().unbind(0)
        weight = torch.rand(dim, device="cuda", dtype=DTYPE, requires_grad=True)

        def ours(x: torch.Tensor = x, r: torch.Tensor = residual, w: torch.Tensor = weight) -> torch.Tensor:
            return rms_norm_fn(x, w, None, r, prenorm=True)[0]

        def plain(x: torch.Tensor = x, r: torch.Tensor = residual, w: torch.Tensor = weight) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x + r, w.shape, w, 1e-6)

        row(f"RMS norm and residual {rows} x {dim}", 4 * x.nbytes, ours, plain)
        leaves = [x, weight]
        # x + residual and dy are read, dx is written.
        backward = gradient_of(ours, leaves), gradient_of(plain, leaves)
        row(f"RMS norm and residual {rows} x {dim}, backward", 3 * x.nbytes, *backward)
    for rows, classes in ((8192, 32000), (4096, 128256), (4096, 50257)):
        logits = torch.randn(rows, classes, device="cuda", dtype=DTYPE, requires_grad=True)
        labels = torch.randint(classes, (rows,), device="cuda")

        def loss(x: torch.Tensor = logits, y: torch.Tensor = labels) -> torch.Tensor:
            return cross_entropy_loss(x, y)[0]

        def torchs(x: torch.Tensor = logits, y: torch.Tensor = labels) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(x, y, reduction="none")

        row(f"cross entropy {rows} x {classes}", logits.nbytes, loss, torchs)
        backward = gradient_of(loss, [logits]), gradient_of(torchs, [logits])
        row(f"cross entropy {rows} x {classes}, backward", 2 * logits.nbytes, *backward)


if __name__ == "__main__":
    main()
