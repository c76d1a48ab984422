"""Which kernels of Composable Kernel are compiled: the smallest set that serves every call at full speed.

Data that two compilers read: the device side makes an entry point of each instance, the planner a row of its table.
The axes and why they are there:

dim      Head dims of upstream's tiles. All but the forward want the exact one, callers pad to the next.
group    Sequences of different lengths (varlen); their starts are read on the device.
mask     A masked kernel also serves a call without a mask. Only the plain forward has one without: it is faster.
alibi, softcap, dropout, deterministic   Compiled in, since each costs registers.
paged    Keys and values through a block table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from rocm_wheels.compile.compiler import matches

DTYPES = ("fp16", "bf16")
DIMS = (32, 64, 128, 256)
FORWARD_DIMS = (32, 64, 96, 128, 192, 256)

# Combinations of options in the forward. ck_tile's pipelines do not have softcap with ALiBi or with dropout.
_FORWARD = ("", "mask", "mask-alibi", "mask-dropout", "mask-alibi-dropout", "mask-softcap")

# log2 of the number of KV splits that a combine kernel sums up: few splits, or the maximum.
LOG_MAX_SPLITS = (4, 7)

# Instances per translation unit, for head dims below 192 and from 192 on. Instances of one head dim share headers and
# templates (12 of the forward take a quarter less time than twice 6) but need more memory: a unit stays below 2 minutes
# and 1.5 GB.
_UNIT = {"fwd": (12, 6), "dqdkdv": (8, 8), "splitkv": (10, 5)}
# Small kernels of all head dims share a unit.
_UNIT_OF_ALL_DIMS = {"dot": 16, "convert": 16, "combine": 16, "appendkv": 24}


@dataclass(frozen=True, order=True)
class Instance:
    """One kernel: its operation, dtype, head dim and the options that are compiled in."""

    op: str
    dtype: str
    dim: int
    options: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the kernel in the store: "fwd-bf16-d128-group-mask"."""
        return "-".join((self.op, self.dtype, f"d{self.dim}", *self.options))

    @property
    def symbol(self) -> str:
        """Name of the entry point in the code object."""
        return "ck_" + self.name.replace("-", "_")

    @property
    def type(self) -> str:
        """The kernel type in kernels.hpp."""
        return f"{_TEMPLATES[self.op]}<{', '.join(self.arguments)}>"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The template arguments of the type."""

        def has(*options: str) -> tuple[str, ...]:
            return tuple("true" if option in self.options else "false" for option in options)

        bias = "Bias::alibi" if "alibi" in self.options else "Bias::none"
        rotary = next((f"Rotary::{kind}" for kind in ("interleaved", "half") if kind in self.options), "Rotary::none")
        splits = next((option.removeprefix("splits") for option in self.options if option.startswith("splits")), "")
        specific = {
            "fwd": (*has("group", "mask"), bias, *has("softcap", "dropout")),
            "dqdkdv": (*has("group"), bias, *has("dropout", "deterministic")),
            "dot": has("group"),
            "convert": has("group", "deterministic"),
            "splitkv": (*has("group", "paged"), bias, *has("softcap")),
            "combine": (*has("group"), splits),
            "appendkv": (*has("paged"), rotary),
        }
        return (self.dtype, str(self.dim), *specific[self.op])


_TEMPLATES = {
    "fwd": "Forward",
    "dqdkdv": "Backward",
    "dot": "BackwardDot",
    "convert": "BackwardConvert",
    "splitkv": "Split",
    "combine": "Combine",
    "appendkv": "Append",
}


def _options() -> Iterator[tuple[str, int, str]]:
    """(operation, head dim, options) of every instance of one dtype."""
    for dim, mode, features in itertools.product(FORWARD_DIMS, ("batch", "group"), _FORWARD):
        yield "fwd", dim, f"{mode}-{features}"
    for dim, mode in itertools.product(DIMS, ("batch", "group")):
        for alibi, dropout, deterministic in itertools.product(
            ("", "-alibi"), ("", "-dropout"), ("", "-deterministic")
        ):
            yield "dqdkdv", dim, mode + alibi + dropout + deterministic
        yield "dot", dim, mode
        for deterministic in ("", "-deterministic"):
            yield "convert", dim, mode + deterministic
        for splits in LOG_MAX_SPLITS:
            yield "combine", dim, f"{mode}-splits{splits}"
    for dim, mode, feature in itertools.product(
        DIMS, ("batch", "batch-paged", "group-paged"), ("", "alibi", "softcap")
    ):
        yield "splitkv", dim, f"{mode}-{feature}"
    for dim, paged, rotary in itertools.product(DIMS, ("", "paged"), ("", "interleaved", "half")):
        yield "appendkv", dim, f"{paged}-{rotary}"


def table() -> tuple[Instance, ...]:
    """Every instance in a fixed order: the instances of one operation, dtype and head dim are adjacent."""
    instances = [
        Instance(op, dtype, dim, tuple(filter(None, options.split("-"))))
        for dtype in DTYPES
        for op, dim, options in _options()
    ]
    order = list(_TEMPLATES)
    return tuple(sorted(instances, key=lambda instance: (order.index(instance.op), instance.dtype, instance.dim)))


def units(only: str | None = None) -> tuple[tuple[str, tuple[Instance, ...]], ...]:
    """(name, instances) of the translation units. `only`: see `matches`."""
    pairs = []
    for (op, dtype), group in itertools.groupby(table(), key=lambda instance: (instance.op, instance.dtype)):
        common = _UNIT_OF_ALL_DIMS.get(op)
        for dim, members in itertools.groupby(group, key=lambda instance: 0 if common else instance.dim):
            size = common or _UNIT[op][dim >= 192]
            every = list(members)
            for part, start in enumerate(range(0, len(every), size), 1):
                instances = [member for member in every[start : start + size] if matches(member.name, only)]
                if instances:
                    name = "-".join(filter(None, ("ck", op, dtype, f"d{dim}" if dim else "", str(part))))
                    pairs.append((name, tuple(instances)))
    return tuple(pairs)
