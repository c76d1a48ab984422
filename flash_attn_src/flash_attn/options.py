"""The options of attention as one value, and who honours which of them.

Every kind of call holds an `Options`. Keys of plans, copies, the custom operators, what a backward keeps, reports and
fuzzers derive from its fields, so no other place lists them. Whoever serves calls is a `Door`: a row of permissions. A
new option is served by no door until a row names it, and a call that uses it is refused by name.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import torch

from flash_attn.block_mask import BlockMask

Window = tuple[int, int]

_Value = TypeVar("_Value")
_Kind = TypeVar("_Kind", bound=type)


class Fields(NamedTuple):
    """What the fields of a value are: the names of all, of the tensors, of those that have a gradient.

    axes: the axes of each tensor that has one for heads.
    """

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    plain: tuple[str, ...]
    learned: tuple[str, ...]
    axes: dict[str, str]


FIELDS: dict[type, Fields] = {}


def known(kind: _Kind) -> _Kind:
    """A class decorator: makes the fields of a dataclass known, to `FIELDS` and to every door."""
    every = fields(kind)
    tensors = tuple(x.name for x in every if x.metadata.get("schema") == "Tensor?")
    FIELDS[kind] = Fields(
        names=tuple(x.name for x in every),
        tensors=tensors,
        plain=tuple(x.name for x in every if x.name not in tensors),
        learned=tuple(x.name for x in every if x.metadata.get("learned")),
        axes={x.name: x.metadata["axes"] for x in every if x.metadata.get("axes")},
    )
    for door in _doors:
        door.meet(kind)
    return kind


class Door:
    """Somebody who serves calls. serves: the fields of a call and of its options that it honours."""

    def __init__(self, name: str, *serves: str) -> None:
        self.name = name
        self.serves = frozenset(" ".join(serves).split())
        self._others: dict[type, tuple[tuple[str, Any], ...]] = {}
        for kind in FIELDS:
            self.meet(kind)
        _doors.append(self)

    def meet(self, kind: type) -> None:
        """Looks which fields of a kind of value it does not honour, and what they hold where they are not used."""
        self._others[kind] = tuple(
            (x.name, x.default)
            for x in fields(kind)
            if x.default is not MISSING and (x.metadata.get("of") or x.name) not in self.serves
        )

    def unserved(self, value: Any) -> str | None:
        """The first field of a call, or of its options, that is used and not honoured. None: it serves the call."""
        for name, off in self._others[type(value)]:
            used = getattr(value, name)
            if used is not off and (off is None or used != off):
                return name
        options = value if isinstance(value, Options) else value.options
        return None if options is value else self.unserved(options)

    def refuse(self, value: Any, remedy: str) -> None:
        """Raises NotImplementedError for a call that the door does not serve."""
        name = self.unserved(value)
        if name is not None:
            raise NotImplementedError(f"{name}: {self.name} cannot honour it: {remedy}")


_doors: list[Door] = []


def _tensor(axes: str = "", *, learned: bool = False, of: str = "") -> dict[str, Any]:
    """What is known of an option that is a tensor or None.

    axes: "heads", "batch heads" (which may be "heads" alone), "scores": (1 or batch, 1 or heads, seqlen_q, seqlen_k).
    learned: whether it has a gradient. of: the option to which it belongs, whose permission counts for both.
    """
    return {"schema": "Tensor?", "axes": axes, "learned": learned, "of": of}


@known
@dataclass(slots=True, eq=False)
class Options:
    """What turns the products of queries and keys into the weights of the values.

    softmax_scale    None stands for head_dim ** -0.5 until the checks put it in
    causal           query i sees keys up to i + seqlen_k - seqlen_q
    window_size      (left, right), -1 where open
    softcap          > 0: scores become softcap * tanh(score / softcap)
    dropout_p        probability of dropping a weight
    attention_chunk  > 0: a query sees keys of its own chunk of so many only
    alibi_slopes     fp32 (heads,) or (batch, heads)
    s_aux            fp16, bf16 or fp32 (heads,): the sinks. A sink is a score of each query head that joins the sum of
                     the softmax and has no value
    attn_bias        q's dtype or fp32 (1 or batch, 1 or heads, seqlen_q, seqlen_k): added to the scores after softcap,
                     -inf hides a key; dense tensors only, without dropout and ALiBi
    rng_state        int64 (2,): where dropout's random numbers come from; None with dropout: the backend draws it
    block_mask       which blocks of keys a block of queries sees; dense tensors only
    """

    # schema: the type of an option in the schema of a custom operator.
    softmax_scale: float | None = field(default=None, metadata={"schema": "float?"})
    causal: bool = field(default=False, metadata={"schema": "bool"})
    window_size: Window = field(default=(-1, -1), metadata={"schema": "SymInt[2]"})
    softcap: float = field(default=0.0, metadata={"schema": "float"})
    dropout_p: float = field(default=0.0, metadata={"schema": "float"})
    attention_chunk: int = field(default=0, metadata={"schema": "SymInt"})
    alibi_slopes: torch.Tensor | None = field(default=None, metadata=_tensor("batch heads"))
    s_aux: torch.Tensor | None = field(default=None, metadata=_tensor("heads", learned=True))
    attn_bias: torch.Tensor | None = field(default=None, metadata=_tensor("scores", learned=True))
    rng_state: torch.Tensor | None = field(default=None, metadata=_tensor(of="dropout_p"))
    block_mask: BlockMask | None = None

    @property
    def scale(self) -> float:
        """softmax_scale after the checks."""
        assert self.softmax_scale is not None
        return self.softmax_scale


def replace(value: _Value, **changes: Any) -> _Value:
    """A copy of a known value with some fields changed, its own or those of its options.

    Raises TypeError for a name that is neither. dataclasses.replace takes twice as long.
    """
    kind = type(value)
    copy = object.__new__(kind)
    for name in FIELDS[kind].names:
        setattr(copy, name, changes.pop(name) if name in changes else getattr(value, name))
    if changes:
        if isinstance(copy, Options):
            raise TypeError(
                f"{', '.join(changes)}: no option of attention, wanted one of {', '.join(FIELDS[kind].names)}"
            )
        copy.options = replace(copy.options, **changes)  # type: ignore[attr-defined]
    return copy


def plan_key(options: Options) -> tuple[object, ...] | None:
    """All options, for the key of a plan; None if one of them is a tensor or a mask, which no plan has."""
    kind = FIELDS[type(options)]
    if options.block_mask is not None:
        return None
    for name in kind.tensors:
        if getattr(options, name) is not None:
            return None
    return tuple([getattr(options, name) for name in kind.plain])


# The options as arguments of a custom operator. A block mask has operators of its own.
ARGUMENTS = tuple(x.name for x in fields(Options) if x.metadata)
SCHEMA = ", ".join(f"{x.metadata['schema']} {x.name}" for x in fields(Options) if x.metadata)


def as_arguments(options: Options) -> tuple[Any, ...]:
    """The options in the order of `SCHEMA`."""
    return tuple([getattr(options, name) for name in ARGUMENTS])


def from_arguments(values: tuple[Any, ...]) -> Options:
    """The options whose `as_arguments` these are. An operator gets a window as a list."""
    options = Options(*values)
    left, right = options.window_size
    options.window_size = (left, right)
    return options


def option_tensors(options: Options) -> list[torch.Tensor | None]:
    """The options that are tensors, None where a call has none."""
    return [getattr(options, name) for name in FIELDS[type(options)].tensors]


def learned(options: Options) -> list[torch.Tensor | None]:
    """The options that have a gradient, None where a call has none."""
    return [getattr(options, name) for name in FIELDS[type(options)].learned]


# Who serves what. An option, or another field of a call, that a row does not name is refused by that door.
_MASK = "softmax_scale causal window_size"
_RESULT = "deterministic return_softmax out"
_PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_PAGES = "seqused_k leftpad_k block_table"
_CACHE = "k v cache_seqlens cache_batch_idx block_table rotary_cos rotary_sin rotary_interleaved out"
_FLASH_3 = "cu_seqlens_q max_seqlen_q cu_seqlens_k_new rotary_seqlens cache_leftpad max_seqlen_k"
_SPEED = "num_splits sm_margin"

TRITON = Door(
    "this project's kernels",
    *(_MASK, _RESULT, _PACKED, _PAGES),
    "softcap dropout_p alibi_slopes s_aux attn_bias block_mask",
)
TORCH = Door(
    "the path for a CPU",
    *(_MASK, _RESULT, _PACKED, _PAGES),
    "softcap dropout_p alibi_slopes s_aux attn_bias block_mask",
)
WITH_BIAS = Door("a kernel with attn_bias", _MASK, _RESULT, "softcap s_aux attn_bias")
WITH_BLOCK_MASK = Door("a kernel with block_mask", _MASK, _RESULT, "block_mask")
PROBABILITIES = Door(
    "return_attn_probs", _MASK, _RESULT, _PACKED, "seqused_k leftpad_k softcap dropout_p alibi_slopes s_aux"
)
CK_FORWARD = Door("Composable Kernel", _MASK, _RESULT, _PACKED, "seqused_k block_table softcap dropout_p alibi_slopes")
CK_BACKWARD = Door("Composable Kernel", _MASK, _RESULT, _PACKED, "dropout_p alibi_slopes s_aux")
CK_CACHE = Door("Composable Kernel", _MASK, _CACHE, _SPEED, "max_seqlen_q max_seqlen_k softcap alibi_slopes")
ASM_FORWARD = Door("AMD's assembly", _MASK, _RESULT, _PACKED)
# softmax_lse, which a backward gets, holds the sinks.
ASM_BACKWARD = Door("AMD's assembly", _MASK, "return_softmax out s_aux", _PACKED)
# The calls for which the table of the fastest kernels was measured.
MEASURED_FORWARD = Door("the table of the fastest kernels", _MASK, _RESULT, _PACKED)
MEASURED_BACKWARD = Door("the table of the fastest kernels", _MASK, _RESULT, _PACKED, "s_aux")
SPLIT_KV = Door("attention in splits of the keys", _MASK, _RESULT, _PACKED, _PAGES, "softcap alibi_slopes s_aux")
CACHE = Door(
    "attention over a cache",
    *(_MASK, _CACHE, _FLASH_3, _SPEED, "softcap alibi_slopes s_aux attention_chunk descales qv"),
)
CACHE_AS_WHOLE = Door("the kernel for whole sequences", _MASK, _CACHE, _FLASH_3, _SPEED, "softcap alibi_slopes s_aux")
FP8 = Door("attention in FP8", _MASK, _RESULT, _PACKED, "descales softcap dropout_p alibi_slopes")
INT8 = Door("attention with INT8 queries and keys", _MASK, _RESULT, _PACKED)
SECOND_DERIVATIVE = Door("attention by PyTorch's operations", _MASK, _RESULT, "softcap alibi_slopes s_aux attn_bias")
UPSTREAM_FORWARD = Door("upstream's operator", _MASK, _PACKED, "return_softmax out block_table softcap alibi_slopes")
UPSTREAM_BACKWARD = Door("upstream's operator", _MASK, _RESULT, _PACKED, "softcap dropout_p alibi_slopes s_aux")
