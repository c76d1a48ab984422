"""Calls of the C library through AMD's HIP runtime, whose GPU is a simulator, compared with attention in fp32.

    python -m amdgpu_simulator.hip.process 6.4 gfx942 libflash_attn_rocm/tests/simulated.py LIBRARY gfx942

LIBRARY is build/libflash_attn_rocm.so. The library reads the store, plans, loads and launches. This process executes
what arrives in the queues of the simulated GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "candle-flash-rocm/tests")]

import simulated_calls as crate  # noqa: E402 - after the path
import torch  # noqa: E402
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

    def operand(name: str) -> dict[str, int]:
        tensor = tensors[name]
        batch, row, head, _ = tensor.stride()
        return {"data": tensor.data_ptr(), "batch_stride": batch, "row_stride": row, "head_stride": head}

    forward = {name: operand(name) for name in ("q", "k", "v", "out")}
    gradients = {name: operand(name) for name in ("dout", "dq", "dk", "dv")}
    lse = {"lse": tensors["lse"].data_ptr()}
    return {
        "forward": {"shape": shape, **lse, **forward},
        "backward": {"shape": shape, **lse, **forward, **gradients},
    }


def compare(library: Library, opened: Any, loaded: list[crate.Loaded], case: crate.Case) -> list[str]:
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
    memory = gpu.ranges([*tensors.values(), scratch])
    kernels: list[str] = []

    def run(packet: packets.Packet) -> None:
        (kernel,) = (kernel for kernel in loaded if crate.is_of(packet, kernel.code))
        kernels.append(kernel.name)
        machine.launch(
            kernel.program,
            packet.blocks,
            packet.block[0],
            packet.content(),
            memory,
            shared=packet.shared,
            complete=True,
        )

    with packets.runtime().serving(run, case.launches):
        for kind, call in calls.items():
            library.launch(opened, kind, call, address if size else 0, size)
    for name, exact in zip(("out", "dq", "dk", "dv"), crate.wanted(tensors, case), strict=True):
        error = float((tensors[name].float() - exact).abs().max() / exact.abs().max())
        print(f"{name} {error:.1e}", end=" ")
        if not error < 2e-2:
            raise AssertionError(f"{case}: {name} is off by {error}")
    return kernels


def main(path: str, target: str) -> None:
    os.environ["CANDLE_FLASH_ROCM_HIP"] = os.environ["AMDGPU_HIP"]
    library = Library(Path(path))
    with tempfile.TemporaryDirectory() as directory:
        loaded = crate.stored(target, Path(directory))
        opened = library.open(Path(directory))
        for case in CASES:
            print(target, *case, *compare(library, opened, loaded, case), flush=True)
    print(f"{len(CASES)} calls on {target}", flush=True)
    os._exit(0)  # the threads of the simulated GPU do not end


if __name__ == "__main__":
    main(*sys.argv[1:])
