"""A door is a claim: whatever option its row names must change what the door computes, or what it launches.

Made from the fields of the options and from the doors. A new option gets a value from its metadata, so it is visited
without a list.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from flash_attn.attention import second_derivative
from flash_attn.attention.backends import asm, recording, triton
from flash_attn.attention.backends import torch as on_cpu
from flash_attn.attention.backends.asm import attention as asm_attention
from flash_attn.attention.backends.asm import gradients as asm_gradients
from flash_attn.attention.backends.split_kv import cache_call_of
from flash_attn.attention.backends.triton import cache as triton_cache
from flash_attn.attention.backends.triton.decode import attend_split
from flash_attn.attention.operators import dispatch
from flash_attn.attention.operators.backward import backward_by_op
from flash_attn.call import options
from flash_attn.call.block_mask import BlockMask
from flash_attn.call.calls import AttentionCall, CacheCall, GradientCall, Options, replace
from flash_attn.call.mask import Mask
from flash_attn.core import ck_planner, device
from flash_attn.core.jit import Interpreter
from flash_attn.kernels.modifiers import DOORS

BATCH, HEADS, SEQLEN_Q, SEQLEN_K, HEAD_DIM = 1, 2, 12, 20, 16
_SIZES = {"batch": BATCH, "heads": HEADS}


@options.known
@dataclass(slots=True, eq=False)
class Wider(Options):
    """Tomorrow's options."""

    key_bonus: torch.Tensor | None = field(default=None, metadata={"schema": "Tensor?", "axes": "batch seqlen_k"})
    head_bonus: torch.Tensor | None = field(default=None, metadata={"schema": "Tensor?", "axes": "heads"})
    factor: float = field(default=0.0, metadata={"schema": "float"})


def _value(option: Any, call: AttentionCall) -> Any:
    """A value of an option that must change a result, from its metadata and its default."""
    torch.manual_seed(5)
    seqlen_k = call.k.shape[1]
    if option.name == "mask":
        seen = torch.tensor([[True, False], [True, True]]).expand(1, 1, 2, 2)
        return Mask(BlockMask(seen, (64, 64))) if seqlen_k > 64 else Mask(ranges=_ranges(call))
    schema, axes = option.metadata["schema"], option.metadata.get("axes", "")
    if schema == "Tensor?":
        if axes == "scores":
            return torch.randn(1, 1, call.q.shape[1], seqlen_k)
        sizes = {**_SIZES, "seqlen_q": call.q.shape[1], "seqlen_k": seqlen_k}
        return torch.rand([sizes[axis] for axis in axes.split()]) + 0.5
    values = {"float?": 0.7, "float": 0.5, "bool": True, "SymInt[2]": (3, 2), "SymInt": 4}
    return values[schema]


def _ranges(call: AttentionCall) -> torch.Tensor:
    ranges = torch.zeros(1, 1, call.q.shape[1], 2, 2, dtype=torch.int32)
    ranges[..., 0, 1] = SEQLEN_K - 2
    return ranges


def _call(dtype: torch.dtype = torch.float16, **given: Any) -> AttentionCall:
    torch.manual_seed(0)
    q = torch.randn(BATCH, SEQLEN_Q, HEADS, HEAD_DIM).to(dtype)
    k, v = (torch.randn(BATCH, SEQLEN_K, HEADS, HEAD_DIM).to(dtype) for _ in range(2))
    return AttentionCall(q, k, v, Wider(0.25, **given))


def _gradients(call: AttentionCall) -> GradientCall:
    torch.manual_seed(1)
    result = on_cpu.forward(replace(call, options=Options(0.25), out=None))  # what comes out depends on no option
    dout = torch.randn_like(call.q)
    new = [torch.zeros_like(x) for x in (call.q, call.k, call.v)]
    return GradientCall(call, dout, result.out, result.softmax_lse, *new, None)


def _derivatives(call: AttentionCall, backward: Callable[[GradientCall], Any]) -> list[torch.Tensor]:
    if call.is_inference:  # autograd refuses it
        return []
    gradients = _gradients(call)
    backward(gradients)
    return [gradients.dq, gradients.dk, gradients.dv]


def _cached(call: AttentionCall | CacheCall) -> CacheCall:
    if isinstance(call, CacheCall):
        return call
    return CacheCall(call.q, call.k, call.v, call.options, cache_seqlens=SEQLEN_K)


def _results(result: Any) -> list[torch.Tensor]:
    """The tensors of a forward's result that do not depend on what memory held before."""
    return [x for x in tuple(result)[:2] if isinstance(x, torch.Tensor)]


@contextmanager
def _interpreter(target: str = "gfx950") -> Iterator[None]:
    with device.using(Interpreter(target)):
        yield


def _by_kernels(run: Callable[[AttentionCall], Any], target: str = "gfx950") -> Callable[[AttentionCall], Any]:
    def evidence(call: AttentionCall) -> Any:
        with _interpreter(target):
            return run(call)

    return evidence


def _launched(run: Callable[[AttentionCall], Any]) -> Callable[[AttentionCall], Any]:
    """What AMD's kernels are launched with, or their planner is asked for. Of an address counts that there is one."""

    def evidence(call: AttentionCall) -> Any:
        asked: list[tuple[str, bytes]] = []

        def plan(what: str, packed: bytes) -> list[Any]:
            asked.append((what, packed))
            return []

        patches = mock.patch.multiple(ck_planner, plan=plan, backward_workspace=lambda _packed: 4096)
        with recording.record("gfx942") as launches, patches:
            refused = run(call)
        contents = [*asked, *((launch.kernel, launch.argument) for launch in launches)]
        return [(name, _without_addresses(content)) for name, content in contents], isinstance(refused, str)

    return evidence


def _without_addresses(content: bytes) -> list[int]:
    """The words of eight bytes, 1 for each that can be an address of this process."""
    words = struct.unpack(f"<{len(content) // 8}Q", content[: len(content) // 8 * 8])
    return [1 if 1 << 45 <= word < 1 << 48 else word for word in words]


def _asm_forward(call: AttentionCall) -> Any:
    described = asm_attention.describe(call)
    reason = asm.unsupported_reason(call, described, "fwd")
    return reason if reason is not None else asm_attention.forward(call, described)  # type: ignore[arg-type]


def _asm_backward(call: AttentionCall) -> Any:
    described = asm_attention.describe(call)
    reason = asm.unsupported_reason(call, described, "bwd")
    return reason if reason is not None else asm_gradients.backward(_gradients(call), described)  # type: ignore[arg-type]


def _of_ck(run: Callable[[Any, AttentionCall], Any]) -> Callable[[AttentionCall], Any]:
    return _launched(lambda call: run(recording.backends.select(call.q), call))


# The name of a door in `modifiers.DOORS` -> the option that a call needs to come to it, and what shows its work.
PROOFS: dict[str, tuple[str, Callable[[AttentionCall], Any]]] = {
    "triton": ("", _by_kernels(lambda call: [*_results(triton.forward(call)), *_derivatives(call, triton.backward)])),
    "triton-bias": ("attn_bias", _by_kernels(lambda call: _results(triton.forward(call)))),
    "triton-mask": ("mask", _by_kernels(lambda call: _results(triton.forward(call)))),
    "probabilities": (
        "dropout_p", _by_kernels(lambda call: [triton.forward(replace(call, return_softmax=True)).probabilities])
    ),
    "torch": ("", lambda call: [*_results(on_cpu.forward(call)), *_derivatives(call, on_cpu.backward)]),
    "ck-fwd": ("", _of_ck(lambda backend, call: backend.forward(call))),
    "ck-bwd": ("", _of_ck(lambda backend, call: backend.backward(_gradients(call)))),
    "ck-cache": ("", _of_ck(lambda backend, call: backend.kvcache(_cached(call)))),
    "asm-fwd": ("", _launched(_asm_forward)),
    "asm-bwd": ("", _launched(_asm_backward)),
    "split-kv": ("", _by_kernels(lambda call: attend_split(cache_call_of(call)))),
    "cache": ("", _by_kernels(lambda call: triton.kvcache(_cached(call)))),
    "cache-whole": ("", _by_kernels(lambda call: triton_cache._attend_whole(_cached(call)))),
    # A scale below 0 takes the kernel `any`, as an option does that no kernel of FP8 has.
    "fp8": ("", _by_kernels(lambda call: _results(
        triton.fp8_forward(replace(call, descales=(None,) * 3, softmax_scale=-call.options.scale))
    ))),
    "int8": ("", _by_kernels(lambda call: triton.int8_forward(call, None), "gfx1100")),
    "second-derivative": ("", lambda call: second_derivative.transformed(call)),
    "upstream-fwd": ("", lambda call: _results(dispatch._forward_by_op(call))),
    "upstream-bwd": ("", lambda call: _derivatives(call, backward_by_op)),
}  # fmt: skip
# They choose by speed alone: whom they choose has a door of its own.
OF_SPEED = {"measured-fwd": ("asm-fwd", "ck-fwd"), "measured-bwd": ("asm-bwd", "ck-bwd")}
# softmax_lse, which a backward gets, holds the sinks, so a backward needs nothing of them.
HELD_BY_LSE = {("ck-bwd", "s_aux"), ("asm-bwd", "s_aux"), ("upstream-bwd", "s_aux")}


def _base(name: str) -> AttentionCall:
    needed, _ = PROOFS[name]
    dtype = torch.float16
    if name.startswith("asm"):
        torch.manual_seed(0)
        tensors = [torch.randn(1, 256, HEADS, 128, dtype=torch.bfloat16) for _ in range(3)]
        call = AttentionCall(*tensors, Wider(0.25))
    else:
        call = _call(dtype if name != "int8" else torch.float16)
        if name == "int8" or name.startswith("ck"):
            call = replace(call, **{x: torch.randn(BATCH, 20, HEADS, 64, dtype=dtype) for x in ("q", "k", "v")})
    if needed:
        (option,) = (x for x in fields(Wider) if x.name == needed)
        call = replace(call, **{needed: _value(option, call)})
        if needed == "dropout_p":
            call = replace(call, rng_state=torch.tensor([3, 4]))
    return call


def _options_of(name: str) -> list[Any]:
    """The options that a row names, but for the one with which a call comes to the door."""
    serves = DOORS[name].serves
    return [x for x in fields(Wider) if x.name in serves and x.name != PROOFS[name][0]]


def unproved(name: str, option: Any) -> str | None:
    """What speaks against a door's claim to honour an option; None for a claim that holds."""
    _, work = PROOFS[name]
    call = _base(name)
    changed = replace(call, **{option.name: _value(option, call)})
    if option.name == "dropout_p":
        changed = replace(changed, rng_state=torch.tensor([3, 4]))
    before = _before(name)
    try:
        after = work(changed)
    except NotImplementedError as error:
        return None if option.name in str(error) else f"{name} refuses {option.name} by another name: {error}"
    return f"{name} ignores {option.name}" if _same(before, after) else None


@cache
def _before(name: str) -> Any:
    """What shows a door's work for a call without further options."""
    return PROOFS[name][1](_base(name))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(x, y) for x, y in zip(one, other, strict=True))
    return bool(one == other)


CLAIMS = [(name, option) for name in PROOFS for option in _options_of(name) if (name, option.name) not in HELD_BY_LSE]


@pytest.mark.parametrize(("name", "option"), CLAIMS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_door_honours_the_options_that_it_names(name: str, option: Any) -> None:
    assert unproved(name, option) is None


def test_every_door_has_a_proof() -> None:
    assert {*PROOFS, *OF_SPEED} == set(DOORS)
    for name, option in HELD_BY_LSE:
        assert option in DOORS[name].serves, "the claim is gone: remove the exception"


def test_doors_of_speed_send_no_call_to_those_who_refuse_it() -> None:
    of_options = {x.name for x in fields(Options)}
    for name, others in OF_SPEED.items():
        for other in others:
            assert not (DOORS[name].serves & of_options) - DOORS[other].serves, f"{name} sends them to {other}"


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *((name, "head_bonus") for name in PROOFS),
        # PyTorch's operations refuse a tensor of unknown axes by its name.
        *((name, "key_bonus") for name in PROOFS if name not in ("torch", "second-derivative")),
        ("triton", "factor"),
        *(("triton-bias", option) for option in ("alibi_slopes", "dropout_p")),
        ("triton-mask", "attention_chunk"),
        *(("int8", option) for option in ("softcap", "s_aux", "alibi_slopes")),
        *(("fp8", option) for option in ("s_aux", "attn_bias", "attention_chunk")),
        *(("ck-fwd", option) for option in ("s_aux", "attn_bias", "attention_chunk")),
        *(("asm-fwd", option) for option in ("softcap", "alibi_slopes", "s_aux", "attn_bias")),
        *(("upstream-fwd", option) for option in ("s_aux", "attn_bias")),
        *(("cache", "attn_bias"), ("split-kv", "attn_bias"), ("cache-whole", "attention_chunk")),
    ],
)
def test_a_false_promise_is_seen(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that a row names without code for it."""
    with _promised(name, option, monkeypatch):
        (result,) = (x for x in fields(Wider) if x.name == option)
        assert unproved(name, result) is not None


@contextmanager
def _promised(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adds an option to a row of the doors, and to the general row of the same kernels, behind which it is."""
    behind = {"triton-bias": ("triton",), "triton-mask": ("triton",), "probabilities": ("triton",)}.get(name, ())
    behind = {"cache-whole": ("triton",), "split-kv": ("cache",)}.get(name, behind)
    for row in (name, *behind):
        for door in options._doors:
            if door.who == DOORS[row].who and door.serves == DOORS[row].serves:
                monkeypatch.setattr(door, "serves", door.serves | {option})
                for kind in options.FIELDS:
                    door.meet(kind)
    try:
        yield
    finally:
        monkeypatch.undo()
        for door in options._doors:
            for kind in options.FIELDS:
                door.meet(kind)
