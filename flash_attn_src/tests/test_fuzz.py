"""Wrong arguments of every public function: an exception that names the argument, what came and what was wanted,
and never a crash, a hang or a silent result. Values that are unusual but right must work.

On a GPU the same calls, fewer: bad values inside index tensors are not known on the host there, so they are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import flash_attention_amd
import flash_attn
import pytest
import torch
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
Change = Callable[[Any], Any]


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def _ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def _tail() -> dict[str, Any]:
    return {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
            "alibi_slopes": _floats(4).abs(), "deterministic": False, "return_attn_probs": False}  # fmt: skip


LENGTHS = {"cu_seqlens_q": (0, 3, 6), "cu_seqlens_k": (0, 5, 9)}
# Function -> a right call. Every argument of it is made wrong in turn.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "flash_attn_func": (
        flash_attn.flash_attn_func,
        lambda: {"q": _floats(2, 3, 4, 8), "k": _floats(2, 5, 2, 8), "v": _floats(2, 5, 2, 8), **_tail()},
    ),
    "flash_attn_qkvpacked_func": (
        flash_attn.flash_attn_qkvpacked_func,
        lambda: {"qkv": _floats(2, 3, 3, 4, 8), **_tail()},
    ),
    "flash_attn_kvpacked_func": (
        flash_attn.flash_attn_kvpacked_func,
        lambda: {"q": _floats(2, 3, 4, 8), "kv": _floats(2, 5, 2, 2, 8), **_tail()},
    ),
    "flash_attn_varlen_func": (
        flash_attn.flash_attn_varlen_func,
        lambda: {
            "q": _floats(6, 4, 8), "k": _floats(9, 2, 8), "v": _floats(9, 2, 8),
            **{name: _ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_tail(),
        },
    ),
    "flash_attn_varlen_func, paged": (
        flash_attn.flash_attn_varlen_func,
        lambda: {
            "q": _floats(6, 4, 8), "k": _floats(4, 16, 2, 8), "v": _floats(4, 16, 2, 8),
            **{name: _ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_tail(), "block_table": _ints(1, 3)[:, None],
        },
    ),
    "flash_attn_varlen_qkvpacked_func": (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        lambda: {"qkv": _floats(6, 3, 4, 8), "cu_seqlens": _ints(0, 3, 6), "max_seqlen": 3, **_tail()},
    ),
    "flash_attn_varlen_kvpacked_func": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        lambda: {
            "q": _floats(6, 4, 8), "kv": _floats(9, 2, 2, 8),
            **{name: _ints(*ends) for name, ends in LENGTHS.items()},
            "max_seqlen_q": 3, "max_seqlen_k": 5, **_tail(),
        },
    ),
    "flash_attn_with_kvcache": (
        flash_attn.flash_attn_with_kvcache,
        lambda: {
            "q": _floats(2, 1, 4, 8), "k_cache": _floats(3, 9, 2, 8), "v_cache": _floats(3, 9, 2, 8),
            "k": _floats(2, 1, 2, 8), "v": _floats(2, 1, 2, 8),
            "rotary_cos": _floats(9, 4), "rotary_sin": _floats(9, 4), "cache_seqlens": _ints(4, 5),
            "cache_batch_idx": _ints(2, 0), "cache_leftpad": _ints(1, 0), "window_size": (-1, -1), "softcap": 0.0,
            "alibi_slopes": _floats(4).abs(), "num_splits": 0,
        },
    ),
    "apply_rotary_emb": (
        apply_rotary_emb,
        lambda: {"x": _floats(2, 3, 4, 8), "cos": _floats(7, 2), "sin": _floats(7, 2), "seqlen_offsets": 4},
    ),
    "apply_rotary_emb, varlen": (
        apply_rotary_emb,
        lambda: {
            "x": _floats(6, 4, 8), "cos": _floats(7, 2), "sin": _floats(7, 2), "seqlen_offsets": _ints(1, 4),
            "cu_seqlens": _ints(0, 3, 6), "max_seqlen": 3,
        },
    ),
    "apply_rotary_emb_qkv_": (
        apply_rotary_emb_qkv_,
        lambda: {
            "qkv": _floats(2, 3, 6, 8), "cos": _floats(7, 2), "sin": _floats(7, 2), "cos_k": _floats(7, 2),
            "sin_k": _floats(7, 2), "seqlen_offsets": 4, "num_heads_q": 2,
        },
    ),
    "apply_rotary_emb_kv_": (
        apply_rotary_emb_kv_,
        lambda: {"kv": _floats(2, 3, 2, 4, 8), "cos": _floats(7, 2), "sin": _floats(7, 2), "seqlen_offsets": 4},
    ),
    "cross_entropy_loss": (
        cross_entropy_loss,
        lambda: {
            "logits": _floats(3, 7), "labels": _ints(6, 0, 2, dtype=torch.int64), "precomputed_lse": _floats(3),
            "label_smoothing": 0.1, "logit_scale": 1.0, "lse_square_scale": 0.0, "ignore_index": -100,
        },
    ),
    "layer_norm_fn": (
        layer_norm_fn,
        lambda: {
            "x": _floats(3, 8), "weight": _floats(8), "bias": _floats(8), "residual": _floats(3, 8),
            "x1": _floats(3, 8), "weight1": _floats(8), "bias1": _floats(8), "eps": 1e-5, "dropout_p": 0.0,
            "rowscale": _floats(3), "out": _floats(3, 8),
        },
    ),
    "rms_norm_fn": (
        rms_norm_fn,
        lambda: {"x": _floats(3, 8), "weight": _floats(8), "bias": None, "residual": _floats(3, 8), "eps": 1e-5},
    ),
    "flash_attention_amd": (
        lambda q, k, v, mask, dropout: flash_attention_amd.FlashAttention(dropout)(q, k, v, mask),
        lambda: {
            "q": _floats(2, 3, 4, 8), "k": _floats(2, 5, 2, 8), "v": _floats(2, 5, 2, 8),
            "mask": torch.ones(2, 5, dtype=torch.bool, device=DEVICE), "dropout": 0.0,
        },
    ),
}  # fmt: skip
# May be left out: None is right.
OPTIONAL = {
    "softmax_scale", "alibi_slopes", "block_table", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens",
    "cache_batch_idx", "cache_leftpad", "cu_seqlens", "max_seqlen", "cos_k", "sin_k", "num_heads_q", "mask",
    "precomputed_lse", "bias", "residual", "x1", "weight1", "bias1", "rowscale", "out",
}  # fmt: skip
# An int or a tensor of several is right: other types are wrong.
INT_OR_TENSOR = {"cache_seqlens", "seqlen_offsets"}

WRONG_TENSORS: dict[str, Change] = {
    "a string": lambda _: "tensor",
    "an object": lambda _: object(),
    "a list": lambda x: x.tolist(),
    "numpy": lambda x: x.cpu().numpy(),
    "complex": lambda x: x.to(torch.complex64),
    "quarter precision": lambda x: x.float().to(torch.float8_e4m3fn),
    "one dimension more": lambda x: x[None, None, None],
    "no dimension": lambda x: x.flatten()[0],
    "another device": lambda x: x.to("meta"),
    "sparse": lambda x: x.float().to_sparse(),
}
WRONG_FLOAT_TENSORS: dict[str, Change] = {
    "int": lambda x: x.to(torch.int32),
    "bool": lambda x: x.to(torch.bool),
    "one row more": lambda x: torch.cat((x, x[:1])),
    "one column more": lambda x: torch.cat((x, x[..., :1]), -1),
    "another float": lambda x: x.to(torch.float16),
}
WRONG_INDEX_TENSORS: dict[str, Change] = {
    "float": lambda x: x.float(),
    "int16": lambda x: x.to(torch.int16),
    "one element more": lambda x: torch.cat((x, x[-1:])),
    "every second": lambda x: torch.stack((x, x), -1)[..., 0] if x.numel() > 1 else x.float(),
}
WRONG_INDEX_VALUES: dict[str, Change] = {
    "negative": lambda x: x - 2,
    "huge": lambda x: x + 10**6,
    "decreasing": lambda x: x.flip(0) + 10**6,
}
WRONG_NUMBERS: dict[str, Change] = {
    "text": lambda _: "0.5",
    "a list": lambda _: [0.5],
    "complex": lambda _: 1j,
    "NaN": lambda _: math.nan,
    "infinite": lambda _: math.inf,
    "minus infinite": lambda _: -math.inf,
    "nothing": lambda _: None,
}
WRONG_SWITCHES: dict[str, Change] = {
    "text": lambda _: "False",
    "two": lambda _: 2,
    "nothing": lambda _: None,
    "a list": lambda _: [],
}
WRONG_WINDOWS: dict[str, Change] = {
    "one": lambda _: 3,
    "three": lambda _: (1, 2, 3),
    "floats": lambda _: (1.0, 2.0),
    "text": lambda _: "ab",
    "nothing": lambda _: None,
    "none": lambda _: (None, None),
}
WRONG_INTS: dict[str, Change] = {
    "text": lambda _: "3",
    "a float": lambda _: 2.5,
    "negative": lambda _: -5,
    "huge": lambda _: 1 << 40,
    "a list": lambda _: [3],
}


def _changes(name: str, value: Any) -> dict[str, Change]:
    """Everything that is wrong in the place of an argument."""
    if isinstance(value, torch.Tensor):
        wrong = dict(WRONG_TENSORS)
        wrong |= WRONG_FLOAT_TENSORS if value.is_floating_point() else {}
        if value.dtype in (torch.int32, torch.int64):
            wrong |= WRONG_INDEX_TENSORS
            wrong |= {} if GPU else WRONG_INDEX_VALUES
        if name not in OPTIONAL:
            wrong["nothing"] = lambda _: None
        if name in INT_OR_TENSOR:
            del wrong["no dimension"]
        return wrong
    if isinstance(value, bool):
        return WRONG_SWITCHES
    if isinstance(value, tuple):
        return WRONG_WINDOWS
    if isinstance(value, int):
        return WRONG_INTS
    if isinstance(value, float):
        wrong = dict(WRONG_NUMBERS)
        if name in OPTIONAL:
            del wrong["nothing"]
        return wrong
    return {}


# Changes that make another right call: (function, argument, change), with None for any.
RIGHT = {
    ("flash_attn_qkvpacked_func", "qkv", "one row more"),
    ("flash_attn_varlen_qkvpacked_func", "cu_seqlens", "one element more"),  # an empty sequence
    *((function, "qkv", change) for function in ("flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func")
      for change in ("one column more", "another float")),
    # Rows outside every sequence, more pages.
    *((function, None, "one row more") for function in CALLS if "varlen" in function),
    ("flash_attn_varlen_func, paged", "block_table", "every second"),  # of one element
    ("flash_attn_with_kvcache", "cache_seqlens", "negative"),  # less by two is still right
    ("flash_attn_with_kvcache", "num_splits", "huge"),
    *((f"apply_rotary_emb{end}", argument, change) for end in ("", ", varlen", "_qkv_", "_kv_")
      for argument in ("x", "qkv", "kv") for change in ("one row more", "one column more")),
    ("apply_rotary_emb, varlen", "seqlen_offsets", "every second"),
    ("cross_entropy_loss", "logits", "one column more"),
    ("cross_entropy_loss", "logits", "another float"),
    ("cross_entropy_loss", "labels", "int16"),
    ("cross_entropy_loss", "labels", "every second"),
    ("cross_entropy_loss", "ignore_index", "negative"),
    ("layer_norm_fn", None, "another float"),
    ("rms_norm_fn", None, "another float"),
}  # fmt: skip

CASES = [
    (function, argument, change)
    for function, (_, make) in CALLS.items()
    for argument, value in make().items()
    for change in _changes(argument, value)
    if (function, argument, change) not in RIGHT and (function, None, change) not in RIGHT
]
# What a message may name beside the arguments themselves: the parts of packed and of shared ones.
PARTS = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}


def _problem(function: str, *changes: tuple[str, str]) -> str | None:
    """What is wrong with how a call with wrong arguments ends; None where it ends as it should."""
    call, make = CALLS[function]
    arguments = make()
    for argument, change in changes:
        arguments[argument] = _changes(argument, arguments[argument])[change](arguments[argument])
    try:
        call(**arguments)
    except (TypeError, ValueError, IndexError) as error:
        named = re.match(r"([\w, ]+): got .*wanted ", str(error), re.DOTALL)
        known = {*make(), *PARTS}
        if named is None or not set(named[1].split(", ")) & known:
            return f"says {type(error).__name__}: {error}"
        return None
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    return "is accepted"


@pytest.mark.parametrize("function", CALLS)
def test_the_right_calls_are_right(function: str) -> None:
    call, make = CALLS[function]
    call(**make())


@pytest.mark.parametrize("function", CALLS)
def test_every_argument_wrong(function: str) -> None:
    wrong = [(argument, change) for name, argument, change in CASES if name == function]
    for argument, change in wrong[:: 3 if GPU else 1]:
        problem = _problem(function, (argument, change))
        assert problem is None, f"{argument}: {change}: {problem}"


@st.composite
def _several(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]]]:
    """Two or three wrong arguments of one function."""
    function = draw(st.sampled_from(list(CALLS)))
    wrong = [(argument, change) for name, argument, change in CASES if name == function]
    return function, draw(st.lists(st.sampled_from(wrong), min_size=2, max_size=3, unique_by=lambda case: case[0]))


@settings(
    max_examples=100 if GPU else 600,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(_several())
def test_several_arguments_wrong(case: tuple[str, list[tuple[str, str]]]) -> None:
    function, changes = case
    problem = _problem(function, *changes)
    assert problem is None, f"{function}: {changes}: {problem}"


def test_enough_calls() -> None:
    """What the tests above make, on a CPU."""
    assert len(CASES) + 600 >= 2000
