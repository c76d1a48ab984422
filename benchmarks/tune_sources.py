"""Which source of kernels is fastest on this GPU: AMD's assembly, Composable Kernel or this project's Triton kernels.

    python benchmarks/tune_sources.py [--rounds 5] [--dry-run]

Forward and backward of 2 x 4096 tokens are timed with each source, for fp16 and bf16, four head dims, without a mask,
causal and with a window. The result is a table like the one in flash_attn/kernels/providers.py. It is written to the
user's cache, from which flash_attn takes it for calls of more than 128 queries: delete the file to undo it. Needs a
wheel of the `ck` backend. `python benchmarks/tune.py` searches tiles of the Triton kernels.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import measuring
import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DIMS = (64, 128, 192, 256)
TOKENS = 4096
# A row holds for longer calls than this. A shorter one leaves a tile of the assembly half empty.
SHORT = 128
REPEATS = 3
DEVICE = "cuda"


def fastest(target: str, op: str, dtype: str, dim: int, mask: str, times: Mapping[str, float]) -> Any:
    """The row of a kind of call from the milliseconds of each source that can serve it."""
    from flash_attn.kernels.providers import Row

    below = max((other for other in DIMS if other < dim), default=0)
    ranked = sorted(times, key=lambda source: times[source])
    why = "measured here: " + ", ".join(f"{source} {times[source]:.3f} ms" for source in ranked)
    return Row(target, op, (dtype,), (below + 1, dim), (mask,), SHORT + 1, tuple(ranked), why)


def backends_of_sources() -> dict[str, Any]:
    """A backend for each source. It raises NotImplementedError for a call that the source has no kernel for."""
    from flash_attn.backends import triton
    from flash_attn.backends.ck import ComposableKernel
    from flash_attn.backends.sources import Sources
    from flash_attn.kernels.providers import ASM, CK, TRITON

    ck = ComposableKernel(triton, alone=True)
    return {ASM: Sources(ck, triton, forced=ASM), CK: ck, TRITON: triton}


def calls(triton: Any, dtype: torch.dtype, dim: int, mask: str) -> dict[str, Callable[[Any], object]]:
    """Forward and backward of one kind of call, each by the backend that it gets. triton makes out for the second."""
    from flash_attn.calls import GradientCall, attention_call
    from flash_attn.kernels.assembly import PLAIN, WINDOW

    heads = max(2048 // dim, 8)
    q, k, v, dout = (torch.randn(2, TOKENS, heads, dim, device=DEVICE, dtype=dtype) for _ in range(4))
    window = (TOKENS // 4, 0) if mask == WINDOW else (-1, -1)
    call = attention_call(q, k, v, softmax_scale=dim**-0.5, causal=mask != PLAIN, window_size=window)
    out, lse, *_ = triton.forward(call)
    gradients = GradientCall(call, dout, out, lse, *(torch.empty_like(x) for x in (q, k, v)))
    return {"fwd": lambda backend: backend.forward(call), "bwd": lambda backend: backend.backward(gradients)}


def times(call: Callable[[Any], object], backends: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """Median milliseconds of a call by each source that can serve it. The sources take turns."""
    timed = {}
    for source, backend in backends.items():
        with suppress(NotImplementedError):
            timed[source] = measuring.replayed(partial(call, backend), REPEATS)
    taken: dict[str, list[float]] = {source: [] for source in timed}
    for _ in range(rounds):
        for source, run in timed.items():
            taken[source].append(run())
    return {source: statistics.median(each) for source, each in taken.items()}


def table(target: str, rounds: int) -> Iterator[Any]:
    """The rows of this GPU, as they are measured."""
    from flash_attn.kernels.assembly import CAUSAL, PLAIN, WINDOW

    backends = backends_of_sources()
    for name, dtype in DTYPES.items():
        for dim in DIMS:
            for mask in (PLAIN, CAUSAL, WINDOW):
                for op, call in calls(backends["triton"], dtype, dim, mask).items():
                    yield fastest(target, op, name, dim, mask, times(call, backends, rounds))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=measuring.count, default=5, metavar="N", help="times each call is timed (5)")
    parser.add_argument("--dry-run", action="store_true", help="print the table and write nothing")
    options = parser.parse_args(argv)
    label = measuring.installed()
    measuring.need_gpu()
    from flash_attn.backends import choice
    from flash_attn.runtime import build_info, device

    if build_info.load().backend != "ck":
        raise SystemExit(f"error: flash_attn {label} has Triton's kernels alone: install a wheel of the ck backend")
    target = device.of(0).target
    print(f"{torch.cuda.get_device_name()} ({target}), torch {torch.__version__}, flash_attn {label}")
    rows = []
    for row in table(target, options.rounds):
        print(f"{row.op} {row.dtypes[0]} d{row.dims[1]} {row.masks[0]}: {row.why}", flush=True)
        rows.append(row)
    if not options.dry_run:
        print(f"written: {choice.write(target, rows)}")


if __name__ == "__main__":
    main()
