"""PyTorch's FlexAttention served by these kernels, beside PyTorch's own compiled kernels in the same run.

    python benchmarks/flex.py [--rounds N] [--seqlen N]

Times are in ms, bf16, 2 batches of 16 heads, head dim 128. first: the first call, in which kernels are compiled. call:
the median of a call that is waited for. GPU: the time of its kernels, which is what a call costs where the host runs
ahead of the GPU. ratio: PyTorch's time divided by the served one's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from measuring import chosen_device, count, environment
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks
from torch.profiler import ProfilerActivity, profile

BATCH, HEADS, DIM = 2, 16, 128


def causal(_b: Any, _h: Any, q: Any, kv: Any) -> Any:
    """A mask_mod: no key behind the query."""
    return q >= kv


def cases(seqlen: int, device: torch.device) -> dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]]:
    """Name -> mask_mod and score_mod."""
    documents = torch.arange(seqlen, device=device) * 5 // seqlen
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=device)
    return {
        "causal": (causal, None),
        "window of 1024": (and_masks(causal, lambda _b, _h, q, kv: q - kv < 1024), None),
        "five documents": (and_masks(causal, lambda _b, _h, q, kv: documents[q] == documents[kv]), None),
        "prefix of 1000": (or_masks(causal, lambda _b, _h, _q, kv: kv < 1000), None),
        "checkered blocks": (lambda _b, _h, q, kv: (q // 128 + kv // 128) % 2 == 0, None),
        "causal, ALiBi": (causal, lambda score, _b, h, q, kv: score + slopes[h] * (kv - q)),
        "causal, soft cap": (causal, lambda score, _b, _h, _q, _kv: 20 * torch.tanh(score / 20)),
        "relative bias": (None, lambda score, _b, _h, q, kv: score + (q - kv) / seqlen),
    }


def milliseconds(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The first call and the median of the others, in ms."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[0], statistics.median(times[1:])


def on_gpu(call: Callable[[], object]) -> float:
    """The time of the kernels of a call, in ms."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiled.key_averages()) / 1e3


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=20, metavar="N", help="calls of each (20)")
    parser.add_argument("--seqlen", type=count, default=4096, metavar="N", help="queries and keys (4096)")
    options = parser.parse_args(argv)
    device = chosen_device("cuda")
    machine = environment(device)
    from flash_attn.flex import flex_report, use_for_flex

    print(f"{machine['device']}, torch {machine['torch']}, flash_attn {machine['flash_attn']}")
    columns = f"{'first':>8}{'call':>8}{'GPU':>8}"
    print(f"{'':<32}{'PyTorch':>24}{'served':>24}{'ratio':>16}")
    print(f"{'':<32}{columns}{columns}{'call':>8}{'GPU':>8}{'apart':>10}")
    leaves = [
        torch.randn(BATCH, HEADS, options.seqlen, DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    dout = torch.randn_like(leaves[0])
    compiled = torch.compile(flex_attention)
    for name, (mask_mod, score_mod) in cases(options.seqlen, device).items():
        mask = mask_mod and create_block_mask(mask_mod, None, None, options.seqlen, options.seqlen, device=device)

        def forward(mask: Any = mask, score_mod: Any = score_mod) -> Any:
            return compiled(*leaves, score_mod=score_mod, block_mask=mask)

        def both(forward: Callable[[], Any] = forward) -> object:
            return torch.autograd.grad(forward(), leaves, dout)

        for part, call in (("forward", forward), ("and backward", both)):
            results = []
            for is_served in (False, True):
                with use_for_flex() if is_served else nullcontext():
                    results.append((*milliseconds(call, options.rounds), on_gpu(call), call()))
            (*own, exact), (*served, got) = results
            apart = (got - exact) if isinstance(got, torch.Tensor) else (got[0] - exact[0])
            times = "".join(f"{first:>8.0f}{median:>8.2f}{kernels:>8.2f}" for first, median, kernels in (own, served))
            print(
                f"{name:<20}{part:>12}{times}{own[1] / served[1]:>8.2f}{own[2] / served[2]:>8.2f}"
                f"{apart.abs().max().item():>10.1e}"
            )
    print(flex_report())


if __name__ == "__main__":
    main()
