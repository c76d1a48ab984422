"""Simulated cycles of this project's Triton kernels and of another project's, side by side.

A figure is the number of cycles for 128 queries and 128 keys. Without a number of keys it is the loop without masks
(see `measure`). With a number of keys, and with a causal mask, it is the mean over a whole call, with the start of each
work group and with the blocks on the diagonal; only pairs that the mask keeps count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flash_attn.kernels.operations import OPERATIONS

from amdgpu_simulator import accuracy, measure
from amdgpu_simulator.peers import aotriton
from amdgpu_simulator.workloads import Workload, triton
from amdgpu_simulator.workloads import aotriton as peer
from rocm_wheels.errors import CompileFailed

OPS, DIMS, DTYPES, MASKS = ("fwd", "bwd"), (64, 128), ("bf16",), (False, True)
_PEERS = {"fwd": (aotriton.FORWARD,), "bwd": (aotriton.DQ, aotriton.DKDV)}
_OWN = {"fwd": ("fwd",), "bwd": ("bwd-dq", "bwd-dkdv")}
# Sequence length for which the tile is looked up, and over which a causal call is averaged.
_KEYS = 4096


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rows to print. pythons: interpreters with a Triton that compiles the peer; its best release counts.

    keys: keys of a call, None for the loop alone.
    """

    target: str
    checkout: aotriton.Checkout
    ops: tuple[str, ...] = OPS
    dims: tuple[int, ...] = DIMS
    dtypes: tuple[str, ...] = DTYPES
    causal: tuple[bool, ...] = MASKS
    keys: int | None = None
    pythons: tuple[str, ...] = (sys.executable,)


def table(asked: Comparison) -> Iterator[str]:
    """Yields the lines of a Markdown table when they are measured.

    Raises ValueError if the checkout lacks a file or a row.
    """
    short = asked.keys is not None and asked.keys < Workload.lengths[0]
    if short and (asked.ops != ("fwd",) or any(asked.causal)):
        raise ValueError(
            f"{asked.keys} keys: only a forward without a mask can be measured so: add --op fwd --mask full"
        )
    yield f"| {asked.target} | this project | AOTriton | by Triton | ratio | error of the clock | this project is |"
    yield "|-|-|-|-|-|-|-|"
    for op in asked.ops:
        for head_dim in asked.dims:
            for dtype in asked.dtypes:
                for causal in asked.causal:
                    yield _row(asked, op, head_dim, dtype, causal)


def _row(asked: Comparison, op: str, head_dim: int, dtype: str, causal: bool) -> str:
    length = f" {asked.keys} keys" if asked.keys else f" {_KEYS} keys" if causal else ""
    name = f"{op} {dtype} d{head_dim} {'causal' if causal else 'full'}{length}"
    own = sum(cycles(_own(asked.target, kernel, dtype, head_dim, causal), asked.keys, causal) for kernel in _OWN[op])
    timings: list[tuple[float, str]] = []
    reasons: list[str] = []
    for python in asked.pythons:
        with _noting(reasons):
            timings.append(_peer(asked, op, head_dim, dtype, causal, python))
    if not timings:
        return f"| {name} | {own:.0f} | {'; '.join(reasons)} | | | | |"
    theirs, release = min(timings)
    ratio, error = theirs / own, accuracy.error(asked.target)
    verdict = accuracy.judge(ratio, asked.target)
    return f"| {name} | {own:.0f} | {theirs:.0f} | {release} | {ratio:.2f} | {100 * error:.0f} % | {verdict} |"


@contextmanager
def _noting(reasons: list[str]) -> Iterator[None]:
    """Appends the reason to a list if a compilation fails."""
    try:
        yield
    except CompileFailed as error:
        reasons.append(str(error))


def _own(target: str, kernel: str, dtype: str, head_dim: int, causal: bool) -> Workload:
    variant = triton.parse_kernel(f"{kernel}-{dtype}-d{OPERATIONS[kernel].bucket(head_dim)}")
    (tile,) = triton.tiles(target, variant)
    return triton.workload(target, variant, tile, causal=causal, head_dim=head_dim)


def _peer(asked: Comparison, op: str, head_dim: int, dtype: str, causal: bool, python: str) -> tuple[float, str]:
    """Cycles of all kernels of a call, and the release of Triton that compiled them. Raises CompileFailed."""
    total, release = 0.0, ""
    for kernel in _PEERS[op]:
        keys = asked.keys or _KEYS
        tile = asked.checkout.tile(asked.target, kernel, dtype, head_dim, keys, causal=causal)
        made = peer.workload(asked.checkout, asked.target, kernel, dtype, head_dim, tile, causal=causal, python=python)
        total += cycles(made, asked.keys, causal)
        release = made.entry["triton"]
    return total, release


def cycles(workload: Workload, keys: int | None, causal: bool) -> float:
    """Cycles for 128 queries and 128 keys, as the top of this module defines them."""
    scale = measure.ROWS / workload.rows
    if keys is not None and keys < workload.lengths[0] and not causal:
        groups = measure.resident(workload.target, workload.entry)
        return measure.play(workload, keys, groups)[0] * scale * measure.KEYS / keys
    line = measure.line(workload)
    if causal:
        length = keys or _KEYS
        total = sum(line.at(seen)[0] for seen in workload.programs(length, True))
        return total * measure.ROWS * measure.KEYS / (length * length / 2)
    if keys is None:
        return (line.at(measure.KEYS)[0] - line.at(0)[0]) * scale
    return line.at(keys)[0] * scale * measure.KEYS / keys
