"""The forward in FP8 against bf16: TFLOP/s, their ratio, and what the casts cost in accuracy, in one run on one GPU.

    python benchmarks/fp8.py [--json results.json] [--rounds 5]

"with casts" is flash_attn_fp8_func on bf16 tensors; "FP8 inputs" gets tensors that were cast before, as a model that
keeps them so would; v is transposed in both. The error is that of the result against attention in fp32 on the same
bf16 inputs (normal, and with one in a thousand values a hundred times as large), RMS relative to the RMS of the
result; beside it that of flash_attn_func. A causal mask counts half of the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import measuring
import torch
from measuring import Shape, milliseconds
from torch.nn.functional import scaled_dot_product_attention

SHAPES = tuple(
    Shape(batch, heads, seqlen, dim, causal)
    for batch, heads, seqlen, dim in ((4, 32, 4096, 64), (4, 16, 4096, 128), (2, 16, 8192, 128), (2, 8, 8192, 256))
    for causal in (False, True)
)


def speeds(shape: Shape, rounds: int) -> dict[str, float]:
    """Median TFLOP/s of each way; in every round each runs once, so that drift of the clocks hits all alike."""
    import flash_attn
    from flash_attn.attention.backends.triton import fp8 as backend

    size = (shape.batch, shape.seqlen, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    dtype = backend.fp8_format(q)
    cast = [backend.cast(x, dtype, None, None, False) for x in (q, k, v)]
    small, factors = zip(*cast, strict=True)
    names = dict(zip(("descale_q", "descale_k", "descale_v"), factors, strict=True))
    calls: dict[str, Callable[[], object]] = {
        "bf16": lambda: flash_attn.flash_attn_func(q, k, v, causal=shape.causal),
        "with casts": lambda: flash_attn.flash_attn_fp8_func(q, k, v, causal=shape.causal),
        "FP8 inputs": lambda: flash_attn.flash_attn_fp8_func(*small, causal=shape.causal, **names),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for call in calls.values():
            milliseconds(call, 3)
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(milliseconds(call))
    return {name: shape.flops / statistics.median(samples) * 1e-9 for name, samples in times.items()}


def errors(shape: Shape, outliers: bool) -> dict[str, float]:
    """Relative RMS error of the result in FP8 and in bf16, on a smaller batch."""
    import flash_attn

    torch.manual_seed(0)
    size = (1, shape.seqlen, 2, shape.head_dim)
    q, k, v = (torch.randn(size, device="cuda") for _ in range(3))
    if outliers:
        q, k, v = (torch.where(torch.rand_like(x) < 1e-3, 100.0 * x, x) for x in (q, k, v))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    wide = (x.float().transpose(1, 2) for x in (q, k, v))
    expected = scaled_dot_product_attention(*wide, is_causal=shape.causal).transpose(1, 2)
    scale = expected.square().mean().sqrt()
    ways = {"FP8": flash_attn.flash_attn_fp8_func, "bf16": flash_attn.flash_attn_func}
    with torch.no_grad():
        results = {name: way(q, k, v, causal=shape.causal) for name, way in ways.items()}
    return {name: float((out.float() - expected).square().mean().sqrt() / scale) for name, out in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=measuring.writable, metavar="FILE", help="write every figure here too")
    parser.add_argument("--rounds", type=measuring.count, default=5, metavar="N", help="times each way is measured (5)")
    options = parser.parse_args()
    measuring.need_gpu()

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, forward, TFLOP/s (ratio to bf16); errors")
    titles = ("batch heads seqlen dim", "", "bf16", "with casts", "FP8 inputs", "error FP8, bf16", "with outliers")
    print("".join(f"{title:>23}" for title in titles))
    rows = []
    for shape in SHAPES:
        speed = speeds(shape, options.rounds)
        plain, rough = errors(shape, False), errors(shape, True)
        rows.append({**shape._asdict(), "TFLOP/s": speed, "error": plain, "error with outliers": rough})
        cells = [f"{shape.batch} {shape.heads} {shape.seqlen} {shape.head_dim}", "causal" if shape.causal else "full"]
        cells += [f"{speed['bf16']:.0f}"]
        cells += [f"{speed[name]:.0f} ({speed[name] / speed['bf16']:.2f})" for name in ("with casts", "FP8 inputs")]
        cells += [f"{error['FP8']:.1e}, {error['bf16']:.1e}" for error in (plain, rough)]
        print("".join(f"{cell:>23}" for cell in cells), flush=True)
    if options.json is not None:
        head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
