"""Calls of the C library through AMD's HIP runtime, whose GPU is a simulator, compared with attention in fp32.

    python -m amdgpu_simulator.hip.process 6.4 gfx942 libflash_attn_rocm/tests/simulated.py LIBRARY gfx942
    python -m amdgpu_simulator.hip.process 6.4 gfx942 libflash_attn_rocm/tests/simulated.py LIBRARY gfx942 amd

LIBRARY is build/libflash_attn_rocm.so. The second line takes AMD's kernels: a forward by Composable Kernel, and one by
assembly. The library reads the store, plans, loads and launches. This process executes
what arrives in the queues of the simulated GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "candle-flash-rocm/tests")]

import simulated_calls as crate  # noqa: E402 - after the path
import torch  # noqa: E402
from flash_attn.kernels.variants import Variant  # noqa: E402
from interface import Library  # noqa: E402

from amdgpu_simulator import gpu  # noqa: E402
from amdgpu_simulator.hip import packets  # noqa: E402
from amdgpu_simulator.isa import machine  # noqa: E402

# Causal with grouped heads; two sequences with a head dim that no kernel has for itself. Packed sequences need memory
# that HIP fills, which the memory of this process is not.
CASES = (
    crate.Case("bf16", 1, 70, 2, 1, 32, True),
    crate.Case("fp16", 2, 33, 2, 2, 24, False),
)


def fields(case: crate.Case, tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """The structs of the forward and of the backward, by the names of the header's fields."""
    shape = {
        "dtype": ("fp16", "bf16").index(case.dtype),
        "causal": int(case.causal), "batch": case.batch, "heads": case.heads, "heads_k": case.heads_k,
        "head_dim": case.head_dim, "seqlen_q": case.seqlen, "seqlen_k": case.seqlen,
        "softmax_scale": case.head_dim**-0.5, "window_left": -1, "window_right": -1,
    }  # fmt: skip

    forward = {name: operand(tensors[name]) for name in ("q", "k", "v", "out")}
    gradients = {name: operand(tensors[name]) for name in ("dout", "dq", "dk", "dv")}
    more = {"shape": shape, "lse": tensors["lse"].data_ptr()}
    if case.alibi:
        more["options"] = {"alibi_slopes": crate.SLOPES.data_ptr()}
    structs = {"forward": more | forward}
    return structs if case.launches == 1 else {**structs, "backward": more | forward | gradients}


def runner(loaded: list[crate.Loaded], memory: Any, kernels: list[str]) -> Callable[[packets.Packet], None]:
    """Executes packets, and writes down the kernels that they launch."""

    def run(packet: packets.Packet) -> None:
        (kernel,) = (kernel for kernel in loaded if crate.is_of(packet, kernel.code))
        kernels.append(kernel.name)
        machine.launch(
            kernel.program,
            packet.blocks,
            packet.block[0],
            packet.content(512 if kernel.name.startswith("asm-") else 0),
            memory,
            shared=packet.shared,
            complete=True,
        )

    return run


def operand(tensor: torch.Tensor) -> dict[str, int]:
    batch, row, head, _ = tensor.stride()
    return {"data": tensor.data_ptr(), "batch_stride": batch, "row_stride": row, "head_stride": head}


def compare_options(library: Library, opened: Any, loaded: list[crate.Loaded]) -> list[str]:
    """What a node FLASH_ATTN_EXT of ggml has: a mask as a bias, sinks, softcap; and a dense cache with lengths.

    Returns the names of the kernels that ran. Raises AssertionError for a wrong result.
    """
    torch.manual_seed(0)
    batch, rows, heads, heads_k, dim = 2, 33, 2, 1, 32
    q, out = (torch.randn(batch, rows, heads, dim, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, rows, heads_k, dim, dtype=torch.bfloat16) for _ in range(2))
    bias, sinks = torch.randn(batch, 1, rows, rows, dtype=torch.bfloat16), torch.randn(heads)
    bias[:, :, torch.ones(rows, rows, dtype=torch.bool).triu(1)] = float("-inf")
    lengths, lse = torch.tensor([33, 20], dtype=torch.int32), torch.empty(batch * heads * rows)
    shape = {
        "dtype": 1, "batch": batch, "heads": heads, "heads_k": heads_k, "head_dim": dim, "seqlen_q": rows,
        "seqlen_k": rows, "softmax_scale": 0.3, "window_left": -1, "window_right": -1,
    }  # fmt: skip
    tensors = {"q": operand(q), "k": operand(k), "v": operand(v), "out": operand(out), "lse": lse.data_ptr()}
    masked = {
        "softcap": 2.0, "sinks": sinks.data_ptr(), "sinks_stored": 3, "bias": bias.data_ptr(),
        "bias_batch_stride": rows * rows, "bias_row_stride": rows,
    }  # fmt: skip
    memory = gpu.ranges([q, k, v, out, bias, sinks, lengths, lse])
    scores = (q.float().transpose(1, 2) @ k.float().transpose(1, 2).transpose(2, 3)) * 0.3
    hidden = torch.arange(rows) >= lengths[:, None, None, None]
    kernels: list[str] = []
    for more, weights in (
        (
            {"options": masked},
            torch.cat((2 * torch.tanh(scores / 2) + bias.float(), sinks[:, None, None].expand(2, 2, rows, 1)), -1)
            .softmax(-1)[..., :-1],
        ),
        ({"seqlens_k": lengths.data_ptr()}, scores.masked_fill(hidden, float("-inf")).softmax(-1)),
    ):  # fmt: skip
        out.fill_(float("nan"))
        call = library.call("forward", {"shape": shape, **tensors, **more})
        with packets.runtime().serving(runner(loaded, memory, kernels), 1):
            library.launch(opened, "forward", call)
        exact = (weights @ v.float().transpose(1, 2)).transpose(1, 2)
        error = float((out.float() - exact).abs().max() / exact.abs().max())
        print(f"{next(iter(more))} {error:.1e}", end=" ")
        if not error < 2e-2:
            raise AssertionError(f"{more}: out is off by {error}")
    return kernels


def compare(library: Library, opened: Any, loaded: list[crate.Loaded], case: crate.Case, launches: int) -> list[str]:
    """A forward and a backward. Returns the names of the kernels that ran. Raises AssertionError for a wrong result."""
    torch.manual_seed(0)
    heads = {
        **dict.fromkeys(("q", "out", "dout", "dq"), case.heads),
        **dict.fromkeys(("k", "v", "dk", "dv"), case.heads_k),
    }
    rows, dtype = (case.batch, case.seqlen), crate.DTYPES[case.dtype]
    tensors = {name: torch.randn(*rows, count, case.head_dim).to(dtype) for name, count in heads.items()}
    tensors["lse"] = torch.full((case.batch * case.heads * case.seqlen,), float("nan"))
    for name in ("out", "dq", "dk", "dv"):
        tensors[name].fill_(float("nan"))
    calls = {kind: library.call(kind, struct) for kind, struct in fields(case, tensors).items()}
    size = max(library.scratch_bytes(opened, kind, call) for kind, call in calls.items())
    scratch = torch.zeros(size + 256, dtype=torch.uint8)
    address = -(-scratch.data_ptr() // 256) * 256
    memory = gpu.ranges([*tensors.values(), scratch, crate.SLOPES])
    kernels: list[str] = []

    with packets.runtime().serving(runner(loaded, memory, kernels), launches):
        for kind, call in calls.items():
            library.launch(opened, kind, call, address if size else 0, size)
    compared = ("out", "dq", "dk", "dv") if len(calls) > 1 else ("out",)
    for name, exact in zip(compared, crate.wanted(tensors, case), strict=False):
        error = float((tensors[name].float() - exact).abs().max() / exact.abs().max())
        print(f"{name} {error:.1e}", end=" ")
        if not error < 2e-2:
            raise AssertionError(f"{case}: {name} is off by {error}")
    return kernels


def main(path: str, target: str, kind: str = "") -> None:
    os.environ["CANDLE_FLASH_ROCM_HIP"] = os.environ["AMDGPU_HIP"]
    library, cases = Library(Path(path)), crate.AMD_CASES if kind else CASES
    with tempfile.TemporaryDirectory() as directory:
        if kind:
            loaded = crate.amd_stored(target, Path(directory), cases)
        else:
            loaded = crate.stored(target, Path(directory), cases, [Variant("fwd", "bf16", 32, "bias")])
        opened = library.open(Path(directory))
        for case in cases:
            launches = case.launches + (case.launches > 1 and crate.has_norms(target, case.dtype))
            print(target, *case, *compare(library, opened, loaded, case, launches), flush=True)
        if not kind:
            print(target, *compare_options(library, opened, loaded), flush=True)
    print(f"{len(cases)} calls on {target}", flush=True)
    os._exit(0)  # the threads of the simulated GPU do not end


if __name__ == "__main__":
    main(*sys.argv[1:])
