"""An operation: what the compile stage and the run time need to know about a kernel. Standard library only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flash_attn.kernels.modifiers import MODIFIERS
from flash_attn.kernels.targets import Target

DTYPES = ("fp16", "bf16", "fp32")
HALVES = ("fp16", "bf16")
HEAD_DIMS = (32, 64, 96, 128, 192, 256, 512)

# What a kernel does to the scores: nothing, one thing, or everything that the call asks for, which `any` finds out
# when it runs. Such a test in the main loop keeps loads from running under the arithmetic. So each single thing has a
# kernel of its own in the types that training uses. `bias` adds a bias to the scores, with softcap and sinks where the
# call has them; `any` has no bias.
_SINGLE = tuple(row.kind for row in MODIFIERS)
KINDS = ("plain", *_SINGLE, "bias", "any")
# Kernels of large head dims exist for plain calls, and for every other call in one kernel.
SIZES_OF_KINDS = dict.fromkeys(("sink", *_SINGLE), HEAD_DIMS[:-1])

# A forward may have sinks besides. The backward needs none: softmax_lse holds them.
FORWARD_KINDS = ("plain", "sink", *_SINGLE, "bias", "any")

# Rows whose strides are multiples of 16 bytes, or any rows. `uneven` kernels compute one address for each element.
# Larger blocks have too few registers for that, and uneven norms are rare.
LAYER_KINDS = ("plain", "uneven")

# The sides of a block mask's blocks are multiples of it.
SPARSE_BLOCK = 64

# The families whose INT8 attention has tiles. Kernels of NVIDIA GPUs are for tests.
INT8_FAMILIES = ("rdna3", "rdna4", "nvidia")

LAUNCH_LETTERS = {"i32": "i", "fp32": "f"}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation: a kernel, its arguments, and the variants that exist of it ahead of time.

    name: the first part of a variant's name.
    module, function: the kernel, below flash_attn.kernels.
    types: type -> the arguments of that type, separated by spaces. "T" stands for the variant's element type.
    Every other argument is an int32.
    aligned: the pointers whose rows the kernel reads in pieces of 16 bytes. The caller guarantees their alignment.
    fp32_arguments: arguments that are fp32 whatever the variant's element type.
    constants: the constants that the kernel takes and `launches` computes.
    fixed: the constants that have the same value in every variant.
    dtypes: the element types; "fp8" stands for the target's FP8 format.
    needs_fp8: whether the operation exists only on targets with an FP8 format.
    needs_range: whether the operation exists only where products lose the range of a type (`Target.loses_range`).
    range_arguments: the arguments that kernels have only there.
    sizes: ascending. Attention: the largest head dim of a variant. Layers: the elements of a row.
    sizes_of_kind: kind -> its sizes, where it has fewer.
    kinds, fp32_kinds: what the variants do to the scores (`KINDS`), with fp32 elements and without. The last kind
    serves every call.
    value_dims: size -> the head dim of v, where it is not the one of q and k.
    kinds_of_argument: argument -> the kinds whose kernels have it. For other kinds it is None when the kernel is
    compiled, and the kernel lacks it. Arguments that are not mentioned here are in all kernels.
    in_pieces: whether the kernel takes head dims piece by piece, so that its one size serves all of them.
    has_separate_outputs: whether no output shares memory with an input, which `call.memory` makes sure of. Waves
    of such a kernel exchange nothing through global memory, so its barriers may order LDS alone.
    tuning: where the tile comes from: the table of the target's family, a fixed tile, or the rules for layers. A search
    on a GPU tries other tiles only for a table.
    tile_of: the operation whose tile serves a size without a row in the table, and so on from that operation.
    """

    name: str
    module: str
    function: str
    types: Mapping[str, str]
    aligned: tuple[str, ...]
    fp32_arguments: tuple[str, ...] = ()
    constants: tuple[str, ...]
    fixed: Mapping[str, int] = field(default_factory=dict)
    dtypes: tuple[str, ...] = DTYPES
    needs_fp8: bool = False
    needs_range: bool = False
    range_arguments: tuple[str, ...] = ()
    sizes: tuple[int, ...] = HEAD_DIMS
    sizes_of_kind: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    value_dims: Mapping[int, int] = field(default_factory=dict)
    kinds: tuple[str, ...]
    fp32_kinds: tuple[str, ...] | None = None
    kinds_of_argument: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    in_pieces: bool = False
    has_separate_outputs: bool = False
    tuning: Literal["table", "fixed", "layers"]
    tile_of: str | None = None

    @property
    def has_mask(self) -> bool:
        """Whether its kernels visit the tiles that a mask shows."""
        return bool(self.fixed.get("HAS_MASK"))

    @property
    def searched(self) -> bool:
        """Whether a search on a GPU tries other tiles."""
        return self.tuning == "table"

    def kinds_of(self, dtype: str) -> tuple[str, ...]:
        """The kinds that exist ahead of time for an element type."""
        return self.fp32_kinds if dtype == "fp32" and self.fp32_kinds else self.kinds

    def serving(self, dtype: str, kind: str, size: int) -> str:
        """The kind of kernel that serves a call of a kind and a size: the kind itself, or the last, which serves every
        call."""
        kinds = self.kinds_of(dtype)
        return kind if kind in kinds and size in self.sizes_for(kind) else kinds[-1]

    def absent(self, kind: str, dtype: str, target: Target) -> tuple[str, ...]:
        """The arguments that kernels of a kind and an element type lack on a target."""
        of_kind = tuple(name for name, kinds in self.kinds_of_argument.items() if kind not in kinds)
        return of_kind if target.loses_range(dtype) else (*of_kind, *self.range_arguments)

    def sizes_for(self, kind: str) -> tuple[int, ...]:
        """The sizes that exist ahead of time for a kind, ascending."""
        return self.sizes_of_kind.get(kind, self.sizes)

    def bucket(self, head_dim: int) -> int:
        """The smallest size that holds head_dim. Raises ValueError where none does."""
        if self.in_pieces:
            return self.sizes[0]
        for size in self.sizes:
            if head_dim <= size:
                return size
        raise ValueError(f"head_dim {head_dim} is larger than {self.sizes[-1]}, the largest supported")

    def dtypes_for(self, target: Target) -> tuple[str, ...]:
        """The element types that exist ahead of time for a target."""
        if self.needs_fp8 and target.fp8 is None:
            return ()
        if self.needs_range:
            return tuple(dtype for dtype in self.dtypes if target.loses_range(dtype))
        return tuple(
            target.fp8 or "" if dtype == "fp8" else dtype for dtype in self.dtypes if dtype != "fp8" or target.fp8
        )

    def argument_type(self, name: str, dtype: str) -> str:
        """Triton's type of an argument: "*bf16", "i32", "fp32"."""
        for type_, names in self.types.items():
            if name in names.split():
                return type_.replace("T", "fp32" if name in self.fp32_arguments else dtype)
        return "i32"

    def digest(self, dtype: str) -> str:
        """sha256 over the row, and over the types and launch letters of its arguments for an element type."""
        names = [name for names in self.types.values() for name in names.split()]
        types = {name: self.argument_type(name, dtype) for name in names}
        letters = {type_: launch_letter(type_) for type_ in (*types.values(), "i32")}
        row = json.dumps([dataclasses.asdict(self), types, letters], sort_keys=True)
        return hashlib.sha256(row.encode()).hexdigest()


class Int8Operation(Operation):
    """An operation of attention with INT8 queries and keys. dtypes: of values and result."""

    def dtypes_for(self, target: Target) -> tuple[str, ...]:
        return self.dtypes if target.family in INT8_FAMILIES else ()


def launch_letter(type_: str) -> str:
    """The launcher's letter for an argument type: P pointer, i int32, f float32."""
    return "P" if type_.startswith("*") else LAUNCH_LETTERS[type_]
