"""The public functions and the custom ops have upstream's parameters in upstream's order.

Additional parameters are keyword-only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import flash_attn
import pytest
import torch
from flash_attn import flash_attn_interface as interface

torch.set_num_threads(2)

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
# What upstream does not have, by keyword alone. The functions of dense tensors have both.
OWN = ("s_aux", "attn_bias")
OWN_OF_CACHE = ("s_aux", "k_descale", "v_descale")


def _own(name: str) -> tuple[str, ...]:
    if "kvcache" in name:
        return OWN_OF_CACHE
    return OWN[:1] if "varlen" in name else OWN


LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
}
_WINDOW = "causal, window_size_left, window_size_right, softcap, alibi_slopes"
_GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
OP_SIGNATURES = {
    "_flash_attn_forward": f"q, k, v, dropout_p, softmax_scale, {_WINDOW}, return_softmax",
    "_flash_attn_varlen_forward": (
        f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
        "seqused_k=None, zero_tensors=False"
    ),
    "_flash_attn_backward": (f"{_GRADIENTS}, dropout_p, softmax_scale, {_WINDOW}, deterministic, rng_state=None"),
    "_flash_attn_varlen_backward": (
        f"{_GRADIENTS}, {LENGTHS}, dropout_p, softmax_scale, {_WINDOW}, deterministic, rng_state=None, "
        "zero_tensors=False"
    ),
}


def _signature(function: Callable[..., Any]) -> str:
    parts = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            assert name in (*OWN, *OWN_OF_CACHE)
            assert parameter.default is None
            continue
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        parts.append(name if parameter.default is parameter.empty else f"{name}={parameter.default!r}")
    return ", ".join(parts)


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_signatures(name: str) -> None:
    function = getattr(flash_attn, name)
    assert _signature(function) == SIGNATURES[name]
    kinds = {parameter.name: parameter.kind for parameter in inspect.signature(function).parameters.values()}
    assert tuple(key for key, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY) == _own(name)
    assert name in flash_attn.__all__
    assert getattr(interface, name) is getattr(flash_attn, name)


@pytest.mark.parametrize("name", OP_SIGNATURES)
def test_op_signatures(name: str) -> None:
    op = getattr(interface, name)
    assert _signature(op._init_fn) == OP_SIGNATURES[name]
    packet = getattr(torch.ops.flash_attn, name)
    assert getattr(interface, "_wrapped" + name) is packet
    schema = packet.default._schema
    assert [argument.name for argument in schema.arguments] == [
        part.split("=")[0] for part in OP_SIGNATURES[name].split(", ")
    ]
    written = [argument.name for argument in schema.arguments if argument.alias_info is not None]
    assert written == (["dq", "dk", "dv"] if "backward" in name else [])


def test_autograd_functions_take_upstream_order() -> None:
    for name, function in SIGNATURES.items():
        if name == "flash_attn_with_kvcache":
            continue
        words = name.removeprefix("flash_attn_").removesuffix("func").strip("_").split("_")
        spelled = {"qkvpacked": "QKVPacked", "kvpacked": "KVPacked", "varlen": "Varlen", "": ""}
        cls = getattr(interface, f"FlashAttn{''.join(spelled[word] for word in words)}Func")
        expected = [part.split("=")[0] for part in function.replace("(-1, -1)", "w").split(", ")]
        expected[expected.index("return_attn_probs")] = "return_softmax"
        assert (*expected, "is_grad_enabled") == cls.PARAMETERS
        for count in (2, len(cls.PARAMETERS) - 2):
            with pytest.raises(TypeError, match=f"apply: got {count} arguments, wanted q"):
                cls.apply(*range(count))


OPTIONS = (0.0, 0.3, True, (-1, -1), 0.0, None, False, False)


def _packed() -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """q, k, v of two sequences, and their lengths, which differ for queries and keys."""
    torch.manual_seed(0)
    ends_q, ends_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 2, 5], [0, 4, 11]))
    return tuple(torch.randn(rows, 2, 8) for rows in (5, 11, 11)), (ends_q, ends_k, 3, 7)


def test_autograd_functions_tell_queries_from_keys() -> None:
    (q, k, v), lengths = _packed()
    out = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, *OPTIONS)
    assert torch.equal(interface.FlashAttnVarlenFunc.apply(q, k, v, *lengths, *OPTIONS, None), out)
    kv = torch.stack((k, v), 1)
    assert torch.equal(interface.FlashAttnVarlenKVPackedFunc.apply(q, kv, *lengths, *OPTIONS), out)


def test_autograd_functions_read_pages() -> None:
    (q, _, _), (ends_q, _, longest_q, _) = _packed()
    k, v = torch.randn(2, 3, 16, 2, 8)
    ends_k, table = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([[2], [0]], dtype=torch.int32)
    arguments = (q, k, v, ends_q, ends_k, longest_q, 5, *OPTIONS, table)
    with torch.no_grad():
        assert torch.equal(
            interface.FlashAttnVarlenFunc.apply(*arguments), flash_attn.flash_attn_varlen_func(*arguments)
        )


def test_autograd_functions_save_nothing_without_gradients() -> None:
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    for is_grad_enabled in (True, False):
        out = interface.FlashAttnFunc.apply(q, q, q, *OPTIONS, is_grad_enabled)
        assert bool(out.grad_fn.saved_tensors) is is_grad_enabled
