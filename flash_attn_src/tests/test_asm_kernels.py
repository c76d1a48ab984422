"""AMD's assembly kernels on the simulator, by the plans of flash_attn: results against attention in fp32.

A sample runs always; --all-kernels runs every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import reference
import tools
import torch
from assert_close import assert_close
from flash_attn.attention.backends.asm import planning
from flash_attn.attention.backends.asm.planning import Call, Operand
from flash_attn.core.ck_planner import Launch
from flash_attn.kernels import assembly
from flash_attn.kernels.assembly import Kernel

from amdgpu_simulator import assembly_kernels
from amdgpu_simulator.debian import UnavailableError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WINDOWS = {assembly.PLAIN: (-1, -1), assembly.CAUSAL: (-1, 0), assembly.WINDOW: (60, 20)}
# What is run always: target, kernel.
SAMPLE = {
    ("gfx942", "asm-bwd-fp16-d64-plain"),
    ("gfx950", "asm-fwd-bf16-d128-causal-varlen"),
    ("gfx950", "asm-bwd-bf16-d128-window"),
}
# test_asm_backend.py sends calls to those of the first two kinds.
LONG = {
    ("gfx942", "asm-fwd-bf16-d128-causal"),
    ("gfx942", "asm-bwd-bf16-d128-causal-varlen"),
    ("gfx950", "asm-fwd-bf16-d192-v128-causal"),
}
# Elements after the end of lse and delta that a window kernel may read.
_SPARE = 32


class Sequences(NamedTuple):
    """Tensors of a call in fp16 or bf16: q (b, sq, h, d) or packed (total_q, h, d), k and v likewise."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths_q: list[int]
    lengths_k: list[int]
    starts: tuple[torch.Tensor, torch.Tensor] | None

    def queries(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """The rows of a sequence, of a tensor like q."""
        return _rows(x, number, None if self.starts is None else self.starts[0])

    def keys(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return _rows(x, number, None if self.starts is None else self.starts[1])

    def of_lse(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """(h, sq) of a sequence, of a tensor like lse."""
        if self.starts is None:
            return x[number]
        return x[:, int(self.starts[0][number]) : int(self.starts[0][number + 1])]

    def statistics(self) -> torch.Tensor:
        """A tensor like lse: (b, h, sq), packed (h, total_q)."""
        *outer, heads, _ = self.q.shape
        shape = (heads, *outer) if self.starts is not None else (outer[0], heads, outer[1])
        size = int(torch.tensor(shape).prod())
        return torch.zeros(size + _SPARE)[:size].view(shape)

    def call(self, row: Kernel) -> Call:
        left, right = WINDOWS[row.mask]
        packed = {}
        if self.starts is not None:
            packed = {
                "packed": True, "starts_q": self.starts[0].data_ptr(), "starts_k": self.starts[1].data_ptr(),
                "total_q": self.q.shape[0], "total_k": self.k.shape[0],
            }  # fmt: skip
        return Call(
            target=row.target, units=80 if row.name.endswith("-mi308") else 304, dtype=row.dtype,
            batch=len(self.lengths_q), heads=self.q.shape[-2], heads_k=self.k.shape[-2], head_dim=self.q.shape[-1],
            seqlen_q=max(self.lengths_q), seqlen_k=max(self.lengths_k), left=left, right=right,
            scale=self.q.shape[-1] ** -0.5, value_dim=row.value_dim, **packed,
        )  # fmt: skip


def _rows(x: torch.Tensor, number: int, starts: torch.Tensor | None) -> torch.Tensor:
    return x[number] if starts is None else x[int(starts[number]) : int(starts[number + 1])]


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def make(row: Kernel, lengths_q: Sequence[int], lengths_k: Sequence[int], heads_k: int, head_dim: int) -> Sequences:
    """Two query heads for each of heads_k, in tensors whose heads lie apart."""
    torch.manual_seed(0)

    def tensor(lengths: Sequence[int], heads: int, dim: int) -> torch.Tensor:
        rows = (sum(lengths),) if row.packed else (len(lengths), lengths[0])
        return torch.randn(*rows, heads, dim + 8).to(DTYPES[row.dtype])[..., :dim]

    starts = tuple(
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    return Sequences(
        tensor(lengths_q, 2 * heads_k, head_dim), tensor(lengths_k, heads_k, head_dim),
        tensor(lengths_k, heads_k, row.value_dim or head_dim),
        list(lengths_q), list(lengths_k), starts if row.packed else None,
    )  # fmt: skip


def operand(x: torch.Tensor) -> Operand:
    return Operand(x.data_ptr(), *(x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])))


def run(row: Kernel, launch: Launch, *tensors: torch.Tensor | None) -> None:
    assert launch.kernel == row.name
    ranges = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors if x is not None]
    try:
        assembly_kernels.run(row.target, launch.kernel, launch.grid, launch.argument, ranges)
    except UnavailableError as problem:
        tools.missing(str(problem))


def check_forward(row: Kernel, given: Sequences) -> None:
    call = given.call(row)
    out, lse = given.q.new_full((*given.q.shape[:-1], given.v.shape[-1]), 7), given.statistics()
    operands = [operand(x) for x in (given.q, given.k, given.v, out)]
    assert planning.unsupported_reason(call, "fwd", dict(zip("qkv", operands, strict=False))) is None
    launch = planning.forward(call, *operands, lse.data_ptr(), lse.stride(-2))
    run(row, launch, given.q, given.k, given.v, out, lse, *(given.starts or ()))
    for number, length in enumerate(given.lengths_q):
        if length == 0:
            continue
        q, k, v = given.queries(given.q, number), given.keys(given.k, number), given.keys(given.v, number)
        options = {"window": WINDOWS[row.mask]}
        (exact, exact_lse), (rough, _) = (
            reference.attention(q[None], k[None], v[None], dtype=dtype, **options) for dtype in (torch.float32, None)
        )
        rows_with_keys = exact_lse[0].isfinite()
        result = given.of_lse(lse, number)
        assert_close("lse", result[rows_with_keys], exact_lse[0][rows_with_keys])
        assert bool((result[~rows_with_keys] == -torch.inf).all())
        assert_close("out", given.queries(out, number)[None], exact, rough=rough)


def check_backward(row: Kernel, given: Sequences) -> None:
    call = given.call(row)
    dout = torch.randn_like(given.q)
    heads = given.q.shape[-2]
    dk, dv = (torch.zeros(*given.k.shape[:-2], heads, given.k.shape[-1], dtype=given.k.dtype) for _ in range(2))
    lse, delta = given.statistics(), given.statistics()
    sums = torch.zeros(*lse.shape, given.q.shape[-1])
    expected, rough = [], []
    for number in range(len(given.lengths_q)):
        parts = [given.queries(given.q, number), given.keys(given.k, number), given.keys(given.v, number)]
        gradient = given.queries(dout, number)[None]
        results = []
        for dtype in (torch.float32, None):
            leaves = [x[None].detach().clone().requires_grad_() for x in parts]
            out, of_row = reference.attention(*leaves, dtype=dtype, window=WINDOWS[row.mask])
            results.append(torch.autograd.grad(out, leaves, gradient.to(out.dtype)))
            if dtype is not None:
                given.of_lse(lse, number).copy_(of_row[0].detach())
                given.of_lse(delta, number).copy_((out.detach() * gradient).sum(-1)[0].T)
        expected.append(results[0])
        rough.append(results[1])
    operands = {"q": given.q, "k": given.k, "v": given.v, "dout": dout, "dk": dk, "dv": dv}
    described = {name: operand(x) for name, x in operands.items()}
    assert planning.unsupported_reason(call, "bwd", described) is None
    launch = planning.backward(call, described, lse.data_ptr(), delta.data_ptr(), sums.data_ptr(), lse.stride(-2))
    run(row, launch, *operands.values(), lse, delta, sums, *(given.starts or ()))
    shape = given.k.shape[-2], 2
    for number, (exact, near) in enumerate(zip(expected, rough, strict=True)):
        result = (
            given.of_lse(sums, number).transpose(0, 1).to(given.q.dtype),
            *(given.keys(x, number).unflatten(1, shape).float().sum(2).to(x.dtype) for x in (dk, dv)),
        )
        for name, got, one, other in zip(("dq", "dk", "dv"), result, exact, near, strict=True):
            assert_close(f"{name} of {number}", got[None], one, rough=other)


def lengths(row: Kernel) -> tuple[list[int], list[int]]:
    """Lengths of several tiles that are no multiple of a tile; packed, also short and empty sequences."""
    if row.op == "fwd":
        keys = row.columns + 16  # more than a tile of any forward's
        return ([270, 0, 7], [keys, 33, 40]) if row.packed else ([270], [keys])
    return ([70, 0, 5], [row.columns + 40, 33, 90]) if row.packed else ([70], [row.columns + 40])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-kernels")
        asked = ((row, (row.target, row.name)) for row in assembly.KERNELS)
        result = [
            pytest.param(row, id=f"{row.target}-{row.name}", marks=pytest.mark.long if name in LONG else ())
            for row, name in asked
            if everything or name in SAMPLE | LONG
        ]
        metafunc.parametrize("row", result)


def test_a_kernel(row: Kernel) -> None:
    check = check_forward if row.op == "fwd" else check_backward
    check(row, make(row, *lengths(row), 1, row.head_dim))
    if row.least_dim < row.head_dim:
        check(row, make(row, *lengths(row), 2, row.least_dim))


def test_launched_kernels_exist_in_the_store() -> None:
    assert {(row.target, row.name) for row in assembly.KERNELS} >= SAMPLE | LONG
