"""Wrong arguments of every public function: an exception that names the argument, what came and what was wanted,
and never a crash, a hang or a silent result. Values that are unusual but right must work.

On a GPU the same calls, fewer: bad values inside index tensors are not known on the host there, so they are left out.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import fuzz_layer_calls
import fuzz_private_calls
import pytest
import torch
from flash_attn import flash_attn_varlen_fp8_func
from flash_attn.attention import operators as custom_ops
from fuzz_calls import CALLS, NAMES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GPU = torch.cuda.is_available()
EXAMPLES = 2000  # combinations of wrong arguments, on a CPU
Change = Callable[[Any], Any]


# An int or a tensor of several is right: other types are wrong.
INT_OR_TENSOR = {"cache_seqlens", "seqlen_offset", "seqlen_offsets"}

WRONG_TENSORS: dict[str, Change] = {
    "a string": lambda _: "tensor",
    "an object": lambda _: object(),
    "a list": lambda x: x.tolist(),
    "numpy": lambda x: x.cpu().float().numpy(),
    "complex": lambda x: x.to(torch.complex64),
    "quarter precision": lambda x: x.float().to(torch.float8_e4m3fn),
    "one dimension more": lambda x: x[None, None, None],
    "no dimension": lambda x: x.flatten()[0],
    "another device": lambda x: x.to("meta"),
    "sparse": lambda x: (x.float() if x.is_floating_point() else x).to_sparse(),
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
    "several": lambda _: torch.tensor([True, False]),
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


WRONG_THINGS: dict[str, Change] = {
    "text": lambda _: "no such thing",
    "a number": lambda _: 3,
    "an object": lambda _: object(),
}


@cache
def _signature(call: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function. For a custom op, of its implementation."""
    if isinstance(call, torch._ops.OpOverloadPacket):
        call = getattr(custom_ops, call.__name__)
    return inspect.signature(getattr(call, "_init_fn", call))


def _is_optional(function: str, name: str) -> bool:
    return str(_signature(CALLS[function][0]).parameters[name].annotation).endswith(("None", "Any"))


def _changes(function: str, name: str, value: Any) -> dict[str, Change]:
    """Everything that is wrong in the place of an argument."""
    if isinstance(value, torch.Tensor):
        wrong = dict(WRONG_TENSORS)
        wrong |= WRONG_FLOAT_TENSORS if value.is_floating_point() else {}
        if value.dtype in (torch.int32, torch.int64):
            wrong |= WRONG_INDEX_TENSORS
            wrong |= {} if GPU else WRONG_INDEX_VALUES
        if name in INT_OR_TENSOR:
            del wrong["no dimension"]
    elif isinstance(value, bool):
        wrong = dict(WRONG_SWITCHES)
    elif isinstance(value, tuple):
        wrong = dict(WRONG_WINDOWS)
    elif isinstance(value, int):
        wrong = dict(WRONG_INTS)
    elif isinstance(value, float):
        wrong = dict(WRONG_NUMBERS)
    elif value is not None or name == "process_group":
        wrong = dict(WRONG_THINGS)
    else:
        return {}
    if _is_optional(function, name):
        wrong.pop("nothing", None)
    else:
        wrong["nothing"] = lambda _: None
    return wrong


# Changes that make another right call: (function, argument, change), with None for any.
FA3 = [name.removeprefix("fa3.") for name in CALLS if name.startswith("fa3.")]
RIGHT = {
    ("flash_attn_qkvpacked_func", "qkv", "one row more"),
    ("flash_attn_varlen_qkvpacked_func", "cu_seqlens", "one element more"),  # an empty sequence
    *((function, "qkv", change) for function in ("flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func")
      for change in ("one column more", "another float")),
    # Rows outside every sequence, more pages.
    *((function, argument, "one row more") for function in CALLS for argument in ("q", "k", "v", "qkv", "kv")
      if "varlen_" in function and function.split(",")[0].endswith("func")),
    ("flash_attn_varlen_func, paged", "block_table", "every second"),  # of one element
    ("flash_attn_with_kvcache", "cache_seqlens", "negative"),  # less by two is still right
    *(("flash_attn_with_kvcache, FP8", *change) for change in (
        ("cache_seqlens", "negative"), ("k_cache", "quarter precision"), ("v_cache", "quarter precision"),
        ("v_cache", "one column more"))),
    *((f"flash_attn_with_kvcache, {kind}", *change) for kind in ("paged", "latent")
      for change in (("cache_seqlens", "negative"), ("block_table", "every second"))),
    *(("flash_attn_qkvpacked_func, bias", "qkv", change) for change in ("one column more", "another float")),
    *((f"flash_attn_{kind}qkvpacked_fp8_func", "qkv", change) for kind in ("", "varlen_")
      for change in ("one row more", "one column more", "another float")),
    ("flash_attn_varlen_qkvpacked_fp8_func", "cu_seqlens", "one element more"),
    *((function, "s_aux", "another float") for function in CALLS),
    ("flash_attn_with_kvcache, FP8", "q", "another float"),  # queries of either 16-bit type
    # A bias for two sequences, or two heads, where there was one bias for all of them.
    *((f"flash_attn_{kind}func, bias", "attn_bias", "one row more") for kind in ("", "kvpacked_")),
    # Only shapes are worked out on this device; ALiBi slopes of another one are refused.
    ("flash_attn_qkvpacked_func, plain", "qkv", "another device"),
    ("flash_attn_qkvpacked_fp8_func, plain", "qkv", "another device"),
    *((f"fa3.{function}", argument, change) for function in FA3 for argument, change in (
        ("qkv", "one row more"), ("qkv", "one column more"), ("qkv", "another float"), ("qkv", "another device"),
        ("qkv", "quarter precision"),
        ("q", "quarter precision"), ("k", "quarter precision"), ("v", "quarter precision"),
        ("seqused_q", "negative"), ("seqused_k", "negative"), ("cache_seqlens", "negative"),
        ("rotary_seqlens", "negative"), ("page_table", "every second"), ("out", "another float"),
        *(("scheduler_metadata", change) for change in ("one element more", *WRONG_INDEX_VALUES)))),
    # Values have a head dim of their own.
    *((f"fa3.flash_attn_{kind}func", "v", "one column more") for kind in ("", "varlen_")),
    *((f"flash_attn_{kind}", "v", "one column more")
      for kind in ("func", "func, values", "func, bias", "varlen_func", "varlen_func, values", "varlen_func, paged")),
    *((f"{start}_flash_attn_{kind}", "v", "one column more")
      for start in ("", "_wrapped", "2.6 ")
      for kind in ("forward", "varlen_forward", "varlen_forward, paged")),
    ("varlen_fwd, paged", "v", "one column more"),
    ("fwd_kvcache, paged", "vcache", "one column more"),
    *((f"flash_attn_with_kvcache, {kind}", "v_cache", "one column more") for kind in ("paged", "latent")),
    ("fa3.flash_attn_with_kvcache, FP8", "v_cache", "one column more"),
    ("fa3.flash_attn_with_kvcache", "q", "one row more"),  # outside of every sequence
    *(("fa3.flash_attn_with_kvcache, FP8", cache, "quarter precision") for cache in ("k_cache", "v_cache")),
    ("fa3.flash_attn_qkvpacked_func, FP8", "qkv", "quarter precision"),
    ("fa3.flash_attn_combine, new", "out_partial", "one column more"),
    ("fa3.get_scheduler_metadata", "cache_seqlens", "another device"),
    # Only the number of them is read.
    *(("fa3.get_scheduler_metadata", argument, change) for change in WRONG_INDEX_VALUES
      for argument in ("cache_seqlens", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad")),
    *((f"apply_rotary_emb{end}", argument, change) for end in ("", ", varlen", "_qkv_", "_kv_")
      for argument in ("x", "qkv", "kv") for change in ("one row more", "one column more")),
    *((f"apply_rotary{end}", None, "another float")  # of x or of the tables
      for end in ("", ", varlen", "_emb", "_emb, varlen", "_emb_qkv_", "_emb_kv_")),
    ("apply_rotary_emb, varlen", "seqlen_offsets", "every second"),
    ("cross_entropy_loss", "logits", "one column more"),
    ("cross_entropy_loss", "logits", "another float"),
    ("cross_entropy_loss", "labels", "int16"),
    ("cross_entropy_loss", "labels", "every second"),
    ("cross_entropy_loss", "ignore_index", "negative"),
    *fuzz_layer_calls.LEFT_OUT,
    *fuzz_private_calls.LEFT_OUT,
    ("layer_norm_fn", None, "another float"),
    ("rms_norm_fn", None, "another float"),
}  # fmt: skip


def _is_right(function: str, argument: str, change: str) -> bool:
    names, places = (function, function.removesuffix(", plain")), (argument, None)
    return any((name, place, change) in RIGHT for name in names for place in places)


WRONG = {
    function: [
        (argument, change)
        for argument, value in make().items()
        for change in _changes(function, argument, value)
        if not _is_right(function, argument, change)
    ]
    for function, (_, make) in CALLS.items()
}
# Names that a message may use other than arguments: parts of packed and shared tensors, a module's weight.
PARTS = {"block_table", "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "weight"}


def _problem(function: str, *changes: tuple[str, str]) -> str | None:
    """The fault in how an invalid call ended; None if it ended with a proper error."""
    call, make = CALLS[function]
    arguments = make()
    for argument, change in changes:
        arguments[argument] = _changes(function, argument, arguments[argument])[change](arguments[argument])
    try:
        call(**arguments)
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:
        named = re.match(r"([\w, ]+): got .*wanted ", str(error), re.DOTALL)
        known = {name for argument in make() for name in (argument, argument.rstrip("_"), NAMES.get(argument))} | PARTS
        if named is None or not set(named[1].split(", ")) & known:
            return f"says {type(error).__name__}: {error}"
        return None
    except RuntimeError as error:
        refused = re.search(r"Expected a value of type '.+' for argument '(\w+)' but instead found", str(error))
        if refused is None or refused[1] not in {argument for argument, _ in changes}:
            return f"raises {type(error).__name__}: {error}"
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
    for argument, change in WRONG[function][:: 3 if GPU else 1]:
        problem = _problem(function, (argument, change))
        assert problem is None, f"{argument}: {change}: {problem}"


@st.composite
def _several(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]]]:
    """Two or three wrong arguments of one function, in different ways: what is wrong alike may be right together."""
    function = draw(st.sampled_from(list(CALLS)))
    different = (lambda case: case[0], lambda case: "more" if case[1].endswith("more") else case[1])
    return function, draw(st.lists(st.sampled_from(WRONG[function]), min_size=2, max_size=3, unique_by=different))


@settings(
    max_examples=100 if GPU else EXAMPLES,
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


# Arguments that no call here has: torch's own, which its layers check; what is refused whatever it is; other keywords.
NOT_CALLED = {"device", "dtype", "descale_do", "kwargs"}


def test_every_parameter_is_called() -> None:
    """Every parameter of a function has a value to be made wrong in one of its calls."""
    called = {_signature(flash_attn_varlen_fp8_func): {"block_table"}}  # refused too
    for function, (call, make) in CALLS.items():
        given = {name for name, value in make().items() if _changes(function, name, value)}
        called.setdefault(_signature(call), set()).update(given)
    left_out = {str(signature): set(signature.parameters) - given - NOT_CALLED for signature, given in called.items()}
    assert not {signature: names for signature, names in left_out.items() if names}


def test_enough_calls() -> None:
    """What the tests above make, on a CPU."""
    assert sum(map(len, WRONG.values())) + EXAMPLES >= 15_000
