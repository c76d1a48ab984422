"""Rotary embedding: PyTorch against complex numbers, the kernel against both, gradients, in place."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable

import pytest
import torch
from assert_close import assert_close
from flash_attn.layers import rotary as layers
from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)
from flash_attn.ops.triton import rotary
from flash_attn.ops.triton.rotary import apply_rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def _tables(places: int, half: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(places, half, dtype=torch.float64, device=DEVICE) * 6.3
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _by_complex_numbers(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, starts: list[int], interleaved: bool, conjugate: bool
) -> torch.Tensor:
    """x (batch, seqlen, heads, head_dim) in fp64: every pair is a complex number times one of length 1."""
    half = cos.shape[1]
    head = x[..., : 2 * half].double()
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).transpose(-1, -2)
    numbers = torch.complex(pairs[..., 0], pairs[..., 1])
    turns = torch.complex(cos.double(), sin.double())
    turns = turns.conj() if conjugate else turns
    factors = torch.stack([turns[start : start + x.shape[1]] for start in starts])
    turned = torch.view_as_real(numbers * factors[:, :, None])
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((turned, x[..., 2 * half :].double()), -1)


def _run(kernel: bool, x: torch.Tensor, *args: object) -> torch.Tensor:
    """Runs the kernel (in the interpreter without a GPU), or PyTorch."""
    y = x.clone()
    (rotary.launch if kernel else rotary.reference)(x, y, *args)
    return y


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (128, 32), (40, 20), (256, 256), (18, 6)])
def test_turns_as_complex_numbers_do(
    dim: int, rotary_dim: int, dtype: torch.dtype, interleaved: bool, kernel: bool
) -> None:
    torch.manual_seed(dim)
    x = torch.randn(2, 21, 2, dim, device=DEVICE).to(dtype)
    cos, sin = _tables(40, rotary_dim // 2, dtype)
    for starts, conjugate in (([13, 13], False), ([0, 9], True)):
        offsets = None if starts[0] == starts[1] else torch.tensor(starts, device=DEVICE)
        got = _run(kernel, x, cos, sin, starts[0], offsets, None, 21, interleaved, conjugate)
        expected = _by_complex_numbers(x, cos, sin, starts, interleaved, conjugate)
        # Interpreted bf16 is cut off where a GPU rounds to nearest: a unit in the last place.
        tiny = 2.0**-7 if kernel and DEVICE == "cpu" and dtype is torch.bfloat16 else 1e-6
        assert_close("y", got, expected, rough=expected.to(dtype), tiny=tiny, dtype=dtype)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (18, 6)])
def test_tables_of_another_dtype_are_not_rounded(
    dim: int, rotary_dim: int, table: torch.dtype, dtype: torch.dtype, interleaved: bool, kernel: bool
) -> None:
    torch.manual_seed(dim)
    x = torch.randn(2, 21, 2, dim, device=DEVICE).to(dtype)
    cos, sin = _tables(21, rotary_dim // 2, table)
    got = _run(kernel, x, cos, sin, 0, None, None, 21, interleaved, False)
    expected = _by_complex_numbers(x, cos, sin, [0, 0], interleaved, False)
    rounded = (got.double() - expected.to(dtype).double()).abs()
    # The last place of a sum that lies between two numbers; interpreted bf16 is cut off where a GPU rounds.
    unit = torch.finfo(dtype).eps * expected.abs() + 1e-6
    assert bool((rounded <= unit).all())
    if not (kernel and DEVICE == "cpu" and dtype is torch.bfloat16):
        assert float((rounded > 2e-6).double().mean()) < 1e-2


def test_before_2_8_tables_have_the_dtype_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    x, tables = torch.randn(2, 4, 2, 8).bfloat16(), _tables(6, 4, torch.float32)
    cos, sin = (table.cpu() for table in tables)
    expected = apply_rotary(x.float(), cos, sin).bfloat16()
    assert torch.equal(apply_rotary_emb(x, cos, sin), expected)
    assert torch.equal(apply_rotary_emb(x.clone(), cos, sin, inplace=True), expected)
    kv = torch.stack((x, x), 2)
    assert torch.equal(apply_rotary_emb_kv_(kv.clone(), cos, sin), torch.stack((expected, x), 2))
    qkv = torch.stack((x, x, x), 2)
    assert torch.equal(apply_rotary_emb_qkv_(qkv.clone(), cos, sin), torch.stack((expected, expected, x), 2))
    monkeypatch.setattr(rotary, "RELEASE", (2, 7))
    with pytest.raises(TypeError, match=r"cos: got torch.float32, wanted torch.bfloat16"):
        apply_rotary(x, cos, sin)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_varlen_equals_one_call_per_sequence(interleaved: bool, kernel: bool) -> None:
    lengths = [7, 0, 33, 1]
    x = torch.randn(45, 2, 32, device=DEVICE)
    ends = torch.tensor([2, *(2 + end for end in itertools.accumulate(lengths))], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([3, 0, 5, 9], dtype=torch.int32, device=DEVICE)
    cos, sin = _tables(40, 12, torch.float32)
    got = _run(kernel, x, cos, sin, 0, offsets, ends, 33, interleaved, False)
    expected = x.clone()
    for start, stop, offset in zip(ends.tolist()[:-1], ends.tolist()[1:], offsets.tolist(), strict=True):
        expected[start:stop] = _by_complex_numbers(x[None, start:stop], cos, sin, [offset], interleaved, False)[
            0
        ].float()
    assert_close("y", got, expected, tiny=1e-6)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
def test_layouts_do_not_change_the_result(
    kernel: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Transposed, expanded, offset by less than 16 bytes, with a strided head, in place."""
    # The kernel for rows that do not start on 16 bytes may fuse other products and sums: gfx1100's does.
    tiny = 0.0 if request.config.getoption("--gfx") is None else 1e-6
    if kernel:
        monkeypatch.setattr(rotary, "reference", rotary.launch)
    cos, sin = _tables(20, 16, torch.float32)
    base = torch.randn(2, 3, 20, 65, device=DEVICE)
    for x in (base.transpose(1, 2)[..., 1:], base.transpose(1, 2)[..., ::2], base[:, :1, :, :32].expand(2, 3, 20, 32)):
        expected = apply_rotary(x.contiguous(), cos, sin)
        assert_close("y", apply_rotary(x, cos, sin), expected, tiny=tiny)
    packed = torch.randn(2, 20, 3, 4, 32, device=DEVICE)
    expected = apply_rotary(packed[:, :, 1].contiguous(), cos, sin, interleaved=True)
    part = packed[:, :, 1]
    rest = packed[:, :, ::2].clone()
    assert apply_rotary(part, cos, sin, interleaved=True, inplace=True) is part
    assert_close("y", packed[:, :, 1], expected, tiny=tiny)
    assert torch.equal(packed[:, :, ::2], rest)


@pytest.mark.parametrize("interleaved", [False, True])
def test_pytorch_form_agrees(interleaved: bool) -> None:
    x = torch.randn(2, 9, 3, 24)
    cos, sin = _tables(9, 8, torch.float32)
    expected = apply_rotary(x, cos.cpu(), sin.cpu(), interleaved=interleaved)
    assert_close("y", apply_rotary_emb_torch(x, cos.cpu(), sin.cpu(), interleaved), expected, tiny=1e-6)
    per_entry = [table.cpu().expand(2, 9, 8) for table in (cos, sin)]
    assert_close("y", apply_rotary_emb_torch(x, *per_entry, interleaved), expected, tiny=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [2, torch.tensor([1, 4])], ids=["int", "tensor"])
def test_gradients(offsets: int | torch.Tensor, interleaved: bool) -> None:
    torch.manual_seed(0)
    cos, sin = (table.cpu() for table in _tables(12, 2, torch.float64))
    cos_k, sin_k = (table.cpu() for table in _tables(12, 2, torch.float64))
    x = torch.randn(2, 5, 2, 6, dtype=torch.float64, requires_grad=True)
    check = functools.partial(torch.autograd.gradcheck, fast_mode=True)
    assert check(lambda x: apply_rotary_emb(x, cos, sin, interleaved, False, offsets), (x,))
    assert check(lambda x: apply_rotary_emb(x.clone(), cos, sin, interleaved, True, offsets), (x,))
    qkv = torch.randn(2, 5, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    for keys in ((None, None), (cos_k, sin_k)):
        assert check(lambda x: apply_rotary_emb_qkv_(x.clone(), cos, sin, *keys, interleaved, offsets), (qkv,))  # noqa: B023
    grouped = torch.randn(2, 5, 8, 6, dtype=torch.float64, requires_grad=True)
    for keys in ((None, None), (cos_k, sin_k)):
        assert check(lambda x: apply_rotary_emb_qkv_(x.clone(), cos, sin, *keys, interleaved, offsets, 4), (grouped,))  # noqa: B023
    kv = torch.randn(2, 5, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    assert check(lambda x: apply_rotary_emb_kv_(x.clone(), cos, sin, interleaved, offsets), (kv,))
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    flat = torch.randn(8, 2, 6, dtype=torch.float64, requires_grad=True)
    assert check(lambda x: apply_rotary_emb(x, cos, sin, interleaved, False, offsets, ends, 4), (flat,))


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
def test_second_derivative(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turning is linear: of |turned x|^2 the gradient at x times the Hessian is twice the gradient."""
    if kernel:
        monkeypatch.setattr(rotary, "reference", rotary.launch)
    cos, sin = _tables(6, 4, torch.float32)
    for turned, shape in (
        (lambda x: apply_rotary_emb(x, cos, sin), (1, 6, 2, 8)),
        (lambda x: apply_rotary_emb_qkv_(x.clone(), cos, sin), (1, 6, 3, 2, 8)),
        (lambda x: apply_rotary_emb_kv_(x.clone(), cos, sin), (1, 6, 2, 2, 8)),
    ):
        x = torch.randn(shape, device=DEVICE, requires_grad=True)
        (gradient,) = torch.autograd.grad(turned(x).square().sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(gradient, x, gradient.detach())
        assert_close("second", twice, 2.0 * gradient.detach(), tiny=1e-5)


def test_a_shared_gradient_is_not_changed() -> None:
    cos, sin = (table.cpu() for table in _tables(4, 2, torch.float32))
    x, other = torch.randn(2, 1, 4, 1, 4).requires_grad_().unbind(0)
    other = other.detach().requires_grad_()
    (apply_rotary_emb(x.clone(), cos, sin, inplace=True) + other).sum().backward()
    assert torch.equal(other.grad, torch.ones_like(other))


def test_packed_forms_turn_queries_and_keys_alone() -> None:
    torch.manual_seed(1)
    cos, sin = (table.cpu() for table in _tables(9, 4, torch.float32))
    q, k, v = torch.randn(3, 2, 9, 4, 8)
    turned_q, turned_k = (apply_rotary(x, cos, sin) for x in (q, k))
    qkv = torch.stack((q, k, v), 2)
    assert torch.equal(apply_rotary_emb_qkv_(qkv.clone(), cos, sin), torch.stack((turned_q, turned_k, v), 2))
    strided = torch.empty(2, 9, 3, 5, 8)[:, :, :, :4].copy_(qkv)
    assert torch.equal(apply_rotary_emb_qkv_(strided, cos, sin), torch.stack((turned_q, turned_k, v), 2))
    kv = torch.stack((k, v), 2)
    assert torch.equal(apply_rotary_emb_kv_(kv.clone(), cos, sin), torch.stack((turned_k, v), 2))
    grouped = torch.cat((q, k[:, :, :2], v[:, :, :2]), 2)
    expected = torch.cat((turned_q, turned_k[:, :, :2], v[:, :, :2]), 2)
    assert torch.equal(apply_rotary_emb_qkv_(grouped, cos, sin, num_heads_q=4), expected)


def test_compiles_whole() -> None:
    cos, sin = (table.cpu() for table in _tables(9, 4, torch.float32))
    x = torch.randn(2, 9, 2, 8, requires_grad=True)
    compiled = torch.compile(lambda x: apply_rotary_emb(x, cos, sin, True).sin(), fullgraph=True, backend="aot_eager")
    out = compiled(x)
    expected = apply_rotary_emb(x, cos, sin, True).sin()
    assert torch.equal(out, expected)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])


IN_PLACE_COS, IN_PLACE_SIN = (torch.rand(9, 4) for _ in range(2))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*(get_attr|not writable):UserWarning")  # torch.export's
@pytest.mark.parametrize("strict", [False, True])
def test_in_place_functions_can_be_exported(strict: bool) -> None:
    if strict and torch.__version__ < "2.13":
        pytest.skip("this torch does not say whether it exports or compiles")

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            apply_rotary_emb_qkv_(x, IN_PLACE_COS, IN_PLACE_SIN)
            return x + 1.0

    x = torch.randn(2, 9, 3, 2, 8)
    exported = torch.export.export(Module(), (x.clone(),), strict=strict)
    saved = io.BytesIO()
    torch.export.save(exported, saved)
    saved.seek(0)
    for program in (torch.export.load(saved), exported.run_decompositions()):
        given, expected = x.clone(), x.clone()
        assert torch.equal(program.module()(given), Module()(expected))
        assert torch.equal(given, expected)


def _turn_q(x: torch.Tensor) -> torch.Tensor:
    return apply_rotary_emb(x, IN_PLACE_COS, IN_PLACE_SIN, inplace=True)


def _wanted_parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q and k turned, v as it is, of x (batch, seqlen, 3, heads, head_dim), out of place."""
    q, k, v = x.clone().unbind(2)
    return *(apply_rotary_emb_torch(part, IN_PLACE_COS, IN_PLACE_SIN) for part in (q, k)), v


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q (batch, seqlen, heads, head_dim), and kv (batch, seqlen, 2, heads, head_dim), as projections are split."""
    q, kv = x.flatten(2).split([16, 32], -1)
    return q.unflatten(-1, (2, 8)), kv.unflatten(-1, (2, 2, 8))


def _in_unbound_parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = x.unbind(2)
    return _turn_q(q), _turn_q(k), v


def _in_chunks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = (part.unflatten(-1, (2, 8)) for part in x.flatten(2).chunk(3, -1))
    return _turn_q(q), _turn_q(k), v


def _in_split_kv(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, kv = _split(x)
    return _turn_q(q), *apply_rotary_emb_kv_(kv, IN_PLACE_COS, IN_PLACE_SIN).unbind(2)


def _in_qkv(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return apply_rotary_emb_qkv_(x, IN_PLACE_COS, IN_PLACE_SIN).unbind(2)


def _in_qkv_of_two_tables(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    tables = (IN_PLACE_COS, IN_PLACE_SIN)
    return apply_rotary_emb_qkv_(x, *tables, *tables).unbind(2)


def _in_heads(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return apply_rotary_emb_qkv_(x.flatten(2, 3), IN_PLACE_COS, IN_PLACE_SIN, num_heads_q=2).split(2, 2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("grad", ["no_grad", "of a leaf", "of a projection"])
@pytest.mark.parametrize(
    "turn", [_in_unbound_parts, _in_chunks, _in_split_kv, _in_qkv, _in_qkv_of_two_tables, _in_heads]
)
def test_in_place_is_as_out_of_place(turn: Callable[..., tuple[torch.Tensor, ...]], grad: str, compiled: bool) -> None:
    torch.manual_seed(3)
    torch.compiler.reset()
    x = torch.randn(2, 9, 3, 2, 8, requires_grad=True)
    expected = _wanted_parts(x)
    (gradient,) = torch.autograd.grad(sum(part.sin().sum() for part in expected), x)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return turn(x * 1.0 if grad == "of a projection" else x)

    before = x.detach().clone()
    with torch.set_grad_enabled(grad != "no_grad"):
        got = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(x)
    for a, b in zip(got, expected, strict=True):
        assert_close("part", a, b, tiny=1e-6)
    if grad == "no_grad":
        assert not got[0].requires_grad
    else:
        assert_close("dx", torch.autograd.grad(sum(part.sin().sum() for part in got), x)[0], gradient, tiny=1e-6)
    after = before if grad == "of a projection" else torch.stack(expected, 2)
    assert_close("x", x.detach(), after, tiny=1e-6)


def test_a_tensor_rotated_in_place_may_be_changed_later() -> None:
    x = torch.randn(2, 9, 3, 2, 8, requires_grad=True)
    qkv = x * 1.0
    turned = apply_rotary_emb_qkv_(qkv, IN_PLACE_COS, IN_PLACE_SIN)
    assert turned.data_ptr() == qkv.data_ptr()
    turned[:, :, 0] *= 2.0
    (gradient,) = torch.autograd.grad(turned.sum(), x)
    q, k, v = _wanted_parts(x)
    assert_close("dx", gradient, torch.autograd.grad((2 * q + k + v).sum(), x)[0], tiny=1e-6)
    kept = x.sigmoid()  # its backward needs what it gave
    turned = apply_rotary_emb_qkv_(kept, IN_PLACE_COS, IN_PLACE_SIN)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        turned.sum().backward()
    kept = x.sigmoid()
    turned = _turn_q(kept[:, :, 0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (turned.sum() + kept.sum()).backward()


ERRORS = {
    "x type": ({"x": 3}, TypeError, "x: got int"),
    "x rank": ({"x": torch.zeros(4, 2, 8)}, ValueError, r"x: got shape \(4, 2, 8\)"),
    "x dtype": ({"x": torch.zeros(2, 4, 2, 8, dtype=torch.int32)}, TypeError, "x: got torch.int32"),
    "head_dim": ({"x": torch.zeros(2, 4, 2, 257)}, ValueError, "x: got head_dim 257"),
    "cos dtype": ({"cos": torch.zeros(6, 4).int()}, TypeError, "cos: got torch.int32, wanted torch.float16 or"),
    "cos rank": ({"cos": torch.zeros(6)}, ValueError, "cos: got shape"),
    "cos device": ({"cos": torch.zeros(6, 4, device="meta")}, ValueError, "cos: got a tensor on meta"),
    "sin shape": ({"sin": torch.zeros(6, 3)}, ValueError, "sin: got shape"),
    "rotary_dim": ({"cos": torch.zeros(6, 5), "sin": torch.zeros(6, 5)}, ValueError, "cos: got rotary_dim 10"),
    "places": ({"cos": torch.zeros(3, 4), "sin": torch.zeros(3, 4)}, ValueError, "cos: got 3 places, wanted at le"),
    "offset": ({"seqlen_offsets": 3}, ValueError, "seqlen_offsets: got 3, wanted 0 to 2"),
    "negative offset": ({"seqlen_offsets": -1}, ValueError, "seqlen_offsets: got -1"),
    "offset type": ({"seqlen_offsets": 1.5}, TypeError, "seqlen_offsets: got 1.5"),
    "offsets shape": ({"seqlen_offsets": torch.zeros(3, dtype=torch.int32)}, ValueError, "seqlen_offsets: got shape"),
    "offsets dtype": ({"seqlen_offsets": torch.zeros(2)}, TypeError, "seqlen_offsets: got torch.float32"),
    "offsets value": ({"seqlen_offsets": torch.tensor([0, 3])}, ValueError, "seqlen_offsets: got positions 3 to 7"),
    "cu without max": (
        {"x": torch.zeros(4, 2, 8), "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)},
        ValueError,
        "max_seqlen: got None",
    ),
    "cu dtype": (
        {"x": torch.zeros(4, 2, 8), "cu_seqlens": torch.tensor([0, 4]), "max_seqlen": 4},
        TypeError,
        "cu_seqlens: got torch.int64",
    ),
    "cu value": (
        {"x": torch.zeros(4, 2, 8), "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32), "max_seqlen": 5},
        ValueError,
        "cu_seqlens: got 0, 5",
    ),
    "max too small": (
        {"x": torch.zeros(4, 2, 8), "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32), "max_seqlen": 3},
        ValueError,
        "max_seqlen: got 3, wanted at least 4",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    change, error, match = ERRORS[case]
    arguments = {"x": torch.zeros(2, 4, 2, 8), "cos": torch.zeros(6, 4), "sin": torch.zeros(6, 4), **change}
    with pytest.raises(error, match=match):
        apply_rotary(**arguments)


def test_packed_errors() -> None:
    cos = sin = torch.zeros(6, 4)
    with pytest.raises(ValueError, match="qkv: got shape"):
        apply_rotary_emb_qkv_(torch.zeros(2, 4, 2, 2, 8), cos, sin)
    with pytest.raises(ValueError, match="num_heads_q: got 3 of 6 heads"):
        apply_rotary_emb_qkv_(torch.zeros(2, 4, 6, 8), cos, sin, num_heads_q=3)
    with pytest.raises(ValueError, match="cos_k, sin_k: got only one"):
        apply_rotary_emb_qkv_(torch.zeros(2, 4, 3, 2, 8), cos, sin, cos_k=cos)
    with pytest.raises(ValueError, match="kv: got shape"):
        apply_rotary_emb_kv_(torch.zeros(2, 4, 3, 2, 8), cos, sin)
    with pytest.raises(ValueError, match="dim: got 5"):
        RotaryEmbedding(5)
    assert layers.apply_rotary_emb_func is apply_rotary_emb
