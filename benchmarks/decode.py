"""Decoding over a cache of keys and values: GB/s of cache read, against PyTorch's SDPA, in one run on one GPU.

    python benchmarks/decode.py [--json results.json] [--paged 64] [--append] [--num-splits 0] [--func]

One query a sequence attends to a full cache; a figure is the bytes of keys and values that the call must read,
divided by its time: the GPU's own, by CUDA graphs, so that small shapes show the kernels and not the host. SDPA
gets the same tensors with `enable_gqa`. The ratio is to the bandwidth of `Tensor.copy_` measured in the same run,
reads and writes counted. `--func` decodes by flash_attn_func, as models without such a cache do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import measuring
import torch
from measuring import host_microseconds
from torch.nn.functional import scaled_dot_product_attention

BATCHES = (1, 4, 16, 64, 128)
LENGTHS = (1024, 4096, 8192, 32768, 131072)
MAX_CACHE_BYTES = 32 << 30


class Shape(NamedTuple):
    """Sizes of one decoding step."""

    batch: int
    seqlen: int
    heads: int
    heads_k: int
    head_dim: int

    @property
    def cache_bytes(self) -> int:
        """Of keys and values, two bytes an element."""
        return 2 * 2 * self.batch * self.seqlen * self.heads_k * self.head_dim


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    """Median GPU time of one call."""
    measure = measuring.replayed(call, 10)
    return statistics.median(measure() for _ in range(rounds))


def copy_bandwidth(rounds: int) -> float:
    """GB/s of a copy of 4 GiB, reads and writes counted."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source), rounds) * 1e-6


def step(shape: Shape, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """The calls to be timed, on one set of tensors."""
    import flash_attn

    torch.manual_seed(0)
    size = (shape.batch, shape.seqlen, shape.heads_k, shape.head_dim)
    q = torch.randn(shape.batch, 1, shape.heads, shape.head_dim, device="cuda", dtype=dtype)
    k_cache, v_cache = (torch.randn(size, device="cuda", dtype=dtype) for _ in range(2))
    new: dict[str, Any] = {}
    lengths = shape.seqlen
    if options.append:
        lengths -= 1
        new = {name: torch.randn_like(k_cache[:, :1]) for name in ("k", "v")}
    new["cache_seqlens"] = torch.full((shape.batch,), lengths, dtype=torch.int32, device="cuda")
    ours = (k_cache, v_cache)
    if options.paged:
        count = shape.seqlen // options.paged
        order = torch.randperm(shape.batch * count, device="cuda")
        ours = tuple(x.reshape(-1, options.paged, *size[2:]) for x in ours)
        new["block_table"] = order.view(shape.batch, count).int()
    theirs = [x.transpose(1, 2) for x in (q, k_cache, v_cache)]

    def kvcache() -> torch.Tensor:
        out = flash_attn.flash_attn_with_kvcache(q, *ours, **new, causal=True, num_splits=options.num_splits)
        assert isinstance(out, torch.Tensor)
        return out

    def func() -> object:
        return flash_attn.flash_attn_func(q, k_cache, v_cache, causal=True)

    calls: dict[str, Callable[[], object]] = {"ours": func if options.func else kvcache}
    if not options.no_sdpa:
        calls["sdpa"] = lambda: scaled_dot_product_attention(*theirs, enable_gqa=True)
    return calls


def measure(shape: Shape, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, float]:
    """GB/s of every call; "host": CPU time of ours, in µs."""
    calls = step(shape, dtype, options)
    results = {name: shape.cache_bytes / milliseconds(call, options.rounds) * 1e-6 for name, call in calls.items()}
    results["host"] = statistics.median(host_microseconds(calls["ours"]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=measuring.writable, metavar="FILE", help="write every figure here too")
    parser.add_argument(
        "--rounds", type=measuring.count, default=20, metavar="N", help="times each call is measured (20)"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--heads", type=measuring.count, default=32, metavar="N")
    parser.add_argument("--heads-k", type=measuring.count, default=4, metavar="N")
    parser.add_argument("--head-dim", type=measuring.count, default=128, metavar="N")
    parser.add_argument("--batch", type=measuring.count, nargs="+", default=BATCHES, metavar="N")
    parser.add_argument("--seqlen", type=measuring.count, nargs="+", default=LENGTHS, metavar="N")
    parser.add_argument("--paged", type=int, default=0, metavar="SIZE", help="keys a page (0: no pages)")
    parser.add_argument("--append", action="store_true", help="each step also appends one key and value")
    parser.add_argument("--num-splits", type=int, default=0, metavar="N", help="parts of the keys (0: chosen)")
    parser.add_argument("--func", action="store_true", help="flash_attn_func instead of flash_attn_with_kvcache")
    parser.add_argument("--no-sdpa", action="store_true", help="time this repository's alone")
    options = parser.parse_args()
    if options.func and (options.paged or options.append or options.num_splits):
        raise SystemExit("error: --func has no cache: leave out --paged, --append and --num-splits")
    if bad := [seqlen for seqlen in options.seqlen if options.paged and (options.paged < 0 or seqlen % options.paged)]:
        raise SystemExit(f"error: --paged {options.paged} does not divide --seqlen {bad[0]}")
    measuring.need_gpu()

    dtype = getattr(torch, options.dtype)
    copy = copy_bandwidth(options.rounds)
    kind = f"pages of {options.paged}" if options.paged else "no cache" if options.func else "dense cache"
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}, {options.heads} query and "
        f"{options.heads_k} key heads of {options.head_dim}, {kind}; a copy runs at {copy:.0f} GB/s"
    )
    titles = ("batch", "seqlen", "cache MiB", "ours GB/s", "of copy", "SDPA GB/s", "ours/SDPA", "host µs")
    print("".join(f"{title:>12}" for title in titles))
    rows = []
    for batch, seqlen in itertools.product(options.batch, options.seqlen):
        shape = Shape(batch, seqlen, options.heads, options.heads_k, options.head_dim)
        if shape.cache_bytes > MAX_CACHE_BYTES:
            continue
        figures = measure(shape, dtype, options)
        rows.append({**shape._asdict(), "results": figures})
        ours, sdpa = figures["ours"], figures.get("sdpa")
        cells = [str(batch), str(seqlen), f"{shape.cache_bytes / 2**20:.0f}", f"{ours:.0f}", f"{ours / copy:.2f}"]
        cells += ["-", "-"] if sdpa is None else [f"{sdpa:.0f}", f"{ours / sdpa:.2f}"]
        cells.append(f"{figures['host']:.1f}")
        print("".join(f"{cell:>12}" for cell in cells), flush=True)
    if options.json is not None:
        head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy GB/s": copy}
        options.json.write_text(json.dumps({**head, "options": vars(options) | {"json": None}, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
