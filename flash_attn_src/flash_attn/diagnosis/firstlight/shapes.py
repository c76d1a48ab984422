"""Published speeds of attention kernels, and their shapes, bf16 forward. This module needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from flash_attn.diagnosis.selftest.cases import Shape


class Published(NamedTuple):
    """figures: target -> (TFLOP/s, whose kernel and where it is published)."""

    shape: Shape
    figures: dict[str, tuple[float, str]]


PUBLISHED = (
    Published(
        Shape(batch=1, heads=24, heads_k=24, seqlen=4096, head_dim=128),
        {"gfx1201": (99.8, "FlyDSL, aiter#4188; SDPA had 51.0")},
    ),
    Published(
        Shape(batch=1, heads=16, heads_k=16, seqlen=8192, head_dim=128),
        {"gfx1100": (66.5, "SDPA, comfy-kitchen#104")},
    ),
    Published(
        Shape(batch=8, heads=32, heads_k=8, seqlen=8192, head_dim=128),
        {"gfx942": (585.0, "AITER assembly, op_tests/cpp/mha/README.md")},
    ),
    Published(
        Shape(batch=16, heads=16, heads_k=16, seqlen=16384, head_dim=128),
        {"gfx950": (1283.0, "AITER assembly, HipKittens")},
    ),
)


def shapes(target: str) -> tuple[Shape, ...]:
    """The shapes to time besides the selftest's: two that fit every GPU, and those published for the target."""
    general = [row.shape for row in PUBLISHED[:2]]
    own = [row.shape for row in PUBLISHED if target in row.figures]
    return tuple(dict.fromkeys((*general, *own)))


def published(name: str, target: str) -> tuple[Shape, tuple[float, str] | None]:
    """A shape by its name, and what is published of it for a target."""
    row = next(row for row in PUBLISHED if row.shape.name == name)
    return row.shape, row.figures.get(target)
