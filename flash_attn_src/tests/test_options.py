"""A made-up option: every door refuses it by name, and whatever derives from the fields of a call has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any
from unittest import mock

import pytest
import torch
from flash_attn.attention import second_derivative
from flash_attn.attention.backends import asm, recording, sources, split_kv, triton
from flash_attn.attention.backends import torch as on_cpu
from flash_attn.attention.backends.ck import attention as ck_attention
from flash_attn.attention.backends.ck import cache as ck_cache
from flash_attn.attention.backends.triton import cache as triton_cache
from flash_attn.attention.backends.triton import inputs
from flash_attn.attention.operators import dispatch, extended_backward
from flash_attn.attention.operators import fp8 as fp8_ops
from flash_attn.attention.operators import kvcache as cache_ops
from flash_attn.call import arguments, options, plans
from flash_attn.call.calls import (
    AttentionCall,
    CacheCall,
    GradientCall,
    Options,
    attention_call,
    kept,
    replace,
    restore,
)
from flash_attn.call.mask import Mask, parts_of
from flash_attn.kernels.providers import DEFAULT
from flash_attn.sdpa import aten


@options.known
@dataclass(slots=True, eq=False)
class Wider(Options):
    """Tomorrow's options: a number for each head, and a number."""

    made_up: torch.Tensor | None = field(default=None, metadata={"schema": "Tensor?", "axes": "batch heads"})
    of_heads: torch.Tensor | None = field(default=None, metadata={"schema": "Tensor?", "axes": "heads"})
    factor: float = field(default=0.0, metadata={"schema": "float"})


MADE_UP: list[dict[str, Any]] = [{"made_up": torch.ones(2)}, {"factor": 0.5}]


def _call(**given: Any) -> AttentionCall:
    q, k, v = (torch.randn(1, 8, 2, 16, dtype=torch.float16) for _ in range(3))
    return AttentionCall(q, k, v, Wider(0.25, **given))


def _gradients(call: AttentionCall) -> GradientCall:
    lse = torch.zeros(1, 2, 8)
    new = [torch.empty_like(x) for x in (call.q, call.k, call.v)]
    return GradientCall(call, call.q, call.q, lse, *new)


def _over_cache(call: AttentionCall, **given: Any) -> CacheCall:
    return CacheCall(call.q, call.k, call.v, call.options, cache_seqlens=8, **given)


def _in_fp8(call: AttentionCall) -> AttentionCall:
    return replace(call, descales=(None, None, None))


SLOPES, BIAS = torch.ones(2), torch.zeros(1, 1, 8, 8, dtype=torch.float16)

# Who serves calls -> a call that reaches it.
DOORS: dict[str, Callable[[AttentionCall], Any]] = {
    "torch forward": lambda call: on_cpu.forward(call),
    "torch backward": lambda call: on_cpu.backward(_gradients(call)),
    "torch, cache": lambda call: on_cpu.kvcache(_over_cache(call)),
    "torch, FP8": lambda call: on_cpu.fp8_forward(_in_fp8(call)),
    "torch, INT8": lambda call: on_cpu.int8_forward(call, None),
    "triton forward": lambda call: triton.forward(call),
    "triton forward, bias": lambda call: triton.forward(replace(call, attn_bias=BIAS)),
    "triton backward": lambda call: triton.backward(_gradients(call)),
    "triton, cache": lambda call: triton.kvcache(_over_cache(call)),
    "triton, latent": lambda call: triton.kvcache(_over_cache(call, qv=call.q)),
    "triton, FP8": lambda call: triton.fp8_forward(_in_fp8(call)),
    "triton, INT8": lambda call: triton.int8_forward(call, None),
    "compile, forward": lambda call: dispatch._forward_by_op(call),
    "compile, backward": lambda call: extended_backward.backward_by_op(_gradients(call)),
    "compile, FP8": lambda call: _traced(lambda: fp8_ops.forward(_in_fp8(call))),
    "compile, cache": lambda call: _traced(lambda: cache_ops.attend(_over_cache(call))),
    "vmap": lambda call: _vmapped(call),
    "SDPA's operators, pages": lambda call: aten._attend(
        replace(call, block_table=torch.zeros(1, 1, dtype=torch.int32)), None, None
    ),
}


def _traced(run: Callable[[], Any]) -> Any:
    """Runs a call as under a compiler, which goes through a custom operator."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return run()


def _vmapped(call: AttentionCall) -> Any:
    def one(q: torch.Tensor) -> torch.Tensor:
        return second_derivative.transformed(replace(call, q=q[None]))[0]

    return torch.vmap(one)(call.q)


@pytest.mark.parametrize("given", MADE_UP, ids=lambda given: next(iter(given)))
@pytest.mark.parametrize("door", DOORS)
def test_a_door_refuses_by_name(door: str, given: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(given))):
        DOORS[door](_call(**given))


@pytest.mark.parametrize("given", MADE_UP, ids=lambda given: next(iter(given)))
def test_a_door_that_lets_another_one_serve(given: dict[str, Any]) -> None:
    """Those who give a reason instead: a call goes to the next source, which refuses it in the end."""
    name, call = next(iter(given)), _call(**given)
    with recording.record("gfx942"):
        for op in ("fwd", "bwd"):
            reason = asm.unsupported_reason(call, asm.describe(call), op)
            assert reason is not None
            assert reason.startswith(name)
            assert sources._row(call, asm.describe(call), op) is DEFAULT
    for reason in (ck_attention._unsupported_reason(call), ck_cache.unsupported_reason(_over_cache(call))):
        assert reason is not None
        assert reason.startswith(name)
    with recording.record("gfx942", alone=True), pytest.raises(NotImplementedError, match=name):
        recording.backends.select(call.q).backward(_gradients(call))
    assert split_kv.as_cache_call(1, call) is None
    assert not triton_cache._keeps_whole(_over_cache(call))
    assert second_derivative.refused(call) == f"attention with {name}"


def test_a_known_option_is_refused_where_no_row_names_it() -> None:
    call = _call(attn_bias=BIAS, alibi_slopes=SLOPES)
    assert options.WITH_BIAS.unserved(call) == "alibi_slopes"
    assert options.TRITON.unserved(call) is None
    assert options.CK_FORWARD.unserved(replace(call, attn_bias=None)) is None
    assert options.ASM_BACKWARD.unserved(_call(s_aux=torch.ones(2))) is None
    assert options.ASM_FORWARD.unserved(_call(s_aux=torch.ones(2))) == "s_aux"
    assert options.ASM_BACKWARD.unserved(replace(_call(), deterministic=True)) == "deterministic"


def _key(call: AttentionCall | CacheCall) -> tuple[object, ...]:
    """The key of the plan of a call."""
    kept: dict[tuple[object, ...], Any] = {}
    with mock.patch.object(plans, "planned", lambda who, values, _run: plans.key(kept, who, values)):
        key: Any = plans.planned_call(id, call)
    return key[0]  # type: ignore[no-any-return]


def test_plans_tell_two_values_apart() -> None:
    """Otherwise the second call would run the launch of the first one."""
    one, other = _call(factor=0.5), _call(factor=0.25)
    other.q, other.k, other.v = one.q, one.k, one.v
    assert _key(one) != _key(other)
    assert _key(_over_cache(one)) != _key(_over_cache(other))
    assert _key(_call(made_up=torch.ones(2))) != _key(_call(made_up=torch.ones(3)))


def test_every_number_of_a_call_is_in_the_key_of_its_plan() -> None:
    call = attention_call(*(torch.zeros(1, 4, 1, 16) for _ in range(3)), softmax_scale=1.0)
    changes = {
        "softmax_scale": 2.0, "causal": True, "window_size": (3, -1), "softcap": 1.5, "attention_chunk": 4,
    }  # fmt: skip
    numbers = {name for name in options.FIELDS[Options].plain if name not in ("dropout_p", "mask")}
    assert numbers == changes.keys()  # a new one belongs here
    keys = {_key(replace(call, **{name: value})) for name, value in changes.items()}
    assert len(keys | {_key(call)}) == 1 + len(changes)


def test_a_backward_gets_every_option() -> None:
    call = _call(made_up=torch.ones(2), factor=0.5)
    again = restore(call.q, call.k, call.v, *kept(call))
    assert all(getattr(again.options, x.name) is getattr(call.options, x.name) for x in fields(Wider))


def test_an_operator_has_every_option() -> None:
    for op in ("_extended_forward", "_extended_backward", "_fp8_forward", "_flash_attn_with_kvcache"):
        names = {argument.name for argument in getattr(torch.ops.flash_attn, op).default._schema.arguments}
        assert {x.name for x in fields(Options)} - names == {"mask"}, op


def test_values_in_the_order_of_a_schema_become_the_options_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of an option that is added last. The parts of a mask come after all of them."""
    arguments = tuple(x.name for x in fields(Wider) if x.metadata.get("schema"))
    assert arguments[-3:] == ("made_up", "of_heads", "factor")
    monkeypatch.setattr(options, "ARGUMENTS", arguments)
    monkeypatch.setattr(options, "Options", Wider)
    made_up = torch.ones(2)
    values = dict.fromkeys(arguments) | {"window_size": [3, 4], "made_up": made_up, "factor": 0.5, "softcap": 2.0}
    bits = torch.ones((1, 1, 2, 1), dtype=torch.int32)
    again = options.from_arguments((*values.values(), *parts_of(Mask(bits=bits)), (64, 64)))
    assert again.mask is not None
    assert again.mask.parts == {"bits": bits}
    assert options.from_arguments((*values.values(), *parts_of(None), (64, 64))).mask is None
    assert again.made_up is made_up  # type: ignore[attr-defined]
    assert (again.factor, again.softcap, again.window_size) == (0.5, 2.0, (3, 4))  # type: ignore[attr-defined]
    assert [x.name for x in fields(Wider) if x.kw_only] == ["mask"]
    by_position = Wider(*arguments)
    assert all(getattr(by_position, name) == name for name in arguments)


def test_replace_changes_options_too_and_knows_every_name() -> None:
    call = _call()
    changed = replace(call, softcap=2.0, deterministic=True)
    assert (changed.options.softcap, changed.deterministic, call.options.softcap) == (2.0, True, 0.0)
    with pytest.raises(TypeError, match="sofcap"):
        replace(call, sofcap=2.0)


def test_a_tensor_for_each_head_is_checked_by_its_axes() -> None:
    for wrong, error in ((torch.ones(3), ValueError), (torch.ones(2).half(), TypeError)):
        for call in (_call(made_up=wrong), _call(of_heads=wrong)):
            with pytest.raises(error, match=r"made_up|of_heads"):
                arguments.check_dense(call)


def test_the_fast_checks_take_options_that_are_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagnosis takes the host 20 us, which every call with ALiBi, sinks or a bias paid."""
    monkeypatch.setattr("flash_attn.call.arguments.attention.diagnose_tensors", None)
    monkeypatch.setattr("flash_attn.call.arguments.kvcache.diagnose_tensors", None)
    sinks = torch.zeros(2, requires_grad=True)
    for given in ({"alibi_slopes": SLOPES}, {"s_aux": sinks}, {"attn_bias": BIAS}):
        arguments.check_dense(_call(**given))
    arguments.check_kvcache(_over_cache(_call(alibi_slopes=SLOPES, s_aux=sinks.detach())), True)
    with pytest.raises(TypeError, match="NoneType"):  # a call over a cache gives no gradient: diagnosed
        arguments.check_kvcache(_over_cache(_call(s_aux=sinks)), True)


@pytest.mark.parametrize("slopes", [torch.tensor([0.5, 0.25]).half(), torch.tensor([0.5, 9.0, 0.25, 9.0])[::2]])
def test_the_slot_of_a_number_for_each_head_holds_dense_fp32(slopes: torch.Tensor) -> None:
    """Kernels read fp32 there. A modifier whose option allows more types must not make them read beyond its memory."""
    numbers, stride = inputs.head_numbers_of(_call(alibi_slopes=slopes))
    assert numbers is not None
    assert (numbers.dtype, numbers.stride(), stride) == (torch.float32, (1,), 0)
    assert numbers.tolist() == [0.5, 0.25]
