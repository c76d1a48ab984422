"""Calls that AMD's assembly kernels serve, from the public functions to the simulator; and who serves which call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import reference
import tools
import torch
from assert_close import assert_close
from flash_attn import backend_info, flash_attn_func, flash_attn_varlen_func
from flash_attn.attention import backends
from flash_attn.attention.backends import choice, sources
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.attention.backends.ck import ComposableKernel
from flash_attn.attention.backends.sources import Sources
from flash_attn.call.calls import AttentionCall, attention_call, cache_call
from flash_attn.core import build_info, device
from flash_attn.core.build_info import BuildInfo
from flash_attn.core.ck_planner import Launch
from flash_attn.core.recording import Recording
from flash_attn.kernels import assembly, providers

from amdgpu_simulator import gpu
from amdgpu_simulator.debian import UnavailableError


@contextmanager
def simulated(forced: str | None = None, target: str = "gfx942") -> Iterator[list[str]]:
    """The kernels that ran on a mock MI300X or MI350X. PyTorch computes in place of Composable Kernel and Triton."""
    names: list[str] = []

    class Noting(gpu.SimulatedGpu):
        def run(self, launches: Sequence[Launch], tensors: device.Tensors) -> None:
            names.extend(launch.kernel for launch in launches)
            super().run(launches, tensors)

    try:
        with device.using(Noting(target)), backends.using(Sources(torch_backend, torch_backend, forced=forced)):
            yield names
    except UnavailableError as problem:
        tools.missing(str(problem))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def exact_and_rough(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool
) -> list[list[torch.Tensor]]:
    """(out, dq, dk, dv, lse) in fp32, and in the tensors' own type."""
    result = []
    for dtype in (torch.float32, None):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = reference.attention(*leaves, causal=causal, dtype=dtype)
        result.append([out, *torch.autograd.grad(out, leaves, dout.to(out.dtype)), lse])
    return result


@pytest.mark.usefixtures("planner")
def test_forward_and_backward() -> None:
    """Causal, grouped heads, more queries than keys: rows without keys have out 0 and a log-sum-exp of +inf."""
    q, k, v = tensors((1, 150, 2, 128), (1, 70, 1, 128), (1, 70, 1, 128))
    with simulated() as launched:
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        dout = torch.randn_like(out)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    forward, sums, backward = launched
    assert (forward, backward) == ("asm-fwd-bf16-d128-causal", "asm-bwd-bf16-d128-causal")
    assert sums.startswith("dot-bf16-d128-batch")
    exact, rough = exact_and_rough(q, k, v, dout, causal=True)
    for name, got, one, other in zip(("out", "dq", "dk", "dv"), (out, *gradients), exact, rough, strict=False):
        assert_close(name, got, one, rough=other, dtype=torch.bfloat16)
    assert_close("lse", lse, torch.where(exact[4].isinf(), torch.inf, exact[4]))


# Where the sequences start. One has no keys, one has no queries, and one has both; rows follow the last one.
_STARTS = {"no keys first": ([0, 20, 20, 35], [0, 0, 9, 42]), "no keys last": ([0, 0, 15, 35], [0, 9, 42, 42])}


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize(
    ("causal", "order", "dtype"),
    [
        pytest.param(False, "no keys first", torch.bfloat16, marks=pytest.mark.long),
        (True, "no keys first", torch.bfloat16),
        pytest.param(True, "no keys last", torch.float16, marks=pytest.mark.long),  # whose forward is not AMD's
    ],
)
def test_packed_sequences(causal: bool, order: str, dtype: torch.dtype) -> None:
    q, k, v = tensors((40, 1, 128), (42, 1, 128), (42, 1, 128), dtype=dtype)
    starts = _STARTS[order]
    starts_q, starts_k = (torch.tensor(start, dtype=torch.int32) for start in starts)
    is_bf16 = dtype is torch.bfloat16
    mask, short = "causal" if causal else "plain", "bf16" if is_bf16 else "fp16"
    with simulated("asm") if is_bf16 else backends.using(torch_backend) as launched:
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, starts_q, starts_k, 20, 33, causal=causal, return_attn_probs=True
        )  # fmt: skip
    assert not is_bf16 or launched == [f"asm-fwd-bf16-d128-{mask}-varlen"]
    dout = torch.randn_like(out)
    with simulated("asm") as launched:
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    sums, backward = launched
    assert backward == f"asm-bwd-{short}-d128-{mask}-varlen"
    assert sums.startswith(f"dot-{short}-d128-group")
    whole = next(i for i in range(3) if starts[0][i] < starts[0][i + 1] and starts[1][i] < starts[1][i + 1])
    queries, keys = (slice(start[whole], start[whole + 1]) for start in starts)
    own = (q[None, queries], k[None, keys], v[None, keys])
    exact, rough = exact_and_rough(*own, dout[None, queries], causal)
    for name, got, one, other in zip(
        ("out", "dq", "dk", "dv"), (out[queries], dq[queries], dk[keys], dv[keys]), exact, rough, strict=False
    ):
        assert_close(name, got[None], one, rough=other)
    assert_close("lse", lse[None, :, queries], exact[4])
    no_query, no_key = torch.ones(40, dtype=torch.bool), torch.ones(42, dtype=torch.bool)
    no_query[queries] = no_key[keys] = False
    assert not out[no_query].any()
    assert bool((lse[:, no_query] == torch.inf).all())
    assert not dq[no_query].any()
    assert not dk[no_key].any()
    assert not dv[no_key].any()


@pytest.mark.parametrize("packed", [False, True])
def test_values_with_a_head_dim_of_their_own(packed: bool) -> None:
    q, k, v = tensors((1, 70, 2, 192), (1, 140, 1, 192), (1, 140, 1, 128))
    with simulated(target="gfx950") as launched:
        if packed:
            rows = (x.flatten(0, 1) for x in (q, k, v))
            ends = (torch.tensor([0, n], dtype=torch.int32) for n in (70, 140))
            out = flash_attn_varlen_func(*rows, *ends, 70, 140, causal=True)[None]
        else:
            out = flash_attn_func(q, k, v, causal=True)
        dout = torch.randn_like(out)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert launched == [f"asm-fwd-bf16-d192-v128-causal{'-varlen' * packed}"]
    exact, rough = exact_and_rough(q, k, v, dout, causal=True)
    for name, got, one, other in zip(("out", "dq", "dk", "dv"), (out, *gradients), exact, rough, strict=False):
        assert_close(name, got, one, rough=other, dtype=torch.bfloat16)


def test_results_in_the_callers_tensors() -> None:
    """dk and dv are parts of one tensor, whose heads lie apart. Composable Kernel has no sums for this head dim."""
    qkv = tensors((1, 20, 3, 1, 96))[0]
    with simulated() as launched:
        out = flash_attn_func(*qkv.unbind(2))
        dout = torch.randn_like(out)
        (result,) = torch.autograd.grad(out, qkv, dout)
    assert launched == ["asm-bwd-bf16-d128-plain"]
    exact, rough = exact_and_rough(*qkv.unbind(2), dout, causal=False)
    for place, name in enumerate(("dq", "dk", "dv")):
        assert_close(name, result[:, :, place], exact[1 + place], rough=rough[1 + place])


def call(
    seqlen: int = 512, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, value_dim: int = 0, **options: Any
) -> AttentionCall:  # fmt: skip
    dims = (head_dim, head_dim, value_dim or head_dim)
    q, k, v = (torch.empty(1, seqlen, 8, dim, dtype=dtype) for dim in dims)
    return attention_call(q, k, v, softmax_scale=1.0, **options)


@pytest.mark.parametrize(
    ("target", "options", "forward", "backward"),
    [
        ("gfx942", {}, "asm", "asm"),
        ("gfx942", {"causal": True}, "asm", "asm"),
        ("gfx950", {"causal": True}, "asm", "asm"),
        ("gfx942", {"seqlen": 128}, "triton", "asm"),
        ("gfx942", {"dtype": torch.float16}, "triton", "asm"),
        ("gfx942", {"window_size": (64, 0)}, "triton", "asm"),
        ("gfx942", {"head_dim": 64}, "triton", "asm"),
        ("gfx942", {"head_dim": 64, "window_size": (64, 0)}, "triton", "triton"),
        ("gfx942", {"head_dim": 192}, "triton", "asm"),
        ("gfx942", {"head_dim": 256}, "triton", "ck"),
        ("gfx942", {"deterministic": True}, "asm", "triton"),
        ("gfx942", {"dropout_p": 0.1}, "ck", "ck"),
        ("gfx942", {"softcap": 3.0}, "ck", "ck"),
        ("gfx942", {"alibi_slopes": torch.ones(8)}, "ck", "ck"),
        ("gfx942", {"dtype": torch.float32}, "ck", "ck"),
        ("gfx90a", {}, "ck", "ck"),
        ("gfx90a", {"head_dim": 64}, "triton", "ck"),
        ("gfx90a", {"head_dim": 192}, "triton", "ck"),
        ("gfx90a", {"dtype": torch.float16}, "triton", "triton"),
        ("gfx90a", {"head_dim": 256, "dtype": torch.float16, "softcap": 10.0}, "triton", "triton"),
        ("gfx950", {"head_dim": 64}, "triton", "asm"),
        ("gfx950", {"head_dim": 64, "window_size": (64, 0)}, "triton", "triton"),
        ("gfx950", {"head_dim": 40, "causal": True}, "triton", "triton"),
        ("gfx950", {"head_dim": 192}, "triton", "triton"),
        ("gfx950", {"head_dim": 256, "window_size": (64, 0)}, "triton", "triton"),
        ("gfx950", {"head_dim": 192, "value_dim": 128, "causal": True}, "asm", "triton"),
        ("gfx950", {"head_dim": 192, "value_dim": 128, "seqlen": 64}, "triton", "triton"),
        ("gfx950", {"head_dim": 192, "value_dim": 128, "dtype": torch.float16}, "triton", "triton"),
        ("gfx950", {"head_dim": 192, "value_dim": 128, "softcap": 3.0}, "triton", "triton"),
        ("gfx950", {"head_dim": 192, "value_dim": 96}, "triton", "triton"),
        ("gfx942", {"head_dim": 192, "value_dim": 128}, "triton", "triton"),
        ("gfx942", {"head_dim": 512}, "triton", "triton"),
        ("gfx942", {"mask": SimpleNamespace(), "softcap": 3.0}, "triton", "triton"),
    ],
)
def test_who_serves_a_call(target: str, options: dict[str, Any], forward: str, backward: str) -> None:
    with device.using(Recording(target)):
        result = sources.explain(Sources(torch_backend, torch_backend), call(**options))
    assert (result["forward"]["source"], result["backward"]["source"]) == (forward, backward)
    for op in ("forward", "backward"):
        assert (result[op]["kernel"] is not None) is (result[op]["source"] == "asm")
        assert result[op]["why"]


@pytest.mark.parametrize(("target", "triton"), [("gfx90a", True), ("gfx942", False)])
def test_who_serves_a_cache(target: str, triton: bool) -> None:
    """On an MI200 Triton's kernels alone keep small numbers of fp16."""
    q, cache = torch.zeros(1, 1, 2, 64, dtype=torch.float16), torch.zeros(1, 64, 2, 64, dtype=torch.float16)
    of_ck, of_triton = mock.Mock(), mock.Mock()
    with device.using(Recording(target)):
        Sources(of_ck, of_triton).kvcache(cache_call(q, cache, cache, softmax_scale=1.0))
    assert (of_triton.kvcache.called, of_ck.kvcache.called) == (triton, not triton)


def test_a_store_without_assembly_kernels() -> None:
    """As `--without asm` makes it: the next source of the table."""

    class Without(Recording):
        def has_stored(self, name: str) -> bool:  # noqa: ARG002
            return False

    with device.using(Without("gfx950")):
        result = sources.explain(Sources(torch_backend, torch_backend), call())
    assert result["forward"]["source"] == "triton"
    assert "not asm, wheel: it has no asm-fwd-bf16-d128-plain for gfx950" in str(result["forward"]["why"])


def test_a_forced_source_that_cannot() -> None:
    forced = Sources(torch_backend, torch_backend, forced="asm")
    with device.using(Recording("gfx942")):
        assert forced.decide(call(), "fwd").source == "asm"
        with pytest.raises(NotImplementedError, match=r"KERNEL_SOURCE=asm: no assembly kernel does this call \(fwd\)"):
            forced.decide(call(head_dim=64), "fwd")
        result = sources.explain(forced, call(deterministic=True))
    assert result["backward"]["source"] is None
    assert "deterministic: the kernels have none" in str(result["backward"]["why"])


@pytest.mark.parametrize(
    ("variables", "name", "forced"),
    [
        ({}, "sources", None),
        ({"FLASH_ATTENTION_KERNEL_SOURCE": "asm"}, "sources", "asm"),
        ({"FLASH_ATTENTION_KERNEL_SOURCE": "CK"}, "ck", None),
        ({"FLASH_ATTENTION_KERNEL_SOURCE": "triton"}, "triton", None),
        ({"FLASH_ATTENTION_TRITON_AMD_ENABLE": "FALSE"}, "ck", None),
        ({"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}, "triton", None),
        ({"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE", "FLASH_ATTENTION_KERNEL_SOURCE": "asm"}, "sources", "asm"),
    ],
)
def test_the_environment_forces_a_source(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str, forced: str | None
) -> None:
    _environment(monkeypatch, "ck", variables)
    chosen = backends.choose().backend
    kind = "sources" if isinstance(chosen, Sources) else "ck" if isinstance(chosen, ComposableKernel) else "triton"
    assert kind == name
    if isinstance(chosen, Sources):
        assert chosen.forced == forced


@pytest.mark.parametrize(
    ("variables", "there", "expected"),
    [({}, True, "sources"), ({}, False, "triton"), ({"FLASH_ATTENTION_KERNEL_SOURCE": "ck"}, False, "ck")],
)
def test_a_radeon_in_a_wheel_of_all_gpus(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], there: bool, expected: str
) -> None:
    """Triton's kernels serve it without a warning, unless the environment selects another provider."""
    _environment(monkeypatch, "ck", variables)
    monkeypatch.setattr(backends, "problem", lambda: None)
    monkeypatch.setattr(backends, "_chosen", backends.choose())
    monkeypatch.setitem(device.kernels, (3, "ck"), there)
    chosen = backends.select(cast("torch.Tensor", SimpleNamespace(is_cuda=True, get_device=lambda: 3)))
    kind = "sources" if isinstance(chosen, Sources) else chosen.name.rpartition(".")[2]
    assert kind == expected


@pytest.mark.parametrize(
    ("backend", "source", "message"),
    [("ck", "hip", "KERNEL_SOURCE=hip is none of asm, ck, triton"), ("triton", "asm", "does not have: unset it")],
)
def test_a_kernel_provider_that_the_wheel_lacks(
    monkeypatch: pytest.MonkeyPatch, backend: str, source: str, message: str
) -> None:  # fmt: skip
    _environment(monkeypatch, backend, {"FLASH_ATTENTION_KERNEL_SOURCE": source})
    assert message in str(backends.problem())


def _environment(monkeypatch: pytest.MonkeyPatch, backend: str, variables: dict[str, str]) -> None:
    for name in ("FLASH_ATTENTION_KERNEL_SOURCE", "FLASH_ATTENTION_TRITON_AMD_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    build = build_info.load()
    changed = BuildInfo(**{**{name: getattr(build, name) for name in build.__dataclass_fields__}, "backend": backend})
    monkeypatch.setattr(build_info, "load", lambda: changed)


def test_the_table_names_kernels_that_exist() -> None:
    """A row that prefers assembly has a kernel for each of its dtypes at the largest head dim."""
    for row in providers.ROWS:
        assert set(row.sources) <= set(providers.SOURCES)
        if providers.ASM in row.sources:
            for dtype in row.dtypes:
                kind = (row.target, row.op, dtype, row.dims[1], row.masks[0], False, 304, row.value_dim)
                assert assembly.find(*kind) is not None


def test_a_row_of_values_of_another_width_is_for_that_width() -> None:
    (row,) = (row for row in providers.ROWS if row.value_dim and row.op == "fwd")
    asked = (row.target, row.op, row.dtypes[0], row.dims[1], row.masks[0], 4096)
    assert choice.find(*asked, row.value_dim) is row
    assert choice.find(*asked) is not row is not choice.find(*asked, row.value_dim - 8)


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_nothing_is_measured_for_a_user_without_a_home(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    choice._measured.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert choice._measured("gfx942") == ()
    finally:
        choice._measured.cache_clear()


def test_rows_that_were_measured_on_this_machine_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kind = ("gfx942", "fwd", "bf16", 128, "causal", 4096)
    row = providers.Row("gfx942", "fwd", ("bf16",), (65, 128), ("causal",), 129, ("triton", "ck"), "measured here")
    try:
        path = choice.write("gfx942", [row])
        assert choice.find(*kind) == choice.find(*kind[:-1], 129) == row
        assert choice.find(*kind[:-1], 128) in providers.ROWS
        for wrong in ("{", "[1]", '{"rows": [{"op": "fwd"}]}', path.read_text().replace('"ck"', '"sk"')):
            path.write_text(wrong)
            choice._measured.cache_clear()
            choice.find.cache_clear()
            with pytest.warns(RuntimeWarning, match="delete it"):
                assert choice.find(*kind) in providers.ROWS
    finally:
        monkeypatch.undo()
        choice._measured.cache_clear()
        choice.find.cache_clear()


def test_backend_info_names_the_kernel_provider_of_a_call() -> None:
    one = call(seqlen=300)
    with device.using(Recording("gfx942")), backends.using(Sources(torch_backend, torch_backend)):
        told = backend_info(one.q, one.k, one.v, causal=True)["call"]
    assert told["forward"] == {
        "source": "asm",
        "kernel": "asm-fwd-bf16-d128-causal",
        "why": "asm 5288, triton 5594, ck 7242 simulated cycles, with an error of 18%",
    }
    assert backend_info(one.q, one.k, one.v)["call"]["backward"]["source"] == "torch"
    assert "call" not in backend_info()
    with pytest.raises(TypeError, match="pass all three"):
        backend_info(one.q)
    with pytest.raises(TypeError, match="colour"):
        backend_info(one.q, one.k, one.v, colour="red")
