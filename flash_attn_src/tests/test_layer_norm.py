"""Layer norm and RMS norm: PyTorch's form against the book, the kernels against it, every option of the functions."""

from __future__ import annotations

import pytest
import torch
from assert_close import assert_close
from flash_attn.ops import rms_norm as older
from flash_attn.ops.triton import add_norm
from flash_attn.ops.triton.layer_norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)
from small_calls import Late

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = (torch.float16, torch.bfloat16)
MODES = [
    # dtype of x, of the weights, of the residual (None: there is none)
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.float32, None),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, None),
    (torch.float16, torch.float32, torch.float32),
    (torch.float16, torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16, None),
]


def _by_the_book(
    z: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shift: float, is_rms: bool
) -> torch.Tensor:
    functional = torch.nn.functional
    if is_rms:
        y = functional.rms_norm(z, z.shape[-1:], weight + shift, 1e-5)
        return y if bias is None else y + bias
    return functional.layer_norm(z, z.shape[-1:], weight + shift, bias, 1e-5)


@pytest.mark.parametrize("is_rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(str(each)[6:] for each in mode))
@pytest.mark.parametrize(
    ("rows", "dim"),
    [
        *((3, 8), (150, 64), (35, 77), (19, 128), (40, 136), (5, 512), (35, 520), (18, 1504), (10, 2056), (3, 5001)),
        *((6, 5120), (5, 16392)),
    ],
)
def test_kernels(rows: int, dim: int, mode: tuple[torch.dtype, ...], is_rms: bool) -> None:
    dtype, weight_type, residual_type = mode
    torch.manual_seed(dim)
    x = (torch.randn(rows, dim, device=DEVICE) + 0.5).to(dtype)
    residual = None if residual_type is None else torch.randn(rows, dim, device=DEVICE).to(residual_type)
    weight = torch.randn(dim, device=DEVICE).to(weight_type)
    bias = torch.randn(dim, device=DEVICE).to(weight_type) if dim % 2 else None
    dy = torch.randn(rows, dim, device=DEVICE).to(dtype)
    kept_type = dtype if residual_type is None else residual_type
    shift = 1.0 if rows % 2 else 0.0
    y, z, mean, rstd = add_norm.launch_forward(x, residual, weight, bias, 1e-5, kept_type, shift, is_rms)
    assert (z is None) == (residual is None)

    exact = [None if each is None else each.detach().double().requires_grad_() for each in (x, residual, weight, bias)]
    whole = exact[0] if residual is None else exact[0] + exact[1]
    expected = _by_the_book(whole, exact[2], exact[3], shift, is_rms)
    # The interpreter truncates to bf16 where a GPU rounds, which costs a unit in the last place.
    tiny = 2.0**-7 if dtype is torch.bfloat16 and DEVICE == "cpu" else 4e-6
    assert_close("y", y, expected, rough=expected.to(dtype), tiny=tiny, dtype=dtype)
    if z is not None:
        assert_close("z", z, whole, rough=whole.to(kept_type), tiny=tiny, dtype=kept_type)

    saved = x if z is None else z
    dz = None if z is None else torch.randn(rows, dim, device=DEVICE).to(kept_type)
    dx, dresidual, sums = add_norm.launch_backward(
        saved, weight, dy, dz, mean, rstd, shift, bias is not None, is_rms, dtype
    )
    # Computed from the values that the kernel saved, so that only its own rounding counts.
    kept = saved.double().detach().requires_grad_()
    again = _by_the_book(kept, exact[2], exact[3], shift, is_rms)
    leaves = [leaf for leaf in (kept, exact[2], exact[3]) if leaf is not None]
    grads = list(torch.autograd.grad(again, leaves, dy.double()))
    if dz is not None:
        grads[0] = grads[0] + dz.double()
    tiny = tiny if dtype is torch.float32 else 2.0**-6
    assert_close("dx", dx, grads[0], rough=grads[0].to(dtype), tiny=tiny, dtype=dtype)
    assert_close("dresidual", dresidual, grads[0], rough=grads[0].to(dtype), tiny=tiny, dtype=kept_type)
    spread = 4e-6 if z is None or dtype is torch.float32 else 2e-2  # the statistics are of the sum before rounding
    assert sums.shape[1:] == (len(leaves) - 1, dim)
    assert_close("dweight", sums.sum(0)[0], grads[1], tiny=spread)
    if bias is not None:
        assert_close("dbias", sums.sum(0)[1], grads[2], tiny=4e-6)


def test_gradients_may_be_on_their_way() -> None:
    x, residual, dy, dz = torch.randn(4, 3, 40, device=DEVICE)
    leaves = [x.requires_grad_(), residual.requires_grad_(), torch.ones(40, device=DEVICE, requires_grad=True)]
    results = add_norm._AddNorm.apply(*leaves, None, 1e-5, torch.float32, False, True)
    expected = torch.autograd.grad(results, leaves, (dy, dz), retain_graph=True)
    got = torch.autograd.grad(results, leaves, (Late(dy), Late(dz)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_kernels_accept_padded_rows() -> None:
    x = torch.randn(5, 40, device=DEVICE)
    wide = torch.zeros(5, 51, device=DEVICE)[:, 3:43].copy_(x)
    weight = torch.ones(40, device=DEVICE)
    args = (weight, None, 1e-5, torch.float32, 0.0, True)
    assert torch.equal(add_norm.launch_forward(wide, None, *args)[0], add_norm.launch_forward(x, None, *args)[0])
    one = x[:1].expand(5, 40)
    assert torch.equal(
        add_norm.launch_forward(one, one, *args)[0], add_norm.launch_forward(x[:1].repeat(5, 1), one, *args)[0]
    )


@pytest.mark.parametrize("is_rms", [False, True], ids=["layer", "rms"])
def test_gradients(is_rms: bool) -> None:
    torch.manual_seed(0)
    x, residual, x1 = (torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weight, bias, weight1, bias1 = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(4))
    scale = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)

    def call(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return layer_norm_fn(*leaves, prenorm=True, is_rms_norm=is_rms, zero_centered_weight=True, eps=1e-5)

    assert torch.autograd.gradcheck(call, (x, weight, bias, residual, x1, weight1, bias1), fast_mode=True)
    scaled = layer_norm_fn(x, weight, bias, rowscale=scale, is_rms_norm=is_rms)
    expected = layer_norm_fn(x * scale[..., None], weight, bias, is_rms_norm=is_rms)
    assert torch.equal(scaled, expected)
    for shape in ((12,), (3, 4, 1)):
        assert torch.equal(layer_norm_fn(x, weight, bias, rowscale=scale.view(shape), is_rms_norm=is_rms), expected)


def test_results_come_in_upstream_order() -> None:
    torch.manual_seed(1)
    x, residual, x1 = torch.randn(3, 2, 5, 8).bfloat16()
    weight, weight1 = torch.rand(2, 8)
    y = rms_norm_fn(x, weight, None)
    assert isinstance(y, torch.Tensor)
    assert y.dtype is torch.bfloat16
    y, z = rms_norm_fn(x, weight, None, residual, prenorm=True)
    assert z.dtype is torch.bfloat16
    assert torch.equal(z, x + residual)
    _, z = rms_norm_fn(x, weight, None, prenorm=True, residual_in_fp32=True)
    assert torch.equal(z, x.float())
    y, y1, z = rms_norm_fn(x, weight, None, residual.float(), x1, weight1, prenorm=True)
    assert torch.equal(z, x.float() + x1.float() + residual.float())
    for got, by in ((y, weight), (y1, weight1)):
        expected = torch.nn.functional.rms_norm(z, (8,), by, 1e-6)
        assert_close("y", got, expected, rough=expected.bfloat16())
    y, mask, mask1 = rms_norm_fn(x, weight, None, return_dropout_mask=True)
    assert mask is None
    assert mask1 is None
    exact = rms_norm_fn(x, weight, None, out_dtype=torch.float32)
    assert_close("y", exact, torch.nn.functional.rms_norm(x.float(), (8,), weight, 1e-6), dtype=torch.float32)
    out, kept = torch.empty_like(x), torch.empty_like(x)
    got = rms_norm_fn(x, weight, None, residual, prenorm=True, out=out, residual_out=kept)
    assert got[0] is out
    assert got[1] is kept
    assert torch.equal(kept, x + residual)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buffers_serve_every_training_step(dtype: torch.dtype, compiled: bool) -> None:
    """Each training step writes into the same two buffers. Its gradients are those of a call without them."""
    torch.manual_seed(7)
    out, kept = torch.empty(6, 16, dtype=dtype), torch.empty(6, 16)
    weight = torch.rand(16, requires_grad=True)

    def call(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rms_norm_fn(x, weight, None, residual, prenorm=True, out=out, residual_out=kept)

    torch.compiler.reset()
    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    for _ in range(3):
        leaves = [torch.randn(6, 16, requires_grad=True) for _ in range(2)] + [weight]
        y, z = function(*leaves[:2])
        wanted_y, wanted_z = rms_norm_fn(leaves[0], weight, None, leaves[1], prenorm=True)
        assert_close("y", y, wanted_y.to(dtype), tiny=1e-6, dtype=dtype)
        assert torch.equal(out, y)
        assert torch.equal(kept, z)
        assert not out.requires_grad
        assert compiled or (y.data_ptr(), z.data_ptr()) == (out.data_ptr(), kept.data_ptr())
        expected = torch.autograd.grad(wanted_y.to(dtype).sum() + wanted_z.sin().sum(), leaves)
        got = torch.autograd.grad(y.sum() + z.sin().sum(), leaves)
        for a, b in zip(got, expected, strict=True):
            assert_close("gradient", a, b, tiny=1e-6)


def test_dropout_drops_and_scales() -> None:
    torch.manual_seed(2)
    x = torch.randn(40, 64)
    weight = torch.ones(64)
    y, z, mask, mask1 = rms_norm_fn(x, weight, None, x, x, dropout_p=0.3, prenorm=True, return_dropout_mask=True)
    assert 0.65 < mask.float().mean() < 0.75
    assert not torch.equal(mask, mask1)
    assert_close("z", z, x + x * (mask.float() + mask1.float()) / 0.7)
    assert_close("y", y, torch.nn.functional.rms_norm(z, (64,), weight, 1e-6))


def test_dropout_takes_no_notice_of_the_default_dtype() -> None:
    x, before = torch.ones(64, 64), torch.get_default_dtype()
    masks = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            masks.append(rms_norm_fn(x, x[0], None, dropout_p=0.3, return_dropout_mask=True)[1])
        finally:
            torch.set_default_dtype(before)
    assert torch.equal(*masks)


def test_modules() -> None:
    torch.manual_seed(3)
    x, residual = torch.randn(2, 6, 16)
    module = RMSNorm(16, eps=1e-3)
    torch.nn.init.normal_(module.weight)
    expected = torch.nn.functional.rms_norm(x, (16,), module.weight, 1e-3)
    assert_close("y", module(x), expected)
    centred = RMSNorm(16, eps=1e-3, zero_centered_weight=True)
    assert centred.weight.eq(0).all()
    centred.weight.data = module.weight.data - 1
    assert_close("y", centred(x), expected)
    y, z = module(x, residual, prenorm=True)
    assert_close("y", y, module(x + residual))
    assert torch.equal(z, x + residual)
    assert_close("y", older.rms_norm(x, module.weight, 1e-3), expected)
    scale = torch.rand(16)
    y, z, mask = older.dropout_add_rms_norm(
        x, residual, module.weight, None, 0.0, 1e-3, layerscale=scale, prenorm=True, return_dropout_mask=True
    )
    assert mask.shape == x.shape
    assert mask.eq(1).all()
    assert_close("z", z, x * scale + residual)
    assert_close("y", y, module(z))
    assert_close("y", older.DropoutAddRMSNorm(16, p=0.5).eval()(x, residual), older.RMSNorm(16)(x + residual))
    y0, y1 = older.dropout_add_rms_norm_parallel_residual(x, x, None, module.weight, None, None, None, 0.0, 1e-3)
    assert y1 is None
    assert_close("y", y0, module(2 * x))


def test_compiles_whole() -> None:
    x, residual = (torch.randn(6, 16, requires_grad=True) for _ in range(2))
    weight = torch.rand(16)
    compiled = torch.compile(
        lambda x, r: rms_norm_fn(x, weight, None, r, prenorm=True), fullgraph=True, backend="aot_eager"
    )
    for got, expected in zip(compiled(x, residual), rms_norm_fn(x, weight, None, residual, prenorm=True), strict=True):
        assert_close("y", got, expected)


def test_compiles_with_an_eps_that_changes() -> None:
    torch._dynamo.reset()
    x, weight = torch.randn(6, 16), torch.rand(16)
    module = RMSNorm(16)
    compiled = torch.compile(
        lambda x, eps: module(rms_norm_fn(x, weight, None, eps=eps)), fullgraph=True, backend="eager", dynamic=True
    )
    for eps in (1e-5, 1e-6, 1.0):
        assert_close("y", compiled(x, eps), module(rms_norm_fn(x, weight, None, eps=eps)))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU that torch can use")
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(str(each)[6:] for each in mode))
def test_autograd_on_the_gpu(mode: tuple[torch.dtype, ...]) -> None:
    dtype, weight_type, residual_type = mode
    torch.manual_seed(4)
    leaves = [
        torch.randn(4, 700, 1032, device=DEVICE).to(dtype).requires_grad_(),
        torch.randn(1032, device=DEVICE).to(weight_type).requires_grad_(),
        torch.randn(1032, device=DEVICE).to(weight_type).requires_grad_(),
    ]
    if residual_type is not None:
        leaves.append(torch.randn(4, 700, 1032, device=DEVICE).to(residual_type).requires_grad_())
    got = layer_norm_fn(*leaves, prenorm=True)
    copies = [leaf.detach().cpu().requires_grad_() for leaf in leaves]
    expected = layer_norm_fn(*copies, prenorm=True)
    bar = 1e-5 if dtype is torch.float32 else 2e-2
    for name, a, b in zip("yz", got, expected, strict=True):
        assert_close(name, a.cpu(), b, tiny=bar, dtype=b.dtype)
    upstream = [torch.randn_like(each) for each in got]
    grads = torch.autograd.grad(got, leaves, upstream)
    wanted_grads = torch.autograd.grad(expected, copies, [each.cpu() for each in upstream])
    for name, a, b in zip(("dx", "dweight", "dbias", "dresidual"), grads, wanted_grads, strict=False):
        assert_close(name, a.cpu(), b, tiny=bar, dtype=b.dtype)


@pytest.mark.parametrize("is_rms", [False, True], ids=["layer", "rms"])
def test_references_undo_dropout(is_rms: bool) -> None:
    """Upstream's tests compare layer_norm_fn with them, in its dtype and in fp32."""
    torch.manual_seed(5)
    x, x1, residual = torch.randn(3, 8, 64).bfloat16()
    weight, weight1, bias, bias1 = torch.rand(4, 64)
    arguments = {"residual": residual.float(), "x1": x1, "weight1": weight1, "bias1": bias1, "dropout_p": 0.3}
    arguments |= {"prenorm": True, "zero_centered_weight": True}
    *got, mask, mask1 = layer_norm_fn(x, weight, bias, **arguments, is_rms_norm=is_rms, return_dropout_mask=True)
    by = rms_norm_ref if is_rms else layer_norm_ref
    masks = {"dropout_mask": mask, "dropout_mask1": mask1}
    rough, exact = (by(x, weight, bias, **arguments, **masks, upcast=upcast) for upcast in (False, True))
    for name, a, b, c in zip(("y", "y1", "z"), got, rough, exact, strict=True):
        assert_close(name, a, c, rough=b, tiny=1e-2)
    scale = torch.rand(8)
    assert_close("y", by(x, weight, bias, rowscale=scale.bfloat16(), upcast=True).float(),
                 layer_norm_fn(x.float() * scale.bfloat16()[:, None].float(), weight, bias, is_rms_norm=is_rms),
                 tiny=1e-2)  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True])
def test_linear_after_the_norm(autocast: bool) -> None:
    torch.manual_seed(6)
    dtype = torch.float32 if autocast else torch.float64
    leaves = [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((3, 16), (16,), (16,), (9, 16), (9,))]
    residual = torch.randn(3, 16, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, z = layer_norm_linear_fn(*leaves, residual=residual, prenorm=True)
    x, weight, bias, linear_weight, linear_bias = leaves
    y = torch.nn.functional.layer_norm(x + residual, (16,), weight, bias, 1e-6)
    expected = torch.nn.functional.linear(y, linear_weight, linear_bias)
    assert out.dtype is (torch.bfloat16 if autocast else dtype)
    assert torch.equal(z, x + residual)
    tiny = 0.1 if autocast else 1e-9
    assert_close("out", out, expected, tiny=tiny)
    mine, other = (torch.autograd.grad(each.square().sum(), (*leaves, residual)) for each in (out, expected))
    for a, b in zip(mine, other, strict=True):
        assert_close("gradient", a, b, tiny=tiny * max(1.0, float(b.abs().max())), dtype=b.dtype)
    with pytest.raises(ValueError, match=r"linear_weight: got shape \(9, 4\), wanted \(features, 16\)"):
        layer_norm_linear_fn(x, weight, bias, linear_weight[:, :4], None)


ERRORS = {
    "x": ({"x": torch.zeros(())}, ValueError, "x: got shape"),
    "x dtype": ({"x": torch.zeros(2, 4, dtype=torch.int32)}, TypeError, "x: got torch.int32"),
    "weight": ({"weight": torch.zeros(3)}, ValueError, r"weight: got shape \(3,\), wanted \(4,\)"),
    "bias": ({"bias": torch.zeros(4, device="meta")}, ValueError, "bias: got a tensor on meta"),
    "residual": ({"residual": torch.zeros(2, 5)}, ValueError, "residual: got shape"),
    "bias1": ({"bias1": torch.zeros(4)}, ValueError, "bias1: got a tensor, wanted None without weight1"),
    "rowscale": ({"rowscale": torch.zeros(3)}, ValueError, "rowscale: got shape"),
    "eps": ({"eps": -1.0}, ValueError, "eps: got -1.0"),
    "dropout": ({"dropout_p": 1.0}, ValueError, "dropout_p: got 1.0"),
    "out_dtype": ({"out_dtype": torch.int32}, TypeError, "out_dtype: got torch.int32"),
    "out": ({"out": torch.zeros(2, 5)}, ValueError, "out: got shape"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    change, error, match = ERRORS[case]
    arguments = {"x": torch.zeros(2, 4), "weight": torch.zeros(4), "bias": None, **change}
    with pytest.raises(error, match=match):
        layer_norm_fn(**arguments)
