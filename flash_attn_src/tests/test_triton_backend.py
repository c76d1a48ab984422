"""The Triton kernels against attention by the book: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn import backends
from flash_attn.backends import triton as backend
from flash_attn.backends import triton_attention, triton_kernels
from flash_attn.kernels import flags, launches, tuning
from flash_attn.runtime import launch, variants

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

# numpy warns where the interpreter computes what a GPU computes silently: log2(0), exp2 of something large.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _interpreter_multiplies_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bf16 as integers and multiplies those (seen in 3.7.1): widen them first."""
    if GPU:
        return
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest))


def _use_tiles(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    small = tuning.Config(32, 16, 4, 1, depth=depth)
    if not GPU:
        monkeypatch.setattr(tuning, "config", lambda target, variant: small)  # noqa: ARG005
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(triton_kernels, "_kernels", {})


@pytest.fixture
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that short sequences span several."""
    _use_tiles(monkeypatch, 0)


@pytest.fixture
def _deep_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with the head dim in pieces, as targets without matrix cores take it."""
    _use_tiles(monkeypatch, 16)


class Options(NamedTuple):
    """What a call may ask for, as both the backend and the reference take it."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: int = 0
    softmax_scale: float | None = None


class Lengths(NamedTuple):
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_q: int = 0
    max_k: int = 0


DENSE = Lengths()


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    options: Options,
    slopes: torch.Tensor | None,
    lengths: Lengths = DENSE,
) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv of the Triton backend."""
    scale = options.softmax_scale or q.shape[-1] ** -0.5
    common = (scale, options.causal, *options.window, options.softcap, slopes, 0.0)
    out, lse, _, _ = backend.forward(q, k, v, None, *common, False, None, *lengths, None, None, None)
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    backend.backward(dout, q, k, v, out, lse, *grads, *common, False, None, *lengths)
    return out, lse, *grads


def _wanted(
    tensors: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    options: Options,
    slopes: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    leaves = tuple(x.detach().to(dtype).requires_grad_() for x in tensors)
    out, lse = reference.attention(
        *leaves, causal=options.causal, window=options.window, softcap=options.softcap,
        softmax_scale=options.softmax_scale, alibi_slopes=slopes, dtype=dtype,
    )  # fmt: skip
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))


def _compare(got: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...], rough: tuple[torch.Tensor, ...]) -> None:
    for name, value, best, worse in zip(("out", "lse", "dq", "dk", "dv"), got, exact, rough, strict=True):
        assert_close(name, value, best, rough=None if name == "lse" else worse, tiny=2e-5 if name == "lse" else 1e-5)


def _check(
    batch: int, sq: int, sk: int, heads: int, heads_k: int, dim: int, dtype: torch.dtype, options: Options
) -> None:
    generator = torch.Generator().manual_seed(sq * 1000 + sk * 10 + dim)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    q, dout = draw(batch, sq, heads, dim), draw(batch, sq, heads, dim)
    k, v = draw(batch, sk, heads_k, dim), draw(batch, sk, heads_k, dim)
    slopes = None
    if options.alibi:
        shape = (heads,) if options.alibi == 1 else (batch, heads)
        slopes = torch.rand(shape, generator=generator).to(DEVICE)
    got = _run(q, k, v, dout, options, slopes)
    tensors = (q, k, v)
    _compare(
        got,
        _wanted(tensors, dout, options, slopes, torch.float64),
        _wanted(tensors, dout, options, slopes, dtype),
    )


MASKS = {
    "full": Options(),
    "causal": Options(causal=True),
    "left": Options(window=(20, -1)),
    "right": Options(window=(-1, 5)),
    "both": Options(window=(30, 11)),
    "causal window": Options(causal=True, window=(17, 40)),
    "diagonal": Options(window=(0, 0)),
}
SIZES = [(1, 1), (1, 50), (64, 64), (33, 90), (70, 41), (57, 7), (0, 9), (9, 0)]


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("sq", "sk"), SIZES)
def test_masks_and_lengths(sq: int, sk: int, mask: str) -> None:
    _check(1, sq, sk, 2, 1, 24, torch.float32, MASKS[mask])


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [8, 32, 40, 64, 72, 96, 128, 160, 200, 256])
def test_head_dims_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    _check(1, 41, 50, 1, 1, dim, dtype, Options(causal=True))


@pytest.mark.usefixtures("_deep_tiles")
@pytest.mark.parametrize("mask", ["full", "causal", "both"])
@pytest.mark.parametrize("dim", [24, 64, 72, 96])
def test_head_dim_in_pieces(dim: int, mask: str) -> None:
    _check(1, 41, 50, 2, 1, dim, torch.float32, MASKS[mask])


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "heads_k"), [(4, 4), (6, 2), (5, 1), (8, 1)])
def test_grouped_heads(heads: int, heads_k: int, dtype: torch.dtype) -> None:
    _check(2, 35, 40, heads, heads_k, 32, dtype, Options(causal=True))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_query_heads_shared_out(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """dk and dv of a group's parts are added up, into tensors of any layout."""
    monkeypatch.setattr(triton_attention, "parts_of", lambda *_: parts)
    _check(2, 20, 35, 8, 2, 24, torch.float16, Options(causal=True, alibi=2))
    q, dout = torch.randn(2, 1, 20, 8, 16, device=DEVICE)
    k, v = torch.randn(2, 1, 30, 2, 16, device=DEVICE)
    common = (0.25, False, -1, -1, 0.0, None, 0.0)
    out, lse, _, _ = backend.forward(q, k, v, None, *common, False, None, *DENSE, None, None, None)
    grads = torch.empty(2, 1, 2, 30, 17, device=DEVICE)[..., 1:].transpose(2, 3)
    dense = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    backend.backward(dout, q, k, v, out, lse, dense[0], *grads, *common, False, None, *DENSE)
    backend.backward(dout, q, k, v, out, lse, *dense, *common, False, None, *DENSE)
    assert torch.equal(grads, torch.stack(dense[1:]))


def test_how_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as there are programs enough with, of those that divide the group and leave each two query heads; one
    where there is little to do."""
    monkeypatch.setattr(launch, "compute_units", lambda _: 100)
    found = [triton_kernels.parts_of(8, programs, 512, 9, 0) for programs in (0, 1, 74, 75, 149, 150, 299, 300)]
    assert found == [1, 4, 4, 4, 4, 2, 2, 1]
    assert triton_kernels.parts_of(8, 75, 511, 9, 0) == 1
    assert [triton_kernels.parts_of(8, 75, 512, most, 0) for most in range(5)] == [1, 1, 2, 2, 4]
    assert [triton_kernels.parts_of(group, 101, 4096, 9, 0) for group in (1, 2, 3, 4, 6, 7, 9)] == [1, 1, 1, 2, 3, 1, 3]


@pytest.mark.parametrize("count", range(2, 10))
def test_parts_are_added_up(count: int) -> None:
    parts = torch.randn(5, 3, count, 8)
    result = torch.empty(5, 3, 9, dtype=torch.bfloat16)[..., 1:]
    wanted = parts.double().sum(-2)
    triton_kernels.add_parts(parts, result)
    torch.testing.assert_close(result, wanted.bfloat16(), rtol=2**-8, atol=1e-6)


EXTRAS = {
    "softcap": Options(softcap=3.0, causal=True),
    "alibi": Options(alibi=1),
    "alibi per batch entry": Options(alibi=2, causal=True),
    "softcap, alibi, window": Options(softcap=5.0, alibi=2, window=(20, 7)),
    "negative scale": Options(softmax_scale=-0.4),
    "tiny scale": Options(softmax_scale=1e-30),
    "large scale": Options(softmax_scale=3.0),
}


@pytest.mark.skipif(GPU, reason="a GPU has the rounding of its own target")
@pytest.mark.usefixtures("_tiles")
def test_rounding_by_an_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 on targets without an instruction for it is as good as rounding to even."""
    assert tuning.half_up("gfx942")
    assert not tuning.half_up(launch.INTERPRETED)
    monkeypatch.setattr(launch, "INTERPRETED", "gfx942")
    _check(2, 37, 45, 2, 2, 32, torch.bfloat16, Options(causal=True))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_score_options(extra: str, dtype: torch.dtype) -> None:
    _check(2, 37, 45, 2, 2, 32, dtype, EXTRAS[extra])


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([37, 0, 5, 20], [30, 9, 0, 61]), ([1, 0, 5, 2, 140, 3, 1], [1, 0, 9, 150, 60, 0, 2])],
    ids=["as long as the longest", "packed blocks"],
)
def test_varlen_equals_dense_calls(
    monkeypatch: pytest.MonkeyPatch, lengths_q: list[int], lengths_k: list[int], causal: bool
) -> None:
    """Unequal lengths, an empty query sequence, an empty key sequence; bit for bit as one call each, where these do not
    share out query heads in another way."""
    monkeypatch.setattr(triton_attention, "parts_of", lambda *_: 2 if causal else 1)
    torch.manual_seed(0)
    q, dout = torch.randn(2, sum(lengths_q), 4, 16, device=DEVICE)
    k, v = torch.randn(2, sum(lengths_k), 2, 16, device=DEVICE)
    cu = [
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
        for lengths in (lengths_q, lengths_k)
    ]
    options = Options(causal=causal)
    got = _run(q, k, v, dout, options, None, Lengths(*cu, max(lengths_q), max(lengths_k)))
    parts = zip(*(x.split(lengths_q) for x in (q, dout)), *(x.split(lengths_k) for x in (k, v)), strict=True)
    one_by_one = [_run(*(x[None] for x in (q, k, v, dout)), options, None) for q, dout, k, v in parts]
    for index, name in enumerate(("out", "lse", "dq", "dk", "dv")):
        pieces = [result[index][0] for result in one_by_one]
        assert torch.equal(got[index], torch.cat(pieces, dim=1 if name == "lse" else 0)), name


@pytest.fixture
def _unwritten_is_nan() -> Iterator[None]:
    """What nothing writes to shows as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_tiles", "_unwritten_is_nan")
@pytest.mark.parametrize("dim", [64, 72])
@pytest.mark.parametrize(
    "bounds",
    [[0, 5, 9], [3, 40, 40, 77], [*range(150, 160), 159, 300], [0, 0], [100, 100], [0]],
    ids=str,
)
def test_rows_outside_every_sequence(monkeypatch: pytest.MonkeyPatch, bounds: list[int], dim: int) -> None:
    """Their results and gradients are 0, as those of no key; the others are not touched by them. Nor do the parts of
    dk and dv have other rows."""
    monkeypatch.setattr(triton_attention, "parts_of", lambda *_: 2 if dim == 72 else 1)
    q, dout = (torch.randn(400, 2, dim, device=DEVICE, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(420, 1, dim, device=DEVICE, dtype=torch.float16) for _ in range(2))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    longest = max((b - a for a, b in itertools.pairwise(bounds)), default=0)
    found = _run(q, k, v, dout, Options(), None, Lengths(cu_seqlens, cu_seqlens, longest, longest))
    for name, tensor in zip(("out", "lse", "dq", "dk", "dv"), found, strict=True):
        rows = tensor.T if name == "lse" else tensor
        outside = torch.ones(rows.shape[0], dtype=torch.bool)
        outside[bounds[0] : bounds[-1]] = False
        assert (rows[outside] == (torch.inf if name == "lse" else 0.0)).all(), name
        assert rows[~outside].isfinite().all(), name


def test_blocks_of_a_grid() -> None:
    """As many for each sequence as the longest has, or those of all rows where these are fewer by a third."""
    assert triton_kernels.grid_of(64, 100, 3, 5, 300) == (2, 15, 0)
    assert triton_kernels.grid_of(64, 640, 3, 5, 3 * 640) == (10, 15, 0)
    assert triton_kernels.grid_of(64, 640, 4, 5, 900) == (18, 5, flags.PACKED_BLOCKS)
    assert triton_kernels.grid_of(64, 0, 4, 5, 900) == (0, 20, 0)
    assert triton_kernels.grid_of(64, 100, 0, 5, 900) == (2, 0, 0)


@pytest.mark.usefixtures("_tiles")
def test_more_sequences_than_are_looked_at_at_once() -> None:
    """A program finds its own among them: one key is the whole result, which a few long sequences interrupt."""
    lengths = [1] * 300
    lengths[0], lengths[255], lengths[299] = 40, 33, 140
    torch.manual_seed(9)
    q, k, v = torch.randn(3, sum(lengths), 1, 16, device=DEVICE)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    lengths_of = Lengths(cu_seqlens, cu_seqlens, 140, 140)
    common = (0.25, True, -1, -1, 0.0, None, 0.0)
    out, lse, _, _ = backend.forward(q, k, v, None, *common, False, None, *lengths_of, None, None, None)
    pieces = zip(lengths, *(x.split(lengths) for x in (q, k, v, out)), lse.split(lengths, dim=1), strict=True)
    for length, one_q, one_k, one_v, one_out, one_lse in pieces:
        if length == 1:
            torch.testing.assert_close(one_out, one_v)
            torch.testing.assert_close(one_lse[0, 0], 0.25 * (one_q * one_k).sum())
        else:
            dense = (x[None] for x in (one_q, one_k, one_v))
            wanted, wanted_lse, _, _ = backend.forward(*dense, None, *common, False, None, *DENSE, None, None, None)
            assert torch.equal(one_out, wanted[0])
            assert torch.equal(one_lse, wanted_lse[0])


@pytest.mark.usefixtures("_tiles")
def test_seqused_and_leftpad_choose_the_keys() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 40, 2, 16, device=DEVICE) for _ in range(3))
    used = torch.tensor([33, 20], dtype=torch.int32, device=DEVICE)
    pad = torch.tensor([4, 0], dtype=torch.int32, device=DEVICE)
    args = (0.25, True, -1, -1, 0.0, None, 0.0, False, None, None, None, 40, 40)
    out, lse, _, _ = backend.forward(q, k, v, None, *args, used, pad, None)
    for entry in range(2):
        keys = slice(int(pad[entry]), int(used[entry]))
        wanted, wanted_lse, _, _ = backend.forward(
            q[entry, None], k[entry, None, keys], v[entry, None, keys], None, *args, None, None, None
        )
        assert torch.equal(out[entry], wanted[0])
        assert torch.equal(lse[entry], wanted_lse[0])


@pytest.mark.usefixtures("_tiles")
def test_layouts_do_not_change_the_result() -> None:
    """Transposed, expanded, offset by less than 16 bytes, packed: the same bits as contiguous copies."""
    torch.manual_seed(2)
    base = torch.randn(2, 3, 50, 40, device=DEVICE)
    offset = torch.randn(2 * 50 * 3 * 40 + 1, device=DEVICE)[1:].view(2, 50, 3, 40)
    expanded = torch.randn(2, 50, 1, 40, device=DEVICE).expand(2, 50, 3, 40)
    q, k, v = base.transpose(1, 2), offset, expanded
    dout = torch.randn(2, 50, 3, 40, device=DEVICE)
    options = Options(causal=True)
    got = _run(q, k, v, dout, options, None)
    wanted = _run(q.contiguous(), k.clone(), v.contiguous(), dout, options, None)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


@pytest.mark.usefixtures("_tiles")
def test_rows_too_far_apart_for_the_kernels_are_copied() -> None:
    """The compiler is told a bound of the row stride: beyond it a tile could span more than 2 GiB."""
    stride = flags.MAX_ROW_STRIDE * 4
    storage = torch.zeros(stride * 3 + 32, device=DEVICE)
    far = storage.as_strided((1, 4, 2, 16), (0, stride, 16, 1)).copy_(torch.randn(1, 4, 2, 16))
    assert triton_kernels.aligned(far, 4) is not far
    near = storage.as_strided((1, 4, 2, 16), (0, stride - 4, 16, 1))
    assert triton_kernels.aligned(near, 4) is near
    dout = torch.randn(1, 4, 2, 16, device=DEVICE)
    got = _run(far, far, far, dout, Options(), None)
    wanted = _run(*(far.contiguous(),) * 3, dout, Options(), None)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 4, 2, 16), (2**31 + 64, 32, 16, 1)),
        ((1, 4, 2, 16), (0, 16, 2**31 + 64, 1)),
        ((1, 264, 1, 16), (0, (flags.MAX_ROW_STRIDE - 1) * 8, 16, 1)),
    ],
    ids=["batch", "heads", "rows"],
)
def test_offsets_beyond_32_bits(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Tensors that span more than 2^31 elements; of 4 GiB of addresses the test touches a few pages."""
    torch.manual_seed(8)
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    assert span > 2**31
    q, k, v, dout = (
        torch.empty(span, dtype=torch.float16, device=DEVICE).as_strided(shape, strides).copy_(torch.randn(shape))
        for _ in range(4)
    )
    options = Options(window=(5, 0))
    got = _run(q, k, v, dout, options, None)
    wanted = _run(*(x.contiguous() for x in (q, k, v, dout)), options, None)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


@pytest.mark.usefixtures("_tiles")
def test_gradients_land_in_strided_buffers() -> None:
    torch.manual_seed(3)
    q, k, v, dout = torch.randn(4, 1, 33, 2, 16, device=DEVICE)
    args = (0.25, False, -1, -1, 0.0, None, 0.0)
    out, lse, _, _ = backend.forward(q, k, v, None, *args, False, None, None, None, 33, 33, None, None, None)
    packed = torch.full((1, 33, 3, 2, 16), torch.nan, device=DEVICE)
    odd = torch.full((1, 33, 2, 17), torch.nan, device=DEVICE)[..., 1:]
    plain = tuple(torch.empty_like(q) for _ in range(3))
    backend.backward(dout, q, k, v, out, lse, *plain, *args, False, None, None, None, 33, 33)
    backend.backward(dout, q, k, v, out, lse, *packed.unbind(2), *args, False, None, None, None, 33, 33)
    assert torch.equal(packed, torch.stack(plain, 2))
    backend.backward(dout, q, k, v, out, lse, odd, *plain[1:], *args, False, None, None, None, 33, 33)
    assert torch.equal(odd, plain[0])


# Call -> the kind of kernel that serves it, in a 16-bit type and in fp32.
KINDS = {
    "nothing": ((0.0, None, 0.0, 0.5), "plain", "plain"),
    "alibi": ((0.0, torch.ones(1), 0.0, 0.5), "alibi", "any"),
    "dropout": ((0.0, None, 0.1, 0.5), "dropout", "any"),
    "softcap": ((2.0, None, 0.0, 0.5), "softcap", "any"),
    "two things": ((0.0, torch.ones(1), 0.1, 0.5), "any", "any"),
    "negative scale": ((0.0, None, 0.0, -0.5), "any", "any"),
    "dropout, scale 0": ((0.0, None, 0.1, 0.0), "any", "any"),
}


@pytest.mark.parametrize("call", KINDS)
def test_a_call_gets_the_kernel_that_does_what_it_asks_for_and_no_more(call: str) -> None:
    arguments, half, single = KINDS[call]
    kind = triton_kernels.score_kind(*arguments)
    assert variants.serving("fwd", "bf16", kind) == half
    assert variants.serving("bwd-dq", "fp32", kind) == single
    assert variants.serving("append", "bf16", kind) == "plain"


@pytest.mark.parametrize("target", ["gfx90a", "gfx950", "gfx1030", "gfx1201", "sm_90"])
def test_a_launch_gives_each_kernel_the_constants_that_it_takes(target: str) -> None:
    for variant in variants.table(target):
        specification = launches.specification(variant, target)
        module = importlib.import_module(f"flash_attn.kernels.{specification.module}")
        parameters = inspect.signature(getattr(module, specification.symbol).fn).parameters.values()
        taken = {parameter.name for parameter in parameters if parameter.annotation == "tl.constexpr"}
        assert set(specification.constants) == taken, variant.name


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(
    ("dtype", "alibi"), [(torch.float16, False), (torch.float16, True), (torch.float32, False)], ids=str
)
def test_dropout_drops_the_same_in_forward_and_backward(dtype: torch.dtype, alibi: bool) -> None:
    """out and the gradients are those of the reference under the mask that the kernels drew."""
    torch.manual_seed(4)
    heads, size, dropout_p = 2, 48, 0.3
    q, k, v, dout = torch.randn(4, 1, size, heads, 64, device=DEVICE).to(dtype)
    slopes = torch.rand(heads, device=DEVICE) / 8 if alibi else None
    args = (0.125, False, -1, -1, 0.0, slopes, dropout_p)
    tail = (None, None, size, size, None, None, None)
    # With v the identity, out shows which probabilities were kept.
    eye = torch.zeros_like(v)
    eye[0, :, :, :size] = torch.eye(size, device=DEVICE)[:, None].expand(size, heads, size)
    shown, _, _, state = backend.forward(q, k, eye, None, *args, False, None, *tail)
    assert state is not None
    kept = (shown[..., :size] != 0).permute(0, 2, 1, 3)
    assert 0.65 < kept.float().mean() < 0.75
    assert not torch.equal(kept[0, 0], kept[0, 1])

    out, lse, _, again = backend.forward(q, k, v, None, *args, False, state, *tail)
    assert again is state
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    backend.backward(dout, q, k, v, out, lse, *grads, *args, False, state, None, None, size, size)

    def wanted(compute: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = tuple(x.detach().to(compute).requires_grad_() for x in (q, k, v))
        out, lse = reference.attention(*leaves, alibi_slopes=slopes, dropout_p=dropout_p, kept=kept, dtype=compute)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(compute))

    _compare((out, lse, *grads), wanted(torch.float64), wanted(dtype))


@pytest.mark.usefixtures("_tiles")
def test_dropout_draws_anew_at_each_call() -> None:
    q, k, v = torch.randn(3, 1, 48, 2, 16, device=DEVICE, dtype=torch.float16)
    args = (0.25, False, -1, -1, 0.0, None, 0.3)
    tail = (None, None, 48, 48, None, None, None)
    torch.manual_seed(5)
    first = backend.forward(q, k, v, None, *args, False, None, *tail)[0]
    second = backend.forward(q, k, v, None, *args, False, None, *tail)[0]
    torch.manual_seed(5)
    assert not torch.equal(first, second)
    assert torch.equal(first, backend.forward(q, k, v, None, *args, False, None, *tail)[0])


@pytest.mark.parametrize(
    ("page_size", "dim", "softcap", "tiles", "whole"),
    [
        (16, 24, 0.0, "_tiles", False),
        (7, 72, 2.0, "_tiles", False),
        (64, 24, 2.0, "_tiles", False),
        (16, 24, 2.0, "_deep_tiles", False),
        (16, 80, 0.0, "_deep_tiles", False),
        (64, 24, 0.0, "_tiles", True),
        (128, 72, 2.0, "_tiles", True),
        (64, 80, 2.0, "_deep_tiles", True),
    ],
)
def test_pages_are_followed(
    page_size: int, dim: int, softcap: float, tiles: str, whole: bool, request: pytest.FixtureRequest
) -> None:
    """Shuffled pages, unequal lengths, padding on the left: the bits of the same keys laid out in a row. whole: no
    padding, in a type of 16 bits, which has a kernel for blocks of keys within a page."""
    request.getfixturevalue(tiles)
    torch.manual_seed(6)
    dtype = torch.float16 if whole else torch.float32
    lengths_q, lengths_k, pads = [9, 33], [50, 71], [0 if whole else 3, 0]
    pages = [-(-length // page_size) for length in lengths_k]
    order = torch.randperm(sum(pages) + 2)
    table = torch.zeros(2, max(pages), dtype=torch.int32)
    table[0, : pages[0]], table[1, : pages[1]] = order[: pages[0]], order[pages[0] : sum(pages)]
    k, v = torch.randn(2, len(order), page_size, 2, dim, device=DEVICE).to(dtype)
    q = torch.randn(sum(lengths_q), 4, dim, device=DEVICE).to(dtype)

    def offsets(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)

    pad = None if whole else torch.tensor(pads, dtype=torch.int32, device=DEVICE)
    args = (0.2, True, 30, -1, softcap, None, 0.0, False, None)
    lengths = (offsets(lengths_q), offsets(lengths_k), max(lengths_q), max(lengths_k))
    out, lse, _, _ = backend.forward(q, k, v, None, *args, *lengths, None, pad, table.to(DEVICE))
    kind = triton_kernels.score_kind(softcap, None, 0.0, 0.2)
    ops = triton_attention.paged_ops(k, pad, q.get_device(), dtype, dim, kind)
    assert ops == (("fwd-paged-whole",) if whole else ("fwd-paged",))
    rows = [
        x[table[entry].to(DEVICE)].flatten(0, 1)[pads[entry] : lengths_k[entry]] for x in (k, v) for entry in (0, 1)
    ]
    plain_k, plain_v = torch.cat(rows[:2]), torch.cat(rows[2:])
    lengths = (lengths[0], offsets([n - p for n, p in zip(lengths_k, pads, strict=True)]), *lengths[2:])
    wanted, wanted_lse, _, _ = backend.forward(q, plain_k, plain_v, None, *args, *lengths, None, None, None)
    if whole and softcap:  # the plain keys' kernel is one of its own for softcap
        assert_close("out", out, wanted, tiny=1e-3)
        assert_close("lse", lse, wanted_lse, tiny=1e-5)
    else:
        assert torch.equal(out, wanted)
        assert torch.equal(lse, wanted_lse)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_dmask_shows_probabilities_and_what_was_dropped(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    q, k, v = torch.randn(3, 2, 40, 2, 48, device=DEVICE, dtype=dtype)
    slopes = torch.rand(2, 2, device=DEVICE)
    options = Options(causal=True, window=(25, -1), softcap=5.0)
    args = (48**-0.5, True, 25, -1, 5.0, slopes, 0.4, True, None)
    out, lse, dmask, _ = backend.forward(q, k, v, None, *args, None, None, 40, 40, None, None, None)
    seen = reference.visible(40, 40, True, (25, -1)).to(DEVICE)
    assert dmask.dtype == dtype
    assert dmask.shape == (2, 2, 40, 40)
    assert not dmask.masked_select(~seen).any()
    kept = seen & (dmask >= 0)  # one that is kept may underflow to 0, one that is dropped may not
    assert 0.5 < kept.sum() / seen.expand_as(dmask).sum() < 0.7
    wanted, wanted_lse = reference.attention(
        q, k, v, causal=True, window=options.window, softcap=5.0, alibi_slopes=slopes, dropout_p=0.4, kept=kept,
        dtype=torch.float64,
    )  # fmt: skip
    assert_close("out", out, wanted, tiny=2e-3 if dtype is torch.float16 else 1e-5)
    # Without the mask the sum over v = identity is the probability itself.
    sums = dmask.abs().double().sum(-1)
    assert_close("sum of probabilities", sums, torch.ones_like(sums), tiny=2e-3 if dtype is torch.float16 else 1e-5)
    assert_close("lse", lse, wanted_lse, tiny=2e-5)


def test_what_the_kernels_lack_is_refused() -> None:
    q = torch.randn(1, 16, 1, 16, device=DEVICE)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    args = (1.0, False, -1, -1, 0.0, None)
    tail = (None, None, None, 16, 16, None, None)
    with pytest.raises(NotImplementedError, match="S_dmask of a paged cache"):
        backend.forward(q, q, q, None, *args, 0.1, True, *tail, table)
    with pytest.raises(TypeError, match="float64"):
        backend.forward(q.double(), q.double(), q.double(), None, *args, 0.0, False, *tail, None)
    odd = q[..., :12].contiguous()
    with pytest.raises(ValueError, match="multiple of 8 here, got 12"):
        backend.forward(odd, odd, odd, None, *args, 0.0, False, *tail, None)


class _OnGpu:
    """What `select` looks at of a GPU tensor."""

    is_cuda = True


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, None), ("TRUE", None), ("1", None), ("FALSE", "asks for the CK backend"), ("yes", "neither TRUE nor")],
)
def test_the_environment_chooses_the_backend(
    value: str | None, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", raising=False)
    else:
        monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", value)
    monkeypatch.setattr(backends, "_problem", backends.problem())
    assert backends.select(torch.zeros(1)).__name__ == "flash_attn.backends.torch"
    if message is None:
        assert backends.select(_OnGpu()) is backend
    else:
        with pytest.raises(RuntimeError, match=message):
            backends.select(_OnGpu())
