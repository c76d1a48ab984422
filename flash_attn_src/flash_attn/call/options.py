"""The options of attention as one value, and who honours which of them.

Every kind of call holds an `Options`. Keys of plans, copies, checks of shapes, the custom operators and what a backward
keeps derive from its fields. Whoever serves calls is a `Door`: a row of permissions. A new option is served by no door
until a row names it, and a call that uses it is refused by name.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import torch

from flash_attn.call.mask import SCHEMA as MASK_SCHEMA
from flash_attn.call.mask import Mask, block_size_of, mask_of, parts_of
from flash_attn.kernels.modifiers import DOORS, Permissions

Window = tuple[int, int]

_Value = TypeVar("_Value")
_Kind = TypeVar("_Kind", bound=type)


class Fields(NamedTuple):
    """What the fields of a value are: the names of all, of the tensors, of numbers and switches, of those that have a
    gradient.

    axes: the axes of each tensor that has one for heads. dtypes: their element types, see `_tensor`.
    """

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    plain: tuple[str, ...]
    learned: tuple[str, ...]
    axes: dict[str, str]
    dtypes: dict[str, str]


FIELDS: dict[type, Fields] = {}


def draw_rng_state(device: torch.device) -> torch.Tensor:
    """int64[2], which a call's dropout comes from, of torch's own generator: it advances, also in a captured graph."""
    return torch.randint(0, 2**31 - 1, (2,), dtype=torch.int64, device=device)


def known(kind: _Kind) -> _Kind:
    """A class decorator: makes the fields of a dataclass known, to `FIELDS` and to every door."""
    every = fields(kind)
    tensors = tuple(x.name for x in every if x.metadata.get("schema") == "Tensor?")
    FIELDS[kind] = Fields(
        names=tuple(x.name for x in every),
        tensors=tensors,
        plain=tuple(x.name for x in every if x.name not in (*tensors, "mask")),
        learned=tuple(x.name for x in every if x.metadata.get("learned")),
        axes={x.name: x.metadata["axes"] for x in every if x.metadata.get("axes")},
        dtypes={x.name: x.metadata.get("dtype", "fp32") for x in every if x.metadata.get("axes")},
    )
    for door in _doors:
        door.meet(kind)
    return kind


class Door:
    """Somebody who serves calls: a row of `modifiers.DOORS`, or other permissions."""

    def __init__(self, name: str, row: Permissions | None = None) -> None:
        self.who, self.serves = row or DOORS[name]
        self._others: dict[type, tuple[tuple[str, Any], ...]] = {}
        for kind in FIELDS:
            self.meet(kind)
        _doors.append(self)

    def meet(self, kind: type) -> None:
        """Looks which fields of a kind of value it does not honour, and what they hold where they are not used."""
        self._others[kind] = tuple(
            (x.name, x.default)
            for x in fields(kind)
            if x.default is not MISSING and not x.metadata.get("of") and x.name not in self.serves
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
            raise NotImplementedError(f"{name}: {self.who} cannot honour it: {remedy}")


_doors: list[Door] = []


def _tensor(axes: str = "", dtype: str = "fp32", *, learned: bool = False, of: str = "") -> dict[str, Any]:
    """What is known of an option that is a tensor or None.

    axes: "heads", "batch heads" (which may be "heads" alone), "scores": (1 or batch, 1 or heads, seqlen_q, seqlen_k),
    or a table of distances.
    dtype: "fp32", which is what kernels read of a number for each head; "float" for fp16, bf16 or fp32; "q or fp32" for
    the type of q or fp32.
    learned: whether it has a gradient. of: the option to which it belongs, which doors ask for instead.
    """
    return {"schema": "Tensor?", "axes": axes, "dtype": dtype, "learned": learned, "of": of}


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
                     -inf hides a key; dense tensors only, without dropout and ALiBi. With three axes (1 or batch,
                     1 or heads, seqlen_q + seqlen_k - 1) a table of distances: query i and key j read its entry
                     j - i + seqlen_q - 1
    rng_state        int64 (2,): where dropout's random numbers come from; None with dropout: the backend draws it
    mask             which keys each query sees, by blocks, ranges and ids; dense tensors only
    """

    # schema: the type of an option in the schema of a custom operator.
    softmax_scale: float | None = field(default=None, metadata={"schema": "float?"})
    causal: bool = field(default=False, metadata={"schema": "bool"})
    window_size: Window = field(default=(-1, -1), metadata={"schema": "SymInt[2]"})
    softcap: float = field(default=0.0, metadata={"schema": "float"})
    dropout_p: float = field(default=0.0, metadata={"schema": "float"})
    attention_chunk: int = field(default=0, metadata={"schema": "SymInt"})
    alibi_slopes: torch.Tensor | None = field(default=None, metadata=_tensor("batch heads"))
    s_aux: torch.Tensor | None = field(default=None, metadata=_tensor("heads", "float", learned=True))
    attn_bias: torch.Tensor | None = field(default=None, metadata=_tensor("scores", "q or fp32", learned=True))
    rng_state: torch.Tensor | None = field(default=None, metadata=_tensor(of="dropout_p"))
    # By keyword alone: the values of the other options are in the order of the schema, in which its parts come last.
    mask: Mask | None = field(default=None, kw_only=True)

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


# The options as arguments of a custom operator, and after them the parts of the mask.
ARGUMENTS = tuple(x.name for x in fields(Options) if x.metadata)
SCHEMA = ", ".join(f"{x.metadata['schema']} {x.name}" for x in fields(Options) if x.metadata) + f", {MASK_SCHEMA}"


def as_arguments(options: Options) -> tuple[Any, ...]:
    """The options in the order of `SCHEMA`. Raises NotImplementedError for an option that it lacks."""
    OPERATORS.refuse(options, "call it outside of torch.compile")
    return (*[getattr(options, name) for name in ARGUMENTS], *parts_of(options.mask), block_size_of(options.mask))


def from_arguments(values: tuple[Any, ...]) -> Options:
    """The options whose `as_arguments` these are. An operator gets a window as a list."""
    options = Options(**dict(zip(ARGUMENTS, values, strict=False)))
    left, right = options.window_size
    options.window_size = (left, right)
    *parts, block_size = values[len(ARGUMENTS) :]
    options.mask = mask_of(parts, block_size)
    return options


def option_tensors(options: Options) -> list[torch.Tensor | None]:
    """The options that are tensors, None where a call has none, and the parts of a mask."""
    tensors = [getattr(options, name) for name in FIELDS[type(options)].tensors]
    return tensors if options.mask is None else [*tensors, *parts_of(options.mask)]


def learned(options: Options) -> list[torch.Tensor | None]:
    """The options that have a gradient, None where a call has none."""
    return [getattr(options, name) for name in FIELDS[type(options)].learned]


# Who serves what: the rows of `modifiers.DOORS`.
TRITON = Door("triton")
WITH_BIAS = Door("triton-bias")
WITH_MASK = Door("triton-mask")
PROBABILITIES = Door("probabilities")
TORCH = Door("torch")
CK_FORWARD = Door("ck-fwd")
CK_BACKWARD = Door("ck-bwd")
CK_CACHE = Door("ck-cache")
ASM_FORWARD = Door("asm-fwd")
ASM_BACKWARD = Door("asm-bwd")
MEASURED_FORWARD = Door("measured-fwd")
MEASURED_BACKWARD = Door("measured-bwd")
SPLIT_KV = Door("split-kv")
CACHE = Door("cache")
CACHE_AS_WHOLE = Door("cache-whole")
FP8 = Door("fp8")
INT8 = Door("int8")
SECOND_DERIVATIVE = Door("second-derivative")
UPSTREAM_FORWARD = Door("upstream-fwd")
UPSTREAM_BACKWARD = Door("upstream-bwd")
# Not a choice: the schema has every option.
OPERATORS = Door("a custom operator", Permissions("a custom operator", frozenset((*ARGUMENTS, "mask"))))
