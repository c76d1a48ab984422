"""Plans: what a call allocates, computes and launches, kept by all that this depends on.

The first call of a kind runs as it is, the second is recorded, and later calls replay the record with their own
tensors. A plan holds shapes, numbers and kernels, no tensor. Its key has every value of the call: numbers by value and
type, tensors by shape, strides, type, device and alignment. A record is dropped where something else may have decided
what it does: a value was read from a tensor, a kernel or an operation took a tensor that is neither the call's nor made
by the call, or code that looks at something else said so by `protocol.spoil`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn.call.calls import AttentionCall
from flash_attn.call.options import Options
from flash_attn.core import device
from flash_attn.core.arguments import picker
from flash_attn.core.protocol import Grid, Kernel, Tensors, recording

_Call = TypeVar("_Call")
_Result = TypeVar("_Result")
_Kept = dict[tuple[object, ...], Any]
_Slots = list[Any]  # None, the tensors of the call, then what the steps make
_Step = Callable[[_Slots], object]

_NESTED = (AttentionCall, Options)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = frozenset((bool, int, float, tuple, type(None), *_TENSORS))
_ATEN = torch.ops.aten
_EMPTY = (_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.new_empty.default, _ATEN.empty_strided.default)
_SEEN, _NEVER = "seen once", "never kept"


class _Plan(NamedTuple):
    steps: tuple[_Step, ...]
    result: Callable[[_Slots], Any]


class _Place(int):
    """The place of a tensor among the slots."""


class _Tape(TorchDispatchMode):
    """Records what a call with these tensors does: torch's operations, and by `launch` the launches."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.is_spoiled = self.has_launched = self._is_launching = False
        self._held: list[object] = [None, *tensors]  # so that no other object gets the id of one of these
        self._places = {id(x): _Place(place) for place, x in enumerate(self._held)}
        self._slots = len(self._held)

    def place(self, value: Any) -> Any:
        """A value with places for its tensors. Raises KeyError for a tensor that no slot holds."""
        if isinstance(value, (list, tuple)):
            return [self.place(x) for x in value]
        return self._places[id(value)] if isinstance(value, torch.Tensor) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.is_spoiled and not self._is_launching:
            try:
                self._add(func, args, kwargs or {}, result)
            except KeyError:
                self.is_spoiled = True
        return result

    def _add(self, func: Any, args: Any, named: dict[str, Any], result: Any) -> None:
        made = result if isinstance(result, (list, tuple)) else [result]
        reads = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if reads or not all(isinstance(x, torch.Tensor) for x in made):  # Python sees the content of a tensor
            raise KeyError(func)
        self._held += made
        if func is _ATEN.detach.default:
            self._places[id(result)] = self.place(args[0])
            return
        given, by_name = self.place(args), {name: self.place(value) for name, value in named.items()}
        self._places |= {id(x): _Place(self._slots + number) for number, x in enumerate(made)}
        self._slots += len(made)
        if func in _EMPTY:
            kind = {"dtype": result.dtype, "device": result.device}
            make = partial(torch.empty_strided, tuple(result.shape), result.stride(), **kind)
            self.steps.append(lambda slots: slots.append(make()))
            return

        def repeat(slots: _Slots) -> None:
            again = func(*_filled(given, slots), **{name: _filled(value, slots) for name, value in by_name.items()})
            slots.extend(again if isinstance(again, (list, tuple)) else [again])

        self.steps.append(repeat)

    def launch(self, kernel: Kernel, grid: Grid, tensors: Tensors, numbers: Sequence[int | float]) -> None:
        """Launches, and records the launch. What a stand-in for a GPU computes by torch is part of the launch."""
        self._is_launching = True
        try:
            kernel.launch(grid, tensors, numbers)
        finally:
            self._is_launching = False
        places = [self._places.get(id(x)) for x in tensors]
        self.has_launched, self.is_spoiled = True, self.is_spoiled or None in places
        pick = picker(places)
        self.steps.append(lambda slots: kernel.launch(grid, pick(slots), numbers))

    def plan(self, result: Any) -> _Plan | None:
        """The plan of the recorded call, which gave this result: a tensor, or a tuple of tensors and None."""
        is_one = isinstance(result, torch.Tensor)
        places = [self._places.get(id(x)) for x in ([result] if is_one else result)]
        if self.is_spoiled or not self.has_launched or None in places:
            return None
        pick, make = picker(places), getattr(type(result), "_make", tuple)
        if is_one:
            return _Plan(tuple(self.steps), lambda slots: pick(slots)[0])
        return _Plan(tuple(self.steps), lambda slots: make(pick(slots)))


def _filled(value: Any, slots: _Slots) -> Any:
    """A value of `_Tape.place` with the tensors of another call."""
    if isinstance(value, list):
        return [_filled(x, slots) for x in value]
    return slots[value] if type(value) is _Place else value


def _reader(kept: _Kept, kinds: tuple[type, ...]) -> Any:
    """How a key has values of these types: functions that pick the tensors and the numbers, and the places of tuples.
    None: no plan may serve a call with them."""
    if not _PLAIN.issuperset(kinds):
        return None
    tensors = [place for place, kind in enumerate(kinds) if kind in _TENSORS]
    numbers = [place for place, kind in enumerate(kinds) if kind not in (*_TENSORS, tuple)]
    kept[kinds] = picker(tensors), picker(numbers), [place for place, kind in enumerate(kinds) if kind is tuple]
    return kept[kinds]


def key(kept: _Kept, who: object, values: tuple[Any, ...], *, grad: bool = False) -> tuple[tuple[Any, ...], Any] | None:
    """The key of the plan by which `who` serves a call with these values, and the tensors among them. None: no plan may
    serve it. grad: whether a tensor that requires a gradient gets one, which no plan gives."""
    kinds = tuple(map(type, values))
    reader = kept.get(kinds) or _reader(kept, kinds)
    if reader is None:
        return None
    pick_tensors, pick_numbers, tuples = reader
    tensors, parts = pick_tensors(values), [who, kinds, pick_numbers(values)]
    for place in tuples:
        inner = values[place]
        kinds = tuple(map(type, inner))
        reader = kept.get(kinds) or _reader(kept, kinds)
        if reader is None or reader[2]:
            return None
        tensors += reader[0](inner)
        parts += kinds, reader[1](inner)
    try:
        for x in tensors:
            if grad and x.requires_grad:
                return None
            parts += x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15
    except RuntimeError:  # a tensor without strides or memory
        return None
    return tuple(parts), tensors


def planned(who: object, values: tuple[Any, ...], run: Callable[..., _Result], *, grad: bool = False) -> _Result:
    """The result of a call with these values: by its plan if there is one, else `run()`, or `run(other)` with other
    values. who: what `run` is, for the key."""
    kept = device.plans()
    found = None if recording.tape is not None else key(kept, who, values, grad=grad)
    if found is None:
        return run()
    name, tensors = found
    plan = kept.get(name)
    if type(plan) is _Plan:
        slots: _Slots = [None, *tensors]
        for step in plan.steps:
            step(slots)
        result: _Result = plan.result(slots)
        return result
    if plan is None:
        kept[name] = _SEEN
    return _recorded(values, run, name) if plan is _SEEN else run()


def planned_call(serve: Callable[[_Call], _Result], call: _Call) -> _Result:
    """The result of `serve(call)`, by the plan of the call if there is one."""
    of: Any = getattr(call, "forward", call)
    kept, kinds = device.plans(), (type(call), type(of.options))
    read = kept.get(kinds)
    if read is None:
        read = kept[kinds] = attrgetter(*_names(call))
    return planned(serve, read(call), lambda own=None: serve(call if own is None else _remade(call, iter(own))))


def _names(call: Any) -> Iterator[str]:
    for x in fields(call):
        value = getattr(call, x.name)
        yield from (f"{x.name}.{name}" for name in _names(value)) if isinstance(value, _NESTED) else (x.name,)


def _remade(call: Any, values: Iterator[Any]) -> Any:
    """A copy of a call with other values in the order of `_names`."""
    copy = object.__new__(type(call))
    for x in fields(call):
        value = getattr(call, x.name)
        setattr(copy, x.name, _remade(value, values) if isinstance(value, _NESTED) else next(values))
    return copy


def _recorded(values: tuple[Any, ...], run: Callable[..., _Result], name: tuple[object, ...]) -> _Result:
    """The result of a call whose plan is kept by this name. Each tensor is an object of its own in it, because k may be
    v here and another tensor in the next call."""
    tensors: list[torch.Tensor] = []
    callers: dict[int, Any] = {}

    def own(x: Any) -> Any:
        if type(x) not in _TENSORS:
            return x
        tensors.append(x.detach())
        callers[id(tensors[-1])] = x
        return tensors[-1]

    others = [own(x) for x in values]
    others = [tuple(map(own, x)) if type(x) is tuple else x for x in others]
    tape = recording.tape = _Tape(tensors)
    try:
        with tape:
            result: Any = run(others)
    finally:
        recording.tape = None
    kept = device.plans()
    if name in kept:  # else the kernels changed meanwhile
        kept[name] = tape.plan(result) or _NEVER
    if isinstance(result, tuple):  # which may have the caller's `out`
        result = getattr(type(result), "_make", tuple)([callers.get(id(x), x) for x in result])
    returned: _Result = callers.get(id(result), result)
    return returned
