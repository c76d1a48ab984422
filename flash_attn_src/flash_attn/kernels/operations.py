"""Operations: one row each, with everything that the compile stage and the run time need to know about a kernel.

The compile stage builds every variant of every row (`variants.table`), and a call asks for one variant by name.
Standard library only: the compile stage has no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from flash_attn.kernels.flags import PAGE_PER_BLOCK, PAGE_PER_KEY
from flash_attn.kernels.targets import Target

DTYPES = ("fp16", "bf16", "fp32")
HALVES = ("fp16", "bf16")
HEAD_DIMS = (32, 64, 96, 128, 192, 256)

# What a kernel does to the scores: nothing, one thing, or everything that the call asks for, which `any` finds out
# when it runs. Such a test in the main loop keeps loads from running under the arithmetic. So each single thing has a
# kernel of its own in the types that training uses.
KINDS = ("plain", "alibi", "dropout", "softcap", "any")

# Rows whose strides are multiples of 16 bytes, or any rows. `uneven` kernels compute one address for each element.
# Larger blocks have too few registers for that, and uneven norms are rare.
LAYER_KINDS = ("plain", "uneven")

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
    sizes: ascending. Attention: the largest head dim of a variant. Layers: the elements of a row.
    sizes_of_kind: kind -> its sizes, where it has fewer.
    kinds, fp32_kinds: what the variants do to the scores (`KINDS`), with fp32 elements and without. The last kind
    serves every call.
    in_pieces: whether the kernel takes head dims piece by piece, so that its one size serves all of them.
    tuning: where the tile comes from: the table of the target's family, a fixed tile, or the rules for layers. A search
    on a GPU tries other tiles only for a table.
    tile_of: the operation whose tile serves a size without a row in the table.
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
    sizes: tuple[int, ...] = HEAD_DIMS
    sizes_of_kind: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kinds: tuple[str, ...]
    fp32_kinds: tuple[str, ...] | None = None
    in_pieces: bool = False
    tuning: Literal["table", "fixed", "layers"]
    tile_of: str | None = None

    @property
    def searched(self) -> bool:
        """Whether a search on a GPU tries other tiles."""
        return self.tuning == "table"

    def kinds_of(self, dtype: str) -> tuple[str, ...]:
        """The kinds that exist ahead of time for an element type."""
        return self.fp32_kinds if dtype == "fp32" and self.fp32_kinds else self.kinds

    def serving(self, dtype: str, kind: str) -> str:
        """The kind of kernel that serves a call of a kind: the kind itself, or the last, which serves every call."""
        kinds = self.kinds_of(dtype)
        return kind if kind in kinds else kinds[-1]

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


def launch_letter(type_: str) -> str:
    """The launcher's letter for an argument type: P pointer, i int32, f float32."""
    return "P" if type_.startswith("*") else LAUNCH_LETTERS[type_]


_LENGTHS = "cu_seqlens_q cu_seqlens_k seqused_k leftpad_k"
_SCORES = {"*i64": "rng_state", "fp32": "scale softcap p_dropout"}
_TILE = ("VEC", "BLOCK_M", "BLOCK_N", "BLOCK_D", "TAIL", "DEPTH", "KIND", "NUM_XCDS", "HALF_UP", "SHARED")

_FORWARD = Operation(
    name="fwd",
    module="forward",
    function="attn_fwd",
    types={"*T": "q k v out", "*fp32": "lse alibi_slopes", "*i32": f"{_LENGTHS} block_table", **_SCORES},
    aligned=("q", "k", "v", "out", "lse"),
    constants=_TILE,
    fixed={"PAGED": 0},
    kinds=KINDS,
    fp32_kinds=("plain", "any"),
    tuning="table",
)
_FORWARD_PAGED = replace(
    _FORWARD, name="fwd-paged", fixed={"PAGED": PAGE_PER_KEY}, kinds=("plain", "any"), fp32_kinds=None, tile_of="fwd"
)
_FORWARD_PAGED_WHOLE = replace(_FORWARD_PAGED, name="fwd-paged-whole", fixed={"PAGED": PAGE_PER_BLOCK}, dtypes=HALVES)
# For debugging, so no kind has a kernel of its own.
_PROBABILITIES = Operation(
    name="probabilities",
    module="probabilities",
    function="attn_probabilities",
    types={"*T": "q k dmask", "*fp32": "lse alibi_slopes", "*i32": _LENGTHS, **_SCORES},
    aligned=("q", "k", "lse"),
    constants=("VEC", "BLOCK_M", "BLOCK_N", "BLOCK_D", "DEPTH", "SHARED"),
    sizes=(32, 64, 128, 256),
    kinds=("any",),
    tuning="fixed",
)
_BACKWARD_DKDV = Operation(
    name="bwd-dkdv",
    module="backward_dkdv",
    function="attn_bwd_dkdv",
    types={"*T": "q k v dout dk dv", "*fp32": "lse delta alibi_slopes", "*i32": _LENGTHS, **_SCORES},
    aligned=("q", "k", "v", "dout", "dk", "dv", "lse", "delta"),
    constants=_TILE,
    kinds=KINDS,
    fp32_kinds=("plain", "any"),
    tuning="table",
)
_BACKWARD_DQ = replace(
    _BACKWARD_DKDV,
    name="bwd-dq",
    module="backward_dq",
    function="attn_bwd_dq",
    types={"*T": "q k v out dout dq", "*fp32": "lse delta alibi_slopes", "*i32": _LENGTHS, **_SCORES},
    aligned=("q", "k", "v", "out", "dout", "dq", "lse", "delta"),
)

# Decoding waits for memory. It does not load masked columns, so few sizes are enough.
_DECODE = Operation(
    name="decode",
    module="decode",
    function="attn_decode",
    types={
        "*T": "q k v out",
        "*fp32": "lse partial partial_lse alibi_slopes q_descale k_descale v_descale",
        "*i32": f"{_LENGTHS} block_table",
        "fp32": "scale softcap page_inverse",
    },
    aligned=("q", "k", "v", "out", "lse", "partial"),
    constants=("VEC", "BLOCK_M", "BLOCK_N", "BLOCK_D", "DEPTH", "SHAPED", "HALF_UP"),
    fixed={"PAGED": PAGE_PER_BLOCK},
    dtypes=(*DTYPES, "fp8"),
    sizes=(64, 128, 256),
    kinds=("plain", "any"),
    tuning="table",
)
_DECODE_PAGED = replace(_DECODE, name="decode-paged", fixed={"PAGED": PAGE_PER_KEY}, tile_of="decode")
_EXTEND = replace(_DECODE, name="extend")
_EXTEND_PAGED = replace(_DECODE_PAGED, name="extend-paged", tile_of="extend")
# `wide`: few rows with many splits.
_COMBINE = Operation(
    name="combine",
    module="combine",
    function="attn_combine",
    types={"*fp32": "partial lse partial_lse", "*T": "out"},
    aligned=("partial", "lse", "out"),
    constants=("BLOCK_N", "BLOCK_D"),
    sizes=(128,),
    in_pieces=True,
    kinds=("plain", "wide"),
    tuning="fixed",
)
_APPEND = Operation(
    name="append",
    module="append",
    function="attn_append",
    types={
        "*T": "k_new v_new k v q q_turned cos sin",
        "*i32": "cu_seqlens_q cu_seqlens_k seqused_k block_table cache_batch_idx rotary_seqlens",
    },
    aligned=("k_new", "v_new", "k", "v", "q", "q_turned"),
    constants=("VEC", "BLOCK_M", "BLOCK_D"),
    dtypes=(*DTYPES, "fp8"),
    sizes=(64,),
    in_pieces=True,
    kinds=("plain",),
    tuning="fixed",
)

_FP8_AMAX = Operation(
    name="fp8-amax",
    module="fp8_cast",
    function="fp8_amax",
    types={"*T": "x", "*fp32": "amax", "*i32": "cu_seqlens_q"},
    aligned=("x",),
    constants=("VEC", "BLOCK_M", "BLOCK_D"),
    needs_fp8=True,
    sizes=(64,),
    in_pieces=True,
    kinds=("plain",),
    tuning="fixed",
)
_FP8_CAST = replace(
    _FP8_AMAX,
    name="fp8-cast",
    function="fp8_cast",
    types={"*T": "x", "*u8": "y", "*fp32": "amax descale", "*i32": "cu_seqlens_q", "fp32": "limit"},
    aligned=("x", "y"),
    constants=("VEC", "BLOCK_M", "BLOCK_N", "BLOCK_D", "FNUZ"),
    fixed={"TRANSPOSED": False},
)
_FP8_CAST_V = replace(_FP8_CAST, name="fp8-cast-v", fixed={"TRANSPOSED": True}, dtypes=(*DTYPES, "fp8"))
_FP8_FORWARD = Operation(
    name="fp8-fwd",
    module="fp8",
    function="fp8_fwd",
    types={
        "*T": "q k v out",
        "*fp32": "lse q_descale k_descale v_descale alibi_slopes",
        "*i32": "cu_seqlens_q cu_seqlens_k seqused_k",
        **_SCORES,
    },
    aligned=("q", "k", "v", "out", "lse"),
    constants=("VEC", "BLOCK_M", "BLOCK_N", "BLOCK_D", "EXTRA", "NUM_XCDS", "SHARED"),
    dtypes=("fp8",),
    needs_fp8=True,
    sizes=(64, 128, 256),
    kinds=("plain", "any"),
    tuning="table",
)

# With fp32 elements these operations are the plain ones, so they do not exist for fp32: tables of cosines in fp32
# (t32), weights in fp32 (w32), weights and residual in fp32 (r32).
_ROTARY = Operation(
    name="rotary",
    module="rotary",
    function="rotary",
    types={"*T": "x turned cosines sines", "*i32": "cu_seqlens offsets", "fp32": "sign"},
    aligned=("x", "turned", "cosines", "sines"),
    constants=("UNIT", "BLOCK_M", "BLOCK_D"),
    fixed={"INTERLEAVED": False},
    sizes=(64, 128, 256),
    kinds=LAYER_KINDS,
    tuning="layers",
)
_ROTARY_INTERLEAVED = replace(_ROTARY, name="rotary-interleaved", fixed={"INTERLEAVED": True})
_TABLES_32 = {"fp32_arguments": ("cosines", "sines"), "dtypes": HALVES}
_NORM_FORWARD = Operation(
    name="norm-fwd",
    module="norm",
    function="norm_fwd",
    types={"*T": "x residual weight bias normal z", "*fp32": "mean rstd", "fp32": "eps shift"},
    aligned=("x", "residual", "weight", "bias", "normal", "z"),
    constants=("UNIT", "BLOCK_M", "BLOCK_N", "LONG"),
    sizes=(64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    sizes_of_kind={"uneven": (1024, 4096)},
    kinds=LAYER_KINDS,
    tuning="layers",
)
_NORM_BACKWARD = replace(
    _NORM_FORWARD,
    name="norm-bwd",
    function="norm_bwd",
    types={"*T": "z weight dy dz dx dresidual", "*fp32": "mean rstd dweight", "fp32": "shift"},
    aligned=("z", "weight", "dy", "dz", "dx", "dresidual", "dweight"),
    constants=("UNIT", "BLOCK_M", "BLOCK_N", "LONG", "AHEAD"),
)
_WEIGHTS_32 = {"fp32_arguments": ("weight", "bias"), "dtypes": HALVES}
_RESIDUAL_32 = {"fp32_arguments": ("weight", "bias", "residual", "z", "dz", "dresidual"), "dtypes": HALVES}
_LOSS_FORWARD = Operation(
    name="cross-entropy-fwd",
    module="cross_entropy",
    function="cross_entropy_fwd",
    types={
        "*T": "logits",
        "*fp32": "lse loss z_loss",
        "*i64": "labels",
        "fp32": "smoothing scale square_scale",
    },
    aligned=("logits", "lse"),
    constants=("UNIT", "BLOCK_N"),
    sizes=(4096,),
    kinds=LAYER_KINDS,
    tuning="layers",
)
_LOSS_BACKWARD = replace(
    _LOSS_FORWARD,
    name="cross-entropy-bwd",
    function="cross_entropy_bwd",
    types=_LOSS_FORWARD.types | {"*T": "logits dlogits", "*fp32": "lse dloss"},
    aligned=("logits", "dlogits", "lse"),
)

OPERATIONS: dict[str, Operation] = {
    row.name: row
    for row in (
        _FORWARD,
        _FORWARD_PAGED,
        _FORWARD_PAGED_WHOLE,
        _PROBABILITIES,
        _BACKWARD_DKDV,
        _BACKWARD_DQ,
        _DECODE,
        _DECODE_PAGED,
        _EXTEND,
        _EXTEND_PAGED,
        _COMBINE,
        _APPEND,
        _FP8_AMAX,
        _FP8_CAST,
        _FP8_CAST_V,
        _FP8_FORWARD,
        _ROTARY,
        _ROTARY_INTERLEAVED,
        replace(_ROTARY, name="rotary-t32", **_TABLES_32),
        replace(_ROTARY_INTERLEAVED, name="rotary-interleaved-t32", **_TABLES_32),
        _NORM_FORWARD,
        replace(_NORM_FORWARD, name="norm-fwd-w32", **_WEIGHTS_32),
        replace(_NORM_FORWARD, name="norm-fwd-r32", **_RESIDUAL_32),
        _NORM_BACKWARD,
        replace(_NORM_BACKWARD, name="norm-bwd-w32", **_WEIGHTS_32),
        replace(_NORM_BACKWARD, name="norm-bwd-r32", **_RESIDUAL_32),
        _LOSS_FORWARD,
        _LOSS_BACKWARD,
    )
}
