"""PyTorch's scaled_dot_product_attention served by these kernels: CPU time of a call, and memory beside the math path.

    python benchmarks/sdpa.py [--rounds N]

CPU times are medians, in us, of small calls that take turns. Memory is what a call allocates at its peak beyond its
inputs, in MiB, for attention shapes of image and video programs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from measuring import chosen_device, count, environment, host_microseconds
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as pytorch

# (batch, heads, queries, keys, head_dim), and whether a boolean mask (batch, 1, 1, keys) hides the keys of padding.
SHAPES = {
    "SD 1.5, 64 x 64 latent": (2, 8, 4096, 4096, 40, False),
    "SDXL, 128 x 128 latent": (2, 10, 4096, 4096, 64, False),
    "SDXL, text": (2, 10, 4096, 77, 64, True),
    "Flux, 1024 x 1024": (1, 24, 4608, 4608, 128, False),
    "Wan, 480p, 16 of its heads": (1, 16, 16380, 16380, 128, False),
    "VAE, one head": (1, 1, 4096, 4096, 512, False),
}


def host_times(device: torch.device, rounds: int) -> dict[str, float]:
    """Median us of CPU time of each way to call attention on small tensors."""
    import flash_attn

    q = torch.randn(1, 4, 128, 64, device=device, dtype=torch.bfloat16)
    rows = q.transpose(1, 2)
    mask = torch.ones(1, 1, 1, 128, dtype=torch.bool, device=device)

    def served(**options: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: functional.scaled_dot_product_attention(q, q, q, **options)

    ways: dict[str, tuple[Callable[[], object], AbstractContextManager[object] | None]] = {
        "flash_attn_func": (lambda: flash_attn.flash_attn_func(rows, rows, rows), None),
        "SDPA, served": (served(), None),
        "SDPA, served, boolean mask": (served(attn_mask=mask), None),
        "SDPA of PyTorch": (lambda: pytorch(q, q, q), nullcontext()),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (call, context) in ways.items():
            with context or flash_attn.use_for_sdpa():
                times[name] += host_microseconds(call, device)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_mebibytes(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor | None, float | str]:
    """The result of a call and the MiB that it allocates at its peak; None and a word where memory runs out."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        out = call()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return None, "out of memory"
    return out, (torch.cuda.max_memory_allocated() - before) / 2**20


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="turns of each (5)")
    options = parser.parse_args(argv)
    device = chosen_device("cuda")
    machine = environment(device)
    import flash_attn

    print(f"{machine['device']}, torch {machine['torch']}, flash_attn {machine['flash_attn']}")
    print(f"{'CPU time of a call':<32}{'us':>10}")
    for name, value in host_times(device, options.rounds).items():
        print(f"{name:<32}{value:>10.1f}")
    print(f"{'memory of a bf16 call':<32}{'served MiB':>14}{'math MiB':>16}{'largest difference':>22}")
    for name, (batch, heads, queries, keys, dim, is_masked) in SHAPES.items():
        q = torch.randn(batch, heads, queries, dim, device=device, dtype=torch.bfloat16)
        k, v = (torch.randn(batch, heads, keys, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
        mask = torch.rand(batch, 1, 1, keys, device=device) < 0.5 if is_masked else None
        with flash_attn.use_for_sdpa():
            attend = partial(functional.scaled_dot_product_attention, q, k, v, attn_mask=mask)
            attend()  # compiles, where there is no store
            out, served = peak_mebibytes(attend)
        with sdpa_kernel(SDPBackend.MATH):
            exact, plain = peak_mebibytes(partial(pytorch, q, k, v, attn_mask=mask))
        apart = "" if out is None or exact is None else f"{(out - exact).abs().max().item():.1e}"
        shown = [value if isinstance(value, str) else f"{value:.1f}" for value in (served, plain)]
        print(f"{name:<32}{shown[0]:>14}{shown[1]:>16}{apart:>22}")
    print(flash_attn.sdpa_report())


if __name__ == "__main__":
    main()
