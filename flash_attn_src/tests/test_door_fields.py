"""The doors' claims about a call's own fields: lengths, pages, caches and where a result goes.

As in test_doors.py: a field that a door's row names must change what the door computes or launches, or be refused by
its name. Made from the fields of the two kinds of call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import test_doors
import torch
from flash_attn.call.calls import AttentionCall, CacheCall, replace
from flash_attn.kernels.modifiers import DOORS
from test_doors import HEADS, PROOFS, SEQLEN_Q

Call = Any  # AttentionCall or CacheCall
PAGE = 128  # rows of a page that every source of kernels takes
OVER_CACHE = {"cache", "cache-whole", "ck-cache"}
LAUNCHED = {"ck-fwd", "ck-bwd", "ck-cache", "asm-fwd", "asm-bwd"}  # their proof is what is launched, without addresses


def _ints(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _rows(call: Call, *shape: int) -> torch.Tensor:
    torch.manual_seed(9)
    return torch.randn(*shape, HEADS, call.q.shape[-1]).to(call.q.dtype)


def _packed(call: AttentionCall) -> AttentionCall:
    """One sequence, packed."""
    q, k, v = call.q.flatten(0, 1), call.k.flatten(0, 1), call.v.flatten(0, 1)
    rows, keys = q.shape[0], k.shape[0]
    return replace(
        call, q=q, k=k, v=v, cu_seqlens_q=_ints(0, rows), cu_seqlens_k=_ints(0, keys), max_seqlen_q=rows,
        max_seqlen_k=keys,
    )  # fmt: skip


def _split(call: AttentionCall, first_q: int, first_k: int) -> AttentionCall:
    """Two sequences, of which the first one has so many rows and keys."""
    packed = _packed(call)
    return replace(
        packed, cu_seqlens_q=_ints(0, first_q, packed.q.shape[0]), cu_seqlens_k=_ints(0, first_k, packed.k.shape[0])
    )


def _paged(call: AttentionCall, *table: int) -> AttentionCall:
    pages = {name: _rows(call, 2, PAGE) for name in "kv"}
    return replace(_packed(call), **pages, block_table=_ints([*table]), cu_seqlens_k=_ints(0, 20), max_seqlen_k=20)


def _begun(call: CacheCall) -> CacheCall:
    """The same cache, filled in part."""
    return replace(call, cache_seqlens=_ints(9))


def _appended(call: CacheCall, **more: Any) -> CacheCall:
    new = {"k": _rows(call, 1, 4), "v": _rows(call, 1, 4) + 1, "cache_seqlens": _ints(9)}
    return replace(call, k_cache=call.k_cache.clone(), v_cache=call.v_cache.clone(), **{**new, **more})


def _turned(call: CacheCall, factor: float = 1.0, **more: Any) -> CacheCall:
    angles = torch.linspace(0.3, 2.0, 32 * 8).view(32, 8)
    names = {"rotary_cos": (factor * angles).cos(), "rotary_sin": angles.sin()}
    return _appended(call, **{name: x.to(call.q.dtype) for name, x in names.items()}, **more)


def _two(call: CacheCall, **more: Any) -> CacheCall:
    """A cache of two sequences."""
    return replace(call, **{name: _rows(call, 2, call.k_cache.shape[1]) for name in ("k_cache", "v_cache")}, **more)


def _packed_cache(call: CacheCall, *ends: int, **more: Any) -> CacheCall:
    two = _two(
        call, q=_rows(call, SEQLEN_Q), cu_seqlens_q=_ints(*ends), max_seqlen_q=SEQLEN_Q, cache_seqlens=_ints(9, 9)
    )
    return replace(two, **more)


def _new_keys(call: CacheCall, *ends: int) -> CacheCall:
    new = {"k": _rows(call, 8), "v": _rows(call, 8) + 1, "cu_seqlens_k_new": _ints(*ends)}
    return _packed_cache(call, 0, 5, SEQLEN_Q, **new)


# Field -> calls, each with another value. A proof by results compares the last two, a proof by launches the first and
# the last one, as it does not see what a tensor holds.
CHANGES: dict[str, Callable[[Call], list[Call]]] = {
    "cu_seqlens_q": lambda call: [call, _split(call, 5, 8), _split(call, 7, 8)],
    "cu_seqlens_k": lambda call: [call, _split(call, 5, 8), _split(call, 5, 11)],
    "seqused_k": lambda call: [_packed(call), replace(_packed(call), seqused_k=_ints(9))],
    "leftpad_k": lambda call: [_packed(call), replace(_packed(call), leftpad_k=_ints(3))],
    "block_table": lambda call: [_packed(call), _paged(call, 0), _paged(call, 1)],
}
CACHE_CHANGES: dict[str, Callable[[Call], list[Call]]] = {
    "cache_seqlens": lambda call: [call, replace(call, cache_seqlens=9), replace(call, cache_seqlens=_ints(13))],
    "cache_batch_idx": lambda call: [_two(call), *(_two(call, cache_batch_idx=_ints(row)) for row in (0, 1))],
    "cache_leftpad": lambda call: [call, replace(call, cache_leftpad=_ints(3))],
    "block_table": lambda call: [
        call,
        *(
            replace(call, k_cache=_rows(call, 2, PAGE), v_cache=_rows(call, 2, PAGE), block_table=_ints([page]))
            for page in (0, 1)
        ),
    ],
    "k": lambda call: [_begun(call), _appended(call, k=_rows(call, 1, 4) + 2), _appended(call)],
    "v": lambda call: [_begun(call), _appended(call, v=_rows(call, 1, 4) + 2), _appended(call)],
    "rotary_cos": lambda call: [_appended(call), _turned(call, 0.5), _turned(call)],
    "rotary_sin": lambda call: [_appended(call), _turned(call)],
    "rotary_interleaved": lambda call: [_turned(call), _turned(call, rotary_interleaved=False)],
    "rotary_seqlens": lambda call: [_turned(call), _turned(call, rotary_seqlens=_ints(2))],
    "cu_seqlens_q": lambda call: [_packed_cache(call, 0, 5, SEQLEN_Q), _packed_cache(call, 0, 7, SEQLEN_Q)],
    "cu_seqlens_k_new": lambda call: [_new_keys(call, 0, 3, 8), _new_keys(call, 0, 5, 8)],
    "qv": lambda call: [call, replace(call, qv=_rows(call, 1, call.q.shape[1]))],
    "descales": lambda call: [
        replace(
            call, k_cache=call.k_cache.to(torch.float8_e4m3fn), v_cache=call.v_cache.to(torch.float8_e4m3fn),
            descales=tuple(torch.full((1, HEADS), number) for number in (1.0, factor, 1.0)),
        )
        for factor in (1.0, 0.5)
    ],
}  # fmt: skip
# Fields without a proof of this form, with the reason.
ELSEWHERE = {
    "q": "not an option", "k_cache": "not an option", "v_cache": "not an option", "options": "test_doors.py",
    "out": "the test of results below", "return_softmax": "the row probabilities, test_dmask.py",
    "deterministic": "all kernels but ck's are; test_ck.py", "max_seqlen_q": "a bound of the grid",
    "max_seqlen_k": "a bound, speed alone", "num_splits": "speed alone", "sm_margin": "speed alone",
}  # fmt: skip


# Claims that the proof of this door cannot show, with the reason.
APART = {
    **{("cache-whole", name): "another kernel appends, which `cache` proves" for name in (
        "k", "v", "rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_seqlens",
    )},
    ("ck-cache", "cache_seqlens"): "the content of a tensor, whose address a launch has",
    ("fp8", "descales"): "a call comes to the door by them",
}  # fmt: skip


def _claims() -> list[tuple[str, str]]:
    claims = []
    for name in PROOFS:
        kind = CacheCall if name in OVER_CACHE else AttentionCall
        own = [x.name for x in fields(kind) if x.name in DOORS[name].serves and x.name not in ELSEWHERE]
        claims += [(name, x) for x in own if (name, x) not in APART]
    return claims


def _base(name: str) -> Call:
    call = test_doors._base(name)
    if name not in OVER_CACHE:
        return call
    return CacheCall(call.q, call.k, call.v, call.options, cache_seqlens=call.k.shape[1])


@pytest.mark.parametrize(("name", "changed"), _claims())
def test_a_door_honours_the_fields_that_it_names(name: str, changed: str) -> None:
    calls = (CACHE_CHANGES if name in OVER_CACHE else CHANGES)[changed](_base(name))
    one, other = calls[0] if name in LAUNCHED else calls[-2], calls[-1]
    work = PROOFS[name][1]
    try:
        before, after = work(one), work(other)
    except NotImplementedError as error:
        assert changed in str(error)  # noqa: PT017
    else:
        assert not test_doors._same(before, after), f"{name} ignores {changed}"


@pytest.mark.parametrize("name", ["triton", "torch", "cache", "cache-whole", "split-kv", "int8"])
def test_a_result_goes_where_the_call_says(name: str) -> None:
    call = _base(name)
    out = torch.full_like(call.q, torch.nan)
    PROOFS[name][1](replace(call, out=out))
    assert not out.isnan().any()
