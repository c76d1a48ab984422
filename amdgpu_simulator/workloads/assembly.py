"""AMD's assembly kernels, from the package that wheels take them from."""

from __future__ import annotations

from dataclasses import replace

import torch
from flash_attn.attention.backends.asm import planning
from flash_attn.attention.backends.asm.planning import Call, Launch, Operand
from flash_attn.kernels.assembly import CAUSAL, KERNELS, PLAIN, Kernel

from amdgpu_simulator import assembly_kernels, gpu
from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.isa import disassembly, machine
from amdgpu_simulator.workloads import Programs, Workload, every_tile
from rocm_wheels.compile import codeobject
from rocm_wheels.compile.asm import package

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_UNITS = {"gfx942": 304, "gfx950": 256}


def workload(target: str, name: str, *, image: bytes | None = None) -> Workload:
    """A kernel by its name, asm-fwd-bf16-d128-plain, for sequences of one length.

    image: another code object of the same arguments. Raises ValueError for an unknown name, MissingTool if the package
    cannot be fetched, `debian.UnavailableError` if there is no disassembler.
    """
    known = [row for row in KERNELS if row.target == target and not row.packed and row.mask in (PLAIN, CAUSAL)]
    kernel = next((row for row in known if row.name == name), None)
    if kernel is None:
        raise ValueError(f"{name}: for {target} there are {', '.join(row.name for row in known) or 'no such kernels'}")
    image = image or assembly_kernels.image(target, name)
    code = disassembly.kernel(image, target=target)
    metadata = codeobject.read(image)
    entry = {"threads": kernel.threads, "shared": 0, "resources": metadata.resources()}
    rows = kernel.rows if kernel.op == "fwd" else kernel.columns
    in_step = assembly_kernels.relies_on_step(target, name)
    paired = kernel.mask == CAUSAL  # a work group processes a tile near the start and a tile near the end

    def run(length: int) -> Record:
        record = Record(code)
        planned, tensors = _plan(kernel, rows, length)
        program, known = machine.Program(code, record), gpu.ranges(tensors)
        machine.launch(program, (1, 1, 1), kernel.threads, planned.argument, known, in_step=in_step)
        return record

    return Workload(
        target=target,
        rows=rows,
        entry=entry,
        run=run,
        programs=_pairs(rows) if paired else every_tile(rows),
        operations=_operations(kernel),
        lengths=(2 * rows, 4 * rows) if paired else (256, 768),
    )


def _operations(kernel: Kernel) -> int:
    """Floating-point operations of a query and a key."""
    if kernel.op == "bwd":
        return 10 * kernel.head_dim
    return 2 * (kernel.head_dim + (kernel.value_dim or kernel.head_dim))


def _pairs(rows: int) -> Programs:
    def lengths(seqlen: int, causal: bool) -> list[int]:
        if not causal:
            raise ValueError("a causal kernel cannot run a call without a mask")
        return [seqlen] * -(-seqlen // (2 * rows))

    return lengths


def another(target: str, kernel: str, file: str, sha256: str) -> bytes:
    """A code object of AMD's package that wheels do not contain.

    Raises MissingTool, and DataError for a wrong digest.
    """
    code = package.CodeObject(target=target, kernel=kernel, file=file, sha256=sha256, places={})
    return (package.directory(gpu.CACHE, replace(package.load(), objects=(code,))) / code.place).read_bytes()


def _plan(kernel: Kernel, rows: int, length: int) -> tuple[Launch, list[torch.Tensor]]:
    """A launch whose first work group processes `rows` queries and `length` keys.

    A causal launch has `length` queries and keys.
    """
    causal = kernel.mask == CAUSAL
    seqlen_q, seqlen_k = (
        (length if causal else rows, length) if kernel.op == "fwd" else (length, length if causal else rows)
    )
    dtype, head_dim = _DTYPES[kernel.dtype], kernel.head_dim
    value_dim = kernel.value_dim or head_dim
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (seqlen_q, head_dim), "k": (seqlen_k, head_dim), "v": (seqlen_k, value_dim)}
    shapes["out"] = (seqlen_q, value_dim)
    tensors = {
        name: torch.randn(1, seqlen, 1, dim, generator=generator).to(dtype) for name, (seqlen, dim) in shapes.items()
    }
    call = Call(
        target=kernel.target, units=_UNITS[kernel.target], dtype=kernel.dtype, batch=1, heads=1, heads_k=1,
        head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k, left=-1, right=0 if causal else -1,
        scale=head_dim**-0.5, value_dim=kernel.value_dim,
    )  # fmt: skip
    lse = torch.full((seqlen_q + 64,), 5.0)
    if kernel.op == "fwd":
        operands = {name: _operand(tensor) for name, tensor in tensors.items()}
        return planning.forward(call, **operands, lse=lse.data_ptr(), lse_head=seqlen_q), [*tensors.values(), lse]
    tensors["dout"] = tensors.pop("out")
    tensors |= {"dk": torch.empty_like(tensors["k"]), "dv": torch.empty_like(tensors["v"])}
    delta, sums = torch.zeros_like(lse), torch.zeros(seqlen_q, head_dim)
    operands = {name: _operand(tensor) for name, tensor in tensors.items()}
    planned = planning.backward(call, operands, lse.data_ptr(), delta.data_ptr(), sums.data_ptr(), seqlen_q)
    return planned, [*tensors.values(), lse, delta, sums]


def _operand(tensor: torch.Tensor) -> Operand:
    return Operand(tensor.data_ptr(), *tensor.stride()[:3])
