"""What each option of a call costs: its time for a pair of tokens that counts, against a plain call's.

    python benchmarks/features.py [--json results.json] [--rounds 5] [--dims 128 64]

2 sequences of 8192 tokens, 2048 / dim heads, causal, bfloat16. The plain call that an option is set against does the
same useful work or stands beside it: for sequences of unequal lengths as many of one length with as many pairs; for a
window the causal call without it, by the pairs that the window leaves. Forward and backward are measured apart (a cache
has none); in every round each call runs once, so that drift of the clocks hits all alike. 1.00: it costs nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import measuring
import torch
from measuring import milliseconds

Call = Callable[..., torch.Tensor]
SEQLEN = 8192
WINDOW = 1024
PAGE = 64
WAYS = ("forward", "backward")


class Case(NamedTuple):
    """An option: its call and the plain one beside it, their q, k and v, and how many pairs count in it of each that
    counts in the plain one."""

    name: str
    call: Call
    tensors: list[torch.Tensor]
    plain: Call
    plain_tensors: list[torch.Tensor]
    pairs: float = 1.0
    backward: bool = True


def draw(*shape: int, heads_k: int | None = None) -> list[torch.Tensor]:
    """q, k and v, (..., heads, dim) with heads_k heads of k and v."""
    shapes = [shape] + [(*shape[:-2], heads_k or shape[-2], shape[-1])] * 2
    return [torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_() for size in shapes]


def causal(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(*tensors, causal=True, **options)


def unequal(name: str, lengths: list[int], heads: int, dim: int) -> Case:
    """Packed sequences, beside as many of one length that have as many pairs of tokens."""
    from flash_attn import flash_attn_varlen_func

    count, pairs = len(lengths), sum(length**2 for length in lengths)
    same = round((pairs / count) ** 0.5 / 64) * 64
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")

    def packed(*tensors: torch.Tensor) -> torch.Tensor:
        return flash_attn_varlen_func(*tensors, starts, starts, max(lengths), max(lengths), causal=True)

    plain = draw(count, same, heads, dim)
    return Case(name, packed, draw(sum(lengths), heads, dim), causal, plain, pairs / (count * same**2))


def cached(name: str, tensors: list[torch.Tensor], page: int) -> Case:
    """As many queries as keys, which lie in a cache, in pages of so many where page is not 0."""
    from flash_attn import flash_attn_with_kvcache

    batch, seqlen, heads, dim = tensors[1].shape
    lengths = torch.full((batch,), seqlen, dtype=torch.int32, device="cuda")
    table = None
    if page:
        table = torch.randperm(batch * seqlen // page, device="cuda").int().view(batch, -1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        caches = (x.view(-1, page, heads, dim) if page else x for x in (k, v))
        return flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, block_table=table, causal=True)

    return Case(name, attend, tensors, causal, tensors, backward=False)


def cases(dim: int) -> list[Case]:
    heads = 2048 // dim
    tensors = draw(2, SEQLEN, heads, dim)
    slopes = torch.rand(heads, device="cuda")
    visible = (SEQLEN - WINDOW / 2) * WINDOW / (SEQLEN**2 / 2)
    generator = random.Random(0)
    long, short = ([generator.randint(100, most) for _ in range(count)] for most, count in ((4000, 8), (1000, 32)))

    def beside(name: str, pairs: float = 1.0, **options: object) -> Case:
        return Case(name, lambda *x: causal(*x, **options), tensors, causal, tensors, pairs)

    return [
        Case("GQA 8:1", causal, draw(2, SEQLEN, heads, dim, heads_k=heads // 8), causal, tensors),
        Case("GQA 8:1, one key head", causal, draw(1, SEQLEN, 8, dim, heads_k=1), causal, draw(1, SEQLEN, 8, dim)),
        unequal("varlen, 8 of 2048", [2048] * 8, heads, dim),
        unequal("varlen, 8 of 100 to 4000", long, heads, dim),
        unequal("varlen, 32 of 100 to 1000", short, heads, dim),
        unequal("varlen, 16384 and 255 of 128", [16384] + [128] * 255, heads, dim),
        beside(f"window of {WINDOW}", visible, window_size=(WINDOW, 0)),
        beside("dropout", dropout_p=0.1),
        beside("ALiBi", alibi_slopes=slopes),
        beside("softcap", softcap=30.0),
        cached("cache", tensors, 0),
        cached(f"cache in pages of {PAGE}", tensors, PAGE),
    ]


def ways(call: Call, tensors: list[torch.Tensor], with_backward: bool) -> list[Callable[[], object]]:
    """The forward and the backward of a call, after a first run of each."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return call(*tensors)

    forward()
    if not with_backward:
        return [forward]
    out = call(*tensors)
    dout = torch.randn_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, tensors, dout, retain_graph=True)

    backward()
    return [forward, backward]


def measure(case: Case, rounds: int) -> dict[str, object]:
    """What the option costs, and every time in milliseconds, forward and backward."""
    result: dict[str, object] = {"case": case.name}
    calls = ways(case.call, case.tensors, case.backward), ways(case.plain, case.plain_tensors, case.backward)
    for way, mine, plain in zip(WAYS, *calls, strict=False):
        times = [(milliseconds(mine, 5), milliseconds(plain, 5)) for _ in range(rounds)]
        result[way] = statistics.median(own / other for own, other in times) / case.pairs
        result[f"{way} ms"] = [own for own, _ in times]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=measuring.writable, metavar="FILE", help="write every figure here too")
    parser.add_argument(
        "--rounds", type=measuring.count, default=5, metavar="N", help="times each call is measured (5)"
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64], metavar="D", help="head dims (128 64)")
    arguments = parser.parse_args()
    measuring.need_gpu()
    for dim in arguments.dims:
        if dim not in (32, 64, 128, 256):
            raise SystemExit(f"error: --dims {dim}: one of 32, 64, 128, 256, which divide 2048 into heads")

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, time a pair of tokens, plain call: 1")
    print(f"{'dim':>4}  {'':28}{'forward':>10}{'backward':>10}")
    rows, samples = [], {}
    for dim in arguments.dims:
        torch.manual_seed(0)
        for case in cases(dim):
            row = {"dim": dim, **measure(case, arguments.rounds)}
            rows.append(row)
            there = [way for way in WAYS if way in row]
            print(f"{dim:>4}  {case.name:28}" + "".join(f"{row[way]:>10.2f}" for way in there), flush=True)
            samples |= {f"{dim} {case.name} {way} ms": row[f"{way} ms"] for way in there}
    if arguments.json is not None:
        from flash_attn import backend_info

        config = {"rounds": arguments.rounds, "dims": arguments.dims}
        machine = measuring.environment(torch.device("cuda"))
        content = measuring.results("features", machine, config, metrics=rows, summary=backend_info(), samples=samples)
        measuring.write(arguments.json, content)


if __name__ == "__main__":
    main()
