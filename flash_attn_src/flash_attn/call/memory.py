"""Whether tensors share memory, exactly; and the one check of tensors that a function writes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch.compiler import is_compiling

from flash_attn.core.protocol import spoil

# Steps of a search after which two tensors count as sharing memory. Real layouts take fewer than ten.
_STEPS = 10_000

NamedTensors = Mapping[str, torch.Tensor | None]
Terms = list[tuple[int, int]]


def check_outputs(outputs: NamedTensors, inputs: NamedTensors) -> list[str]:
    """The names of outputs that share memory with an input, which the caller computes elsewhere and then copies.

    Raises ValueError for an output whose elements share memory with each other or with another output.
    """
    written = {name: x for name, x in outputs.items() if x is not None and x.numel() and has_memory(x)}
    if is_compiling() or not written:
        return []
    for name, x in written.items():
        if not x.is_contiguous() and overlaps_itself(x):
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)} with strides {x.stride()}, wanted memory of its own for each "
                "element: it is written"
            )
    for (name, x), (other, y) in combinations(written.items(), 2):
        if shares_memory(x, y):
            raise ValueError(f"{name}, {other}: got tensors that share memory, wanted two, as both are written")
    return [name for name, x in written.items() if any(shares_memory(x, y) for y in inputs.values())]


def refuse_shared(outputs: NamedTensors, inputs: NamedTensors) -> None:
    """`check_outputs`, which also raises ValueError for an output that shares memory with an input."""
    for name in check_outputs(outputs, inputs):
        other = next(n for n, y in inputs.items() if shares_memory(outputs[name], y))
        raise ValueError(
            f"{name}: got memory of {other}, wanted a tensor of its own: {other} is read while {name} is written"
        )


def has_memory(x: torch.Tensor) -> bool:
    """Whether x has an address. It has none on the meta device, sparse, fake, of a subclass, and in torch.func."""
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided and not x.is_meta
    return plain and not torch._C._are_functorch_transforms_active()


def shares_memory(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    """Whether two tensors share a byte. True if a long search does not decide it."""
    spoil()
    if x is None or y is None or not (x.numel() and y.numel() and has_memory(x) and has_memory(y)):
        return False
    if x.device != y.device:
        return False
    low, high = x.data_ptr(), y.data_ptr()
    if low > high:
        x, y, low, high = y, x, high, low
    if high >= low + _length(x):
        return False
    # A byte of x and one of y: low + i . strides = high + j . strides. With last - j for j all terms are positive.
    terms = _terms(x) + _terms(y)
    return _reaches(terms, high - low + _length(y) - 1)


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two elements of x have one address."""
    axes = sorted((step, size - 1) for size, step in zip(x.shape, x.stride(), strict=True) if size > 1)
    reach = 0
    for step, most in axes:
        if step <= reach:
            break
        reach += step * most
    else:
        return False
    for place, (step, most) in enumerate(axes):
        # Equal in the axes before, first different here, by 1 or more; of later axes both signs.
        later = axes[place + 1 :]
        terms = [(step, most - 1)] + [(s, 2 * m) for s, m in later]
        if _reaches(terms, step * most + sum(s * m for s, m in later)):
            return True
    return False


def _length(x: torch.Tensor) -> int:
    """Bytes from the first to the last."""
    steps = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return (steps + 1) * x.element_size()


def _terms(x: torch.Tensor) -> Terms:
    """(bytes of a step, most steps) of each axis, and of the bytes in an element."""
    width = x.element_size()
    axes = [(step * width, size - 1) for size, step in zip(x.shape, x.stride(), strict=True) if size > 1 and step]
    return [*axes, (1, width - 1)]


def _reaches(terms: Terms, target: int) -> bool:
    """Whether target is a sum of steps, each taken from 0 to its most times."""
    merged: dict[int, int] = {}
    for step, most in terms:
        merged[step] = merged.get(step, 0) + most
    ordered = sorted(((step, most) for step, most in merged.items() if step), reverse=True)
    rest = [0] * (len(ordered) + 1)  # the largest sum of the terms from each index on
    for place in range(len(ordered) - 1, -1, -1):
        rest[place] = rest[place + 1] + ordered[place][0] * ordered[place][1]
    pending, steps = [(0, target)], 0
    while pending:
        place, left = pending.pop()
        steps += 1
        if left == 0 or steps > _STEPS:
            return True
        if place == len(ordered) or left > rest[place]:
            continue
        step, most = ordered[place]
        low, high = max(-(-(left - rest[place + 1]) // step), 0), min(left // step, most)
        if high - low > _STEPS:
            return True
        pending += [(place + 1, left - count * step) for count in range(low, high + 1)]
    return False
