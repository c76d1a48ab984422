"""The Triton kernels compared with reference attention: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import reference
import torch
from flash_attn.attention import backends
from flash_attn.attention.backends import triton as backend
from flash_attn.attention.backends.triton import gradients as triton_gradients
from flash_attn.attention.backends.triton import inputs
from flash_attn.call.calls import attention_call
from flash_attn.core import device, jit
from flash_attn.kernels import flags, targets
from triton_calls import DEVICE, GPU, Options, compare, differentiate, run

pytestmark = pytest.mark.usefixtures("interpreter_multiplies_bf16")


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


def _check(
    batch: int,
    sq: int,
    sk: int,
    heads: int,
    heads_k: int,
    dim: int,
    dtype: torch.dtype,
    options: Options,
    dim_v: int | None = None,
) -> None:
    generator = torch.Generator().manual_seed(sq * 1000 + sk * 10 + dim)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    q, dout = draw(batch, sq, heads, dim), draw(batch, sq, heads, dim_v or dim)
    k, v = draw(batch, sk, heads_k, dim), draw(batch, sk, heads_k, dim_v or dim)
    slopes = None
    if options.alibi:
        shape = (heads,) if options.alibi == 1 else (batch, heads)
        slopes = torch.rand(shape, generator=generator).to(DEVICE)
    got = run(q, k, v, dout, options, slopes)
    tensors = (q, k, v)
    compare(
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
# (64, 65): the last row alone sees the first key of the last block.
SIZES = [(1, 1), (1, 50), (64, 64), (64, 65), (33, 90), (70, 41), (57, 7), (0, 9), (9, 0)]


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("sq", "sk"), SIZES)
def test_masks_and_lengths(sq: int, sk: int, mask: str) -> None:
    _check(1, sq, sk, 2, 1, 24, torch.float32, MASKS[mask])


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(
    "window",
    [
        (15, 0),
        (16, 0),
        (17, 0),
        (0, 15),
        (0, 16),
        (0, 17),
        (30, 30),
        (31, 31),
        (32, 32),
        (33, 33),
        (46, 46),
        (16, -1),
        (-1, 16),
    ],
)
def test_windows_whose_edges_meet_edges_of_tiles(window: tuple[int, int]) -> None:
    """A tile of dk and dv too few, or one that is taken for wholly visible, shows only where the edges meet."""
    for sq, sk in ((64, 64), (48, 64)):
        _check(1, sq, sk, 1, 1, 16, torch.float32, Options(window=window))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [8, 32, 40, 64, 72, 96, 128, 160, 200, 256, 264, 512])
def test_head_dims_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    _check(1, 41, 50, 1, 1, dim, dtype, Options(causal=True))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("options", [Options(causal=True), Options(softcap=3.0, alibi=1)], ids=["causal", "any"])
@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (128, 64), (160, 96), (40, 24), (24, 40), (64, 512)])
def test_values_with_a_head_dim_of_their_own(dim: int, dim_v: int, options: Options) -> None:
    _check(1, 41, 50, 2, 1, dim, torch.float16, options, dim_v)


@pytest.mark.usefixtures("_deep_tiles")
@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (128, 64)])
def test_values_with_a_head_dim_of_their_own_in_pieces(dim: int, dim_v: int) -> None:
    _check(1, 20, 35, 2, 1, dim, torch.float32, Options(causal=True), dim_v)


@pytest.mark.usefixtures("_deep_tiles")
@pytest.mark.parametrize("mask", ["full", "causal", "both"])
@pytest.mark.parametrize("dim", [24, 64, 72, 96])
def test_head_dim_in_pieces(dim: int, mask: str) -> None:
    _check(1, 41, 50, 1, 1, dim, torch.float32, MASKS[mask])


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(("heads", "heads_k", "dtype"), [(6, 2, torch.float16), (5, 1, torch.float32)])
def test_grouped_heads(heads: int, heads_k: int, dtype: torch.dtype) -> None:
    _check(2, 35, 40, heads, heads_k, 32, dtype, Options(causal=True))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_query_heads_shared_out(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """dk and dv of a group's splits are added up, into tensors of any layout."""
    monkeypatch.setattr(triton_gradients, "splits_of", lambda *_: splits)
    _check(1, 20, 35, 8, 2, 24, torch.float16, Options(causal=True, alibi=2))
    q, dout = torch.randn(2, 1, 20, 8, 16, device=DEVICE)
    k, v = torch.randn(2, 1, 30, 2, 16, device=DEVICE)
    call = attention_call(q, k, v, softmax_scale=0.25)
    out, lse, _, _ = backend.forward(call)
    grads = torch.empty(2, 1, 2, 30, 17, device=DEVICE)[..., 1:].transpose(2, 3)
    dense = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    differentiate(call, dout, out, lse, dense[0], *grads)
    differentiate(call, dout, out, lse, *dense)
    assert torch.equal(grads, torch.stack(dense[1:]))


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
def test_rounding_by_an_addition() -> None:
    """bfloat16 on targets without an instruction for it is as good as rounding to even."""
    assert targets.get("gfx942").half_up
    assert not targets.get(jit.Interpreter().target).half_up
    with device.using(jit.Interpreter("gfx942")):
        _check(2, 37, 45, 2, 2, 32, torch.bfloat16, Options(causal=True))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_score_options(extra: str, dtype: torch.dtype) -> None:
    _check(2, 37, 45, 2, 2, 32, dtype, EXTRAS[extra])


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
    got = run(q, k, v, dout, options, None)
    expected = run(q.contiguous(), k.clone(), v.contiguous(), dout, options, None)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.usefixtures("_tiles")
def test_rows_too_far_apart_for_the_kernels_are_copied() -> None:
    """The compiler is told a bound of the row stride: beyond it a tile could span more than 2 GiB."""
    stride = flags.MAX_ROW_STRIDE * 4
    storage = torch.zeros(stride * 3 + 32, device=DEVICE)
    far = storage.as_strided((1, 4, 2, 16), (0, stride, 16, 1)).copy_(torch.randn(1, 4, 2, 16))
    assert inputs.aligned(far, 4) is not far
    near = storage.as_strided((1, 4, 2, 16), (0, stride - 4, 16, 1))
    assert inputs.aligned(near, 4) is near
    dout = torch.randn(1, 4, 2, 16, device=DEVICE)
    got = run(far, far, far, dout, Options(), None)
    expected = run(*(far.contiguous(),) * 3, dout, Options(), None)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


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
    got = run(q, k, v, dout, options, None)
    expected = run(*(x.contiguous() for x in (q, k, v, dout)), options, None)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.usefixtures("_tiles")
def test_gradients_land_in_strided_buffers() -> None:
    torch.manual_seed(3)
    q, k, v, dout = torch.randn(4, 1, 33, 2, 16, device=DEVICE)
    call = attention_call(q, k, v, softmax_scale=0.25)
    out, lse, _, _ = backend.forward(call)
    packed = torch.full((1, 33, 3, 2, 16), torch.nan, device=DEVICE)
    odd = torch.full((1, 33, 2, 17), torch.nan, device=DEVICE)[..., 1:]
    plain = differentiate(call, dout, out, lse)
    differentiate(call, dout, out, lse, *packed.unbind(2))
    assert torch.equal(packed, torch.stack(plain, 2))
    differentiate(call, dout, out, lse, odd, *plain[1:])
    assert torch.equal(odd, plain[0])


def test_options_without_a_kernel_are_refused() -> None:
    q = torch.randn(1, 16, 1, 16, device=DEVICE)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(NotImplementedError, match="block_table: return_attn_probs cannot honour it"):
        backend.forward(
            attention_call(q, q, q, softmax_scale=1.0, dropout_p=0.1, return_softmax=True, block_table=table)
        )
    with pytest.raises(TypeError, match="float64"):
        backend.forward(attention_call(q.double(), q.double(), q.double(), softmax_scale=1.0))
    odd = q[..., :12].contiguous()
    with pytest.raises(ValueError, match="multiple of 8 here, got 12"):
        backend.forward(attention_call(odd, odd, odd, softmax_scale=1.0))


class _OnGpu:
    """What `select` looks at of a GPU tensor."""

    is_cuda = True


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, None),
        ("TRUE", None),
        ("1", None),
        ("yes", None),
        ("on", None),
        ("", None),
        *((value, "asks for the CK backend") for value in ("FALSE", "0", "no", "Off")),
        ("maybe", "neither TRUE nor"),
    ],
)
def test_the_environment_chooses_the_backend(
    value: str | None, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", raising=False)
    else:
        monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", value)
    monkeypatch.setattr(backends, "_chosen", backends.choose())
    assert backends.select(torch.zeros(1)).name == "flash_attn.attention.backends.torch"
    if message is None:
        assert backends.select(_OnGpu()) is backend
    else:
        with pytest.raises(RuntimeError, match=message):
            backends.select(_OnGpu())
