"""The code of AMD targets, run instruction by instruction: what a call gives on each family of GPUs.

More of it: `pytest flash_attn_src/tests/test_triton_backend.py --gfx gfx942`, and so with the tests of the caches,
layers, fp8 and, for Composable Kernel, test_ck_*.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import ck_interpreter
import pytest
import torch
from assert_close import assert_close
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.attention.backends import recording
from flash_attn.core import ck_planner
from flash_attn.core.device import Tensors
from flash_attn.fp8 import flash_attn_fp8_func
from flash_attn.int8 import flash_attn_int8_func
from flash_attn.kernels.tuning.config import ASYNC_COPY, Config
from flash_attn.kernels.variants import Variant
from reference import attention

from amdgpu_simulator import gpu
from amdgpu_simulator.clock import cost
from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.isa import assembly, machine
from rocm_wheels.compile.ck import planner as build
from rocm_wheels.errors import CompileFailed


def long(*row: Any) -> Any:
    """A row of the job of the long tests."""
    return pytest.param(*row, marks=pytest.mark.long)


# One of each family: how they multiply matrices, count lanes and address memory differs. An Instinct and a Radeon run
# always; other files run calls on the other families.
TARGETS = (
    *("gfx942", "gfx1201"),
    # Beside gfx1030 it has no dot instructions; beside gfx1010, gfx1012 has some. gfx11-generic is compiled as gfx1100.
    *map(long, ("gfx908", "gfx90a", "gfx950", "gfx1030", "gfx1100", "gfx10-1-generic", "gfx1012", "gfx11-generic")),
)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def results(call: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output of a call and its gradients."""
    given = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = call(*given)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, weights)]


def check(found: list[torch.Tensor], book: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Compares with reference attention in fp32. Allows twice the error of the reference in the dtype of the inputs."""
    exact = results(lambda *x: book(*x, dtype=torch.float32), inputs)
    rounded = results(lambda *x: book(*x, dtype=None), inputs)
    for name, mine, expected, same in zip(("out", "dq", "dk", "dv"), found, exact, rounded, strict=True):
        assert_close(name, mine, expected, rough=same)


@pytest.mark.parametrize("target", TARGETS)
def test_forward_and_backward(target: str) -> None:
    """Shared memory, with its bank conflicts, is busy for less than twice the time of the matrix units: K once lay with
    16 lanes on one of CDNA's banks."""
    inputs = tensors((1, 70, 2, 64), (1, 90, 1, 64), (1, 90, 1, 64), dtype=torch.bfloat16)
    counted: list[Record] = []

    def program(kernel: assembly.Kernel) -> machine.Program:
        counted.append(Record(kernel))
        return machine.Program(kernel, counted[-1])

    with gpu.pretend(target, program=program) as launched:
        result = results(lambda *x: flash_attn_func(*x, causal=True), inputs)
    assert launched == ["fwd-bf16-d64", "bwd-dq-bf16-d64", "bwd-dkdv-bf16-d64"]
    check(result, lambda *x, dtype: attention(*x, causal=True, dtype=dtype)[0], inputs)
    rates = cost.rates(target)
    for one in counted:
        matrix = one.cycles["matrix"] / rates.simds
        assert one.cycles["shared"] < 2 * matrix or not matrix, one.kernel.symbol


@pytest.mark.parametrize(
    ("dim", "kind", "options"),
    [
        long(64, "", {}),
        (128, "", {}),
        long(176, "", {}),
        long(128, "-sink", {"s_aux": torch.tensor([0.5, 3.0])}),
        long(128, "-alibi", {"alibi_slopes": torch.tensor([0.5, 0.1])}),
    ],
)
def test_direct_copies(dim: int, kind: str, options: dict[str, torch.Tensor]) -> None:
    """Three blocks of keys without a mask and one with a mask: a copy is under way while another one is read."""
    inputs = tensors((1, 70, 2, dim), (1, 250, 1, dim), (1, 250, 1, dim), dtype=torch.bfloat16)
    with gpu.pretend("gfx950") as launched, torch.no_grad():
        result = flash_attn_func(*inputs, **options)
    assert launched == [f"fwd-bf16-d{dim if dim < 176 else 192}{kind}"]
    exact, rounded = (attention(*inputs, **options, dtype=dtype)[0] for dtype in (torch.float32, None))
    assert_close("out", result, exact, rough=rounded)


@pytest.mark.parametrize(
    ("target", "variant"),
    [
        ("gfx942", Variant("fwd", "bf16", 64, "plain")),
        ("gfx950", Variant("fwd", "bf16", 128, "plain")),
        long("gfx90a", Variant("fwd", "bf16", 64, "plain")),
        long("gfx942", Variant("fwd", "fp16", 128, "plain")),
        long("gfx942", Variant("fwd", "bf16", 64, "softcap")),
        long("gfx950", Variant("fwd", "bf16", 64, "plain")),
        long("gfx950", Variant("fwd-v", "bf16", 128, "plain")),
        long("gfx950", Variant("fwd", "bf16", 128, "dropout")),
    ],
)
def test_waves_have_priorities(target: str, variant: Variant) -> None:
    """In both loops (without and with a mask), the scaling of the output raises the priority, which then falls."""
    _, entry, text = gpu.compiled(target, variant)
    assert entry["options"]["wave_priorities"] == 1
    assert re.findall(r"s_setprio (\d)", text) == ["0", "1", "0"] * 2


def test_a_direct_copy_that_the_compiler_waits_wrongly_for_is_refused() -> None:
    config = Config(64, 32, 2, 2, options=ASYNC_COPY)
    with pytest.raises(CompileFailed, match="bwd-dq-bf16-d64 for gfx950 has a direct copy"):
        gpu.compiled("gfx950", Variant("bwd-dq", "bf16", 64, "plain"), config)


@pytest.mark.parametrize(
    ("target", "dtype", "dim", "bucket"),
    [
        ("gfx942", "bf16", 64, 64),
        long("gfx942", "fp16", 128, 128),
        long("gfx942", "fp16", 96, 96),
        long("gfx1100", "fp16", 72, 96),
    ],
)
def test_varlen_with_a_window(target: str, dtype: str, dim: int, bucket: int) -> None:
    starts = torch.tensor([0, 70, 70, 101], dtype=torch.int32)
    inputs = tensors(*[(101, 2, dim)] * 3, dtype=torch.float16 if dtype == "fp16" else torch.bfloat16)

    def book(*packed: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        pieces = [[x[None, a:b] for x in packed] for a, b in pairwise(starts.tolist())]
        return torch.cat([attention(*piece, window=(20, 3), dtype=dtype)[0][0] for piece in pieces])

    with gpu.pretend(target) as launched:
        call = lambda *x: flash_attn_varlen_func(*x, starts, starts, 70, 70, window_size=(20, 3))  # noqa: E731
        result = results(call, inputs)
    assert launched == [f"{op}-{dtype}-d{bucket}" for op in ("fwd", "bwd-dq", "bwd-dkdv")]
    check(result, book, inputs)


@pytest.mark.parametrize(("target", "dim"), [long("gfx942", 64), long("gfx950", 128), ("gfx1201", 64)])
def test_dropout(target: str, dim: int) -> None:
    inputs = tensors(*[(1, 90, 1, dim)] * 3, dtype=torch.bfloat16)
    with gpu.pretend(target):
        torch.manual_seed(7)
        result = results(lambda *x: flash_attn_func(*x, dropout_p=0.3), inputs)
        torch.manual_seed(7)
        out, _, dmask = flash_attn_func(*inputs, dropout_p=0.3, return_attn_probs=True)
    kept = dmask >= 0
    assert torch.equal(out, result[0])
    assert abs(float(kept.float().mean()) - 0.7) < 0.02
    check(result, lambda *x, dtype: attention(*x, dropout_p=0.3, kept=kept, dtype=dtype)[0], inputs)


@pytest.mark.long
def test_the_order_of_waves_changes_nothing() -> None:
    """On a GPU, waves run in any order between two barriers. Eight heads go to eight dies."""
    inputs = tensors(*[(1, 100, 8, 32)] * 3, dtype=torch.bfloat16)
    runs = []
    for backwards in (False, True):
        with gpu.pretend("gfx942", backwards=backwards):
            runs.append(results(flash_attn_func, inputs))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    check(runs[0], lambda *x, dtype: attention(*x, dtype=dtype)[0], inputs)


@pytest.mark.parametrize(("target", "form"), [("gfx942", "fp8e4b8"), long("gfx950", "fp8e4nv"), ("gfx1201", "fp8e4nv")])
def test_fp8(target: str, form: str) -> None:
    """The two formats, which differ in their exponent's bias."""
    inputs = tensors(*[(1, 90, 1, 64)] * 3, dtype=torch.float16)
    with gpu.pretend(target) as launched, torch.no_grad():
        out = flash_attn_fp8_func(*inputs, causal=True)
    cast = ["fp8-amax-fp16-d64", "fp8-cast-fp16-d64"]
    assert launched == [*cast, *cast, cast[0], "fp8-cast-v-fp16-d64", f"fp8-fwd-{form}-d64"]
    exact = attention(*inputs, causal=True)[0]
    assert float((out.float() - exact).square().mean() / exact.square().mean()) ** 0.5 < 0.08


@pytest.mark.parametrize(
    ("target", "form", "dtype"),
    [
        ("gfx942", "fp8e4b8", torch.float8_e4m3fnuz),
        long("gfx950", "fp8e4nv", torch.float8_e4m3fn),
        ("gfx1201", "fp8e4nv", torch.float8_e4m3fn),
    ],
)
def test_a_cache_in_fp8(target: str, form: str, dtype: torch.dtype) -> None:
    """Every number of FP8 is exact as the value of an only key, and NaN stays NaN."""
    ones = torch.ones(4, 1)
    q, k, v = tensors((4, 1, 2, 64), (4, 90, 1, 64), (4, 90, 1, 64), dtype=torch.float16)
    k, v = k.to(dtype), v.to(dtype)
    v[:, 0] = torch.arange(256, dtype=torch.uint8).view(dtype).view(4, 1, 64)
    with gpu.pretend(target) as launched:
        alone = flash_attn_with_kvcache(q, k, v, cache_seqlens=1, num_splits=1, k_descale=ones, v_descale=ones)
        out = flash_attn_with_kvcache(q, k[:, 1:], v[:, 1:], num_splits=1, k_descale=ones / 2, v_descale=ones)
    assert launched == [f"decode-{form}-d64"] * 2
    torch.testing.assert_close(alone, v[:, :1].to(torch.float16).expand_as(alone), rtol=0, atol=0, equal_nan=True)
    inputs = q, k[:, 1:].to(torch.float16) / 2, v[:, 1:].to(torch.float16)
    rough, exact = (attention(*inputs, dtype=of)[0] for of in (None, torch.float32))
    assert_close("out", out, exact, rough=rough)


@pytest.mark.parametrize("target", ["gfx1100", long("gfx1201")])
def test_int8(target: str) -> None:
    inputs = tensors(*[(1, 90, 1, 64)] * 3, dtype=torch.bfloat16)
    with gpu.pretend(target) as launched, torch.no_grad():
        out = flash_attn_int8_func(*inputs, causal=True)
    assert launched == ["int8-cast-q-bf16-d64", "int8-cast-k-bf16-d64", "int8-fwd-bf16-d64"]
    exact = attention(*inputs, causal=True)[0]
    assert float((out.float() - exact).square().mean() / exact.square().mean()) ** 0.5 < 0.02


@pytest.mark.parametrize(("page_size", "op"), [long(128, "decode"), (16, "decode-paged")])
def test_a_paged_cache(page_size: int, op: str) -> None:
    """Appends a token with rotary embedding to sequences in pages, then attends in parts."""
    q, k, v = tensors((2, 1, 4, 64), (2, 1, 2, 64), (2, 1, 2, 64), dtype=torch.float16)
    pages = tensors(*((768 // page_size, page_size, 2, 64),) * 2, dtype=torch.float16)
    cos, sin = tensors((256, 16), (256, 16), dtype=torch.float16)
    lengths = torch.tensor([130, 40], dtype=torch.int32)
    order = torch.randperm(768 // page_size, generator=torch.Generator().manual_seed(0))
    table = order[: 512 // page_size].int().view(2, -1)

    def call(caches: list[torch.Tensor]) -> torch.Tensor:
        return flash_attn_with_kvcache(
            q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, block_table=table, causal=True,
            num_splits=2,
        )  # fmt: skip

    mine, theirs = [page.clone() for page in pages], [page.clone() for page in pages]
    with gpu.pretend("gfx942") as launched:
        result = call(mine)
    assert [name.partition("-fp16")[0] for name in launched] == ["append", op, "combine"]
    assert_close("out", result, call(theirs).float(), tiny=2e-3)
    for one, other in zip(mine, theirs, strict=True):
        assert_close("cache", one, other.float(), tiny=2e-3)


@pytest.mark.parametrize("target", [long("gfx950"), "gfx1100"])
def test_values_with_a_head_dim_of_their_own(target: str) -> None:
    inputs = tensors((1, 40, 2, 192), (1, 150, 1, 192), (1, 150, 1, 128), dtype=torch.bfloat16)
    with gpu.pretend(target) as launched, torch.no_grad():
        out = flash_attn_func(*inputs, causal=True)
    assert launched == ["fwd-v-bf16-d192"]
    exact, rounded = (attention(*inputs, causal=True, dtype=dtype)[0] for dtype in (torch.float32, None))
    assert_close("out", out, exact, rough=rounded)


def test_latent_attention() -> None:
    """A paged cache of 576 columns, whose first 512 are the values, too."""
    q, cache = tensors((1, 1, 4, 576), (3, 32, 1, 576), dtype=torch.float16)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    with gpu.pretend("gfx942") as launched:
        out = flash_attn_with_kvcache(q, cache, cache[..., :512], cache_seqlens=90, block_table=table, num_splits=1)
    assert launched == ["latent-fp16-d512"]
    keys = cache[table[0].long()].flatten(0, 1)[None, :90]
    exact, rounded = (attention(q, keys, keys[..., :512], dtype=dtype)[0] for dtype in (torch.float32, None))
    assert_close("out", out, exact, rough=rounded)


@pytest.fixture
def _planner(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ck_planner, "PATH", build.build(tmp_path, cache=gpu.CACHE))
        ck_planner.library.cache_clear()
        yield
    ck_planner.library.cache_clear()


@pytest.fixture
def launched(_planner: None) -> Iterator[list[ck_planner.Launch]]:
    """Calls go to Composable Kernel: its forward and combine as code of gfx942, the others by what they compute."""

    def run(launches: Sequence[ck_planner.Launch], tensors: Tensors) -> None:
        for launch in launches:
            if launch.kernel.startswith(("fwd", "combine")):
                gpu.run("gfx942", [launch], tensors)
            else:
                ck_interpreter.run([launch])

    with recording.record("gfx942", run=run) as launches, torch.no_grad():
        yield launches


# A forward of Composable Kernel takes a minute to compile: test_asm_backend.py runs its small kernels always.
@pytest.mark.long
@pytest.mark.parametrize(("heads", "dim", "bucket"), [(2, 64, 64), (1, 160, 192)])
def test_composable_kernel(launched: list[ck_planner.Launch], heads: int, dim: int, bucket: int) -> None:
    """The forward, from the planner's grid and argument on. Of 192, no power of two, V's tile once was four of them.
    A row of NaN, whose bits are all set, stays NaN when it is rounded."""
    inputs = tensors((1, 150, heads, dim), (1, 201, 1, dim), (1, 201, 1, dim), dtype=torch.bfloat16)
    inputs[0][0, 3].view(torch.int16).fill_(0x7FFF)
    out = flash_attn_func(*inputs)
    assert [launch.kernel for launch in launched] == [f"fwd-bf16-d{bucket}-batch"]
    exact, rounded = (attention(*inputs, dtype=dtype)[0] for dtype in (torch.float32, None))
    assert_close("out", out, exact, rough=rounded)


@pytest.mark.long
def test_composable_kernel_combines(launched: list[ck_planner.Launch]) -> None:
    """Rows of log-sum-exps once overlapped, so that two waves wrote to one address."""
    q, k, v = tensors((2, 1, 8, 64), (2, 300, 2, 64), (2, 300, 2, 64), dtype=torch.bfloat16)
    out, lse = flash_attn_with_kvcache(q, k, v, num_splits=12, return_softmax_lse=True)
    assert [launch.kernel for launch in launched] == ["splitkv-bf16-d64-batch", "combine-bf16-d64-batch-splits4"]
    (exact, exact_lse), (rounded, _) = (attention(q, k, v, dtype=dtype) for dtype in (torch.float32, None))
    assert_close("out", out, exact, rough=rounded)
    assert_close("lse", lse, exact_lse, tiny=1e-4)
