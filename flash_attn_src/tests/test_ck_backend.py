"""The Composable Kernel backend without a GPU:

its launches are recorded on CPU tensors. ck_interpreter runs them; with --gfx the simulator runs the code compiled for
that target.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from assert_close import assert_close
from ck_recorded import BF16, both, compare, operations, tensors
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.attention import backends
from flash_attn.attention.backends import recording
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.core import ck_planner

torch.set_num_threads(2)
pytestmark = pytest.mark.usefixtures("planner")


@pytest.fixture(scope="session", autouse=True)
def _simulated() -> None:
    """Nothing here goes to the Triton kernels of --gfx."""


DENSE = [
    {},
    {"causal": True},
    {"window_size": (20, 5)},
    {"window_size": (3, 0), "deterministic": True},
    {"alibi": 1},
    {"alibi": 2, "causal": True, "deterministic": True},
    {"alibi": 1, "window_size": (30, 40)},
    {"softmax_scale": 0.3, "causal": True},
]


@pytest.mark.parametrize("options", DENSE, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize(
    ("sq", "sk", "heads", "heads_k", "dim"), [
        (70, 150, 4, 2, 64), (150, 70, 3, 3, 32), (33, 40, 2, 1, 80), (1, 90, 4, 1, 128),
    ],
)  # fmt: skip
def test_dense(
    done: list[ck_planner.Launch], options: dict[str, Any], sq: int, sk: int, heads: int, heads_k: int, dim: int
) -> None:
    options = dict(options)
    alibi = options.pop("alibi", 0)
    slopes = torch.rand((2, heads)[2 - alibi :]) if alibi else None
    inputs = tensors((2, sq, heads, dim), (2, sk, heads_k, dim), (2, sk, heads_k, dim))
    compare(*both(lambda *x, **tail: flash_attn_func(*x, alibi_slopes=slopes, **options, **tail), inputs))
    assert operations(done) == ["fwd", "dot", "dqdkdv", "convert"]


def test_sinks(done: list[ck_planner.Launch]) -> None:
    """The forward goes to the Triton kernels, said by a warning. The backward, which needs no sinks, does not."""
    inputs = tensors((2, 70, 4, 64), (2, 50, 2, 64), (2, 50, 2, 64))
    sinks = torch.linspace(-1.0, 2.0, 4)
    with pytest.warns(RuntimeWarning, match="cannot do this forward: s_aux: the kernels have none"):
        compare(*both(lambda *x, **tail: flash_attn_func(*x, causal=True, s_aux=sinks, **tail), inputs))
    assert operations(done) == ["triton.forward", "dot", "dqdkdv", "convert"]


@pytest.mark.parametrize("dim", [160, 256])
def test_large_head_dims(done: list[ck_planner.Launch], dim: int) -> None:
    inputs = tensors((1, 70, 2, dim), (1, 150, 1, dim), (1, 150, 1, dim))
    compare(*both(lambda *x, **tail: flash_attn_func(*x, causal=True, **tail), inputs))
    assert [launch.kernel.split("-")[2] for launch in done] == [f"d{-(-dim // 64) * 64}", "d256", "d256", "d256"]


@pytest.mark.parametrize("options", DENSE[:6], ids=lambda options: "-".join(options) or "plain")
def test_varlen(done: list[ck_planner.Launch], options: dict[str, Any]) -> None:
    options = dict(options)
    alibi = options.pop("alibi", 0)
    slopes = torch.rand((3, 4)[2 - alibi :]) if alibi else None
    lengths_q, lengths_k = (
        torch.tensor([0, 20, 20, 75], dtype=torch.int32),
        torch.tensor([0, 50, 60, 99], dtype=torch.int32),
    )
    inputs = tensors((80, 4, 64), (110, 2, 64), (110, 2, 64))  # a few rows behind the last sequence

    def call(*x: torch.Tensor, **tail: Any) -> Any:
        return flash_attn_varlen_func(*x, lengths_q, lengths_k, 55, 50, alibi_slopes=slopes, **options, **tail)

    result, expected = both(call, inputs)
    assert not result[0][75:].any()
    assert not result[2][75:].any()
    assert not result[3][99:].any()
    for results in (result, expected):  # the log-sum-exp of rows outside of every sequence is undefined
        results[1] = results[1][:, :75]
    compare(result, expected)
    assert {launch.kernel.split("-")[3] for launch in done} == {"group"}


@pytest.mark.parametrize("deterministic", [False, True])
def test_sequences_without_keys(done: list[ck_planner.Launch], deterministic: bool) -> None:
    """A sequence with queries alone beside one of a single block of keys: its gradient is zero."""
    lengths_q, lengths_k = torch.tensor([0, 20, 40], dtype=torch.int32), torch.tensor([0, 0, 30], dtype=torch.int32)
    inputs = tensors((40, 2, 64), (30, 1, 64), (30, 1, 64))

    def call(*x: torch.Tensor, **tail: Any) -> Any:
        return flash_attn_varlen_func(*x, lengths_q, lengths_k, 20, 30, deterministic=deterministic, **tail)

    result, expected = both(call, inputs)
    assert not result[2][:20].any()
    assert (result[1][:, :20] == torch.inf).all()
    compare(result, expected)
    assert operations(done) == ["fwd", "dot", "dqdkdv", "convert"]


def test_parts_of_dq_that_span_4_gib(
    done: list[ck_planner.Launch], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deterministic sum of the parts: 63 of them, 2^26 bytes apart and more."""
    if request.config.getoption("--gfx") is None:
        pytest.skip("ck_interpreter has no offsets of 32 bits: needs --gfx")
    rows, keys = 2**18 + 2**15, 63 * 128 + 5
    zeros = torch.zeros

    def lazy_zeros(*shape: int, **options: Any) -> torch.Tensor:
        """Allocates large zero tensors lazily, without touching their memory."""
        return torch.from_numpy(np.zeros(shape, np.float32)) if shape[0] > 2**28 else zeros(*shape, **options)

    (q, grad), (k, v) = tensors((20, 1, 64), (20, 1, 64)), tensors((keys, 1, 64), (keys, 1, 64), seed=1)
    lengths_q, lengths_k = torch.tensor([0, 20], dtype=torch.int32), torch.tensor([0, keys], dtype=torch.int32)

    def gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        q = q.detach().requires_grad_()
        out = flash_attn_varlen_func(q, k, v, lengths_q, lengths_k, 20, keys, deterministic=True, softmax_scale=0.3)
        return torch.autograd.grad(out, q, grad)[0]

    padding = zeros(rows - 20, 1, 64, dtype=BF16)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lazy_zeros)
        dq = gradient(torch.cat((q, padding)), k, v, torch.cat((grad, padding)))
    with backends.using(torch_backend):
        expected = gradient(*(x.float() for x in (q, k, v, grad)))
    assert_close("dq", dq[:20], expected, tiny=0.03)
    assert operations(done) == ["fwd", "dot", "dqdkdv", "convert"]


@pytest.mark.parametrize(("total_q", "total_k"), [(0, 5), (5, 0), (0, 0)])
def test_packed_tensors_without_rows(done: list[ck_planner.Launch], total_q: int, total_k: int) -> None:
    """The longest lengths may be the most that a batch could have."""
    inputs = tensors((total_q, 4, 64), (total_k, 2, 64), (total_k, 2, 64))
    lengths_q, lengths_k = (torch.tensor([0, total], dtype=torch.int32) for total in (total_q, total_k))
    result, expected = both(lambda *x, **tail: flash_attn_varlen_func(*x, lengths_q, lengths_k, 16, 16, **tail), inputs)
    compare(result, expected)
    assert not done


def test_batch_of_none(done: list[ck_planner.Launch]) -> None:
    inputs = tensors((0, 5, 4, 64), (0, 7, 2, 64), (0, 7, 2, 64))
    compare(*both(lambda *x, **tail: flash_attn_func(*x, **tail), inputs))
    assert not done


def test_strided_inputs_and_packed_gradients(done: list[ck_planner.Launch]) -> None:
    (qkv,) = tensors((2, 40, 3, 4, 64))
    odd = tensors((2, 40, 4, 67))[0][..., 1:65]  # rows that do not start on 16 bytes
    compare(*both(lambda q, k, v, **tail: flash_attn_func(q, k, v, **tail), [*qkv.unbind(2)]))
    compare(*both(lambda q, k, v, **tail: flash_attn_func(q, k, v, **tail), [odd, *qkv.unbind(2)[1:]]))
    assert operations(done) == ["fwd", "dot", "dqdkdv", "convert"] * 2


def test_softcap_forward(done: list[ck_planner.Launch]) -> None:
    inputs = tensors((2, 40, 4, 64), (2, 50, 2, 64), (2, 50, 2, 64))
    out = flash_attn_func(*inputs, softcap=2.0, causal=True)
    with backends.using(torch_backend):
        expected = flash_attn_func(*(x.float() for x in inputs), softcap=2.0, causal=True)
    assert_close("out", out, expected, tiny=0.03)
    assert [launch.kernel for launch in done] == ["fwd-bf16-d64-batch-mask-softcap"]


def test_calls_without_a_ck_kernel_warn_once() -> None:
    q, k, v = (x.requires_grad_() for x in tensors((1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64)))
    with recording.record("gfx942") as launches:
        with pytest.warns(
            RuntimeWarning, match="cannot do this backward: softcap: the backward has none. The Triton"
        ) as told:
            flash_attn_func(q, k, v, softcap=3.0).sum().backward()
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flash_attn_func(q, k, v, softcap=3.0).sum().backward()
        with pytest.warns(RuntimeWarning, match=r"cannot do this forward: dtype: torch\.float32 is neither"):
            flash_attn_func(q.float(), k.float(), v.float())
    assert [launch.kernel for launch in launches] == [
        "fwd-bf16-d64-batch-mask-softcap", "triton.backward", "fwd-bf16-d64-batch-mask-softcap", "triton.backward",
        "triton.forward",
    ]  # fmt: skip


def test_ck_alone_raises() -> None:
    q, k, v = tensors((1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64), dtype=torch.float32)
    with (
        recording.record("gfx942", alone=True) as launches,
        pytest.raises(NotImplementedError, match="cannot do this forward: dtype"),
    ):
        flash_attn_func(q, k, v)
    assert launches == []


@pytest.mark.parametrize(
    ("value", "backend", "expected"),
    [
        ("", "ck", None),
        ("TRUE", "ck", None),
        ("0", "ck", None),
        ("FALSE", "triton", "does not have"),
        ("maybe", "ck", "neither"),
    ],
)
def test_the_environment_selects_the_ck_backend(
    monkeypatch: pytest.MonkeyPatch, value: str, backend: str, expected: str | None
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", value)
    digest = hashlib.sha256(ck_planner.PATH.read_bytes()).hexdigest()
    _build(monkeypatch, backend, digest)
    problem = backends.problem()
    assert problem is None if expected is None else problem is not None and expected in problem


@pytest.mark.parametrize("digest", ["", "0" * 64])
def test_a_planner_that_the_wheel_does_not_name_is_not_loaded(monkeypatch: pytest.MonkeyPatch, digest: str) -> None:
    _build(monkeypatch, "ck", digest)
    monkeypatch.setattr(ck_planner, "library", lambda: pytest.fail("the library was loaded"))
    problem = backends.problem()
    assert problem is not None
    assert "is not the planner that the wheel was built with" in problem
    assert problem.endswith("reinstall the wheel")


def _build(monkeypatch: pytest.MonkeyPatch, backend: str, planner: str) -> None:
    info = backends.build_info.BuildInfo(backend=backend, planner=planner)
    monkeypatch.setattr(backends.build_info, "load", lambda: info)


def test_recordings_do_not_nest() -> None:
    with recording.record("gfx942"), pytest.raises(RuntimeError, match="under way already"), recording.record("gfx90a"):
        pass
    assert backends.select(torch.zeros(1)) is torch_backend


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    starts = torch.tensor([0, 40], dtype=torch.int32)
    return flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 40, 40)


def _cached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return flash_attn_with_kvcache(
            q[:, :1], k.clone(), v.clone(), k[:, :1], v[:, :1], cache_seqlens=8, num_splits=2
        )


@pytest.mark.filterwarnings("ignore:the CK backend cannot do this .* dtype:RuntimeWarning")
@pytest.mark.parametrize(
    "call",
    [
        flash_attn_func,
        lambda q, k, v: flash_attn_func(q, k, v, dropout_p=0.1, causal=True),
        lambda q, k, v: flash_attn_func(q, k, v, softcap=5.0),
        lambda q, k, v: flash_attn_func(q, k, v, alibi_slopes=torch.ones(2)),
        lambda q, k, v: flash_attn_func(q, k, v, window_size=(4, 0), deterministic=True),
        _packed,
        _cached,
    ],
)
def test_no_call_in_fp16_runs_ck_kernels_on_gfx90a(call: Callable[..., torch.Tensor]) -> None:
    """Its products lose numbers below 6.1e-5."""
    q, k, v = (torch.randn(1, 40, 2, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    with recording.record("gfx90a") as launches:
        out = call(q, k, v)
        if out.requires_grad:
            out.sum().backward()
    assert launches
    assert [launch.kernel for launch in launches if not launch.kernel.startswith("triton.")] == []
    with (
        recording.record("gfx90a", alone=True),
        pytest.raises(NotImplementedError, match=r"loses numbers below 6.1e-5"),
    ):
        call(q, k, v)
