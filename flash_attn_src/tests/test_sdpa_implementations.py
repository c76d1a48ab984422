"""PyTorch's own doors for flash attention (torch.nn.attention, torch 2.11 or newer), against its math path.

The implementation "flash_attn" replaces PyTorch's operators; "FA3" and "FA4" are PyTorch's code, which calls the wheels
flash-attn-3 and flash-attn-4. On a CPU the operators are replaced for CPU tensors, and PyTorch's code is called behind
its question for the GPU. On a GPU everything runs through the public functions.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn import sdpa_report
from flash_attn.sdpa import aten
from torch.nn.attention import SDPBackend, sdpa_kernel

registry: Any = torch.nn.attention
if not hasattr(registry, "register_flash_attention_impl"):
    pytest.skip("torch before 2.11 has one flash attention", allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float16, torch.bfloat16]
ops = torch.ops.aten
functional: Any = torch.nn.functional


@pytest.fixture
def active() -> Iterator[None]:
    """The operators of PyTorch's flash attention on these kernels."""
    if GPU:
        registry.activate_flash_attention_impl("flash_attn")
        yield
        registry.restore_flash_attention_impl()
        return
    handle = aten.activate("CPU")
    yield
    handle.remove()


def _draw(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float | None) -> torch.Tensor:
    """SDPA by its flash attention: by name on a CPU, for which PyTorch chooses another operator."""
    if GPU:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            gpu: torch.Tensor = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        return gpu
    out: torch.Tensor = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[0]
    return out


def _seen(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> torch.Tensor:
    """Mask of a window, aligned to the bottom right; -1 is open."""
    ends = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    keys, (left, right) = torch.arange(seqlen_k)[None], window
    return ((left < 0) | (keys >= ends - left)) & ((right < 0) | (keys <= ends + right))


def _exact(*tensors: torch.Tensor, window: tuple[int, int], scale: float | None, wide: torch.dtype) -> torch.Tensor:
    """Attention of (..., heads, seqlen, head_dim) by its definition, all in one type."""
    q, k, v = tensors
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scores = (q.to(wide) @ k.to(wide).mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = _seen(q.shape[-2], k.shape[-2], window).to(q.device)
    out: torch.Tensor = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0) @ v.to(wide)
    return out


def _compare(
    out: torch.Tensor, leaves: list[torch.Tensor], window: tuple[int, int], scale: float | None = None
) -> None:
    """Checks result and gradients of (batch, heads, seqlen, head_dim) tensors: at most twice the error of the
    definition in the tensors' own type."""
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, out.dtype)
    result = (out, *torch.autograd.grad(out, leaves, dout))
    results = []
    for wide in (torch.float32, out.dtype):
        copies = [x.detach().to(wide).requires_grad_() for x in leaves]
        best = _exact(*copies, window=window, scale=scale, wide=wide)
        results.append((best, *torch.autograd.grad(best, copies, dout.to(wide))))
    for name, value, exact, rough in zip(("out", "dq", "dk", "dv"), result, *results, strict=True):
        assert_close(name, value, exact, rough=rough, tiny=2e-5)


SHAPES = [
    ((2, 3, 17, 40), (2, 3, 17, 40)),
    ((1, 4, 33, 64), (1, 4, 20, 64)),
    ((1, 2, 5, 128), (1, 2, 77, 128)),
]


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
@pytest.mark.parametrize(("q", "k"), SHAPES)
def test_scaled_dot_product_attention(dtype: torch.dtype, q: tuple[int, ...], k: tuple[int, ...]) -> None:
    served = sdpa_report().served
    _compare(_attend(*(leaves := _draw(q, k, k, dtype=dtype)), is_causal=False, scale=0.2), leaves, (-1, -1), 0.2)
    assert sdpa_report().served == served + 1


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("layout", ["heads first", "heads second", "head dim first"])
def test_layouts_and_causal(layout: str) -> None:
    """The result and the gradients have the strides that torch.compile expects: those of the inputs."""
    if GPU and layout == "head dim first":
        pytest.skip("PyTorch takes flash attention for a GPU only where the head dim has stride 1")
    order = {"heads first": (0, 1, 2, 3), "heads second": (0, 2, 1, 3), "head dim first": (0, 1, 3, 2)}[layout]
    shape = [(2, 4, 19, 32)[axis] for axis in order]
    leaves = [
        x.detach().permute([order.index(axis) for axis in range(4)]).requires_grad_()
        for x in _draw(*[tuple(shape)] * 3, dtype=torch.bfloat16)
    ]
    out = _attend(*leaves, is_causal=True, scale=None)
    if not GPU:
        assert out.stride() == leaves[0].stride()
    _compare(out, leaves, (-1, 0))


@pytest.mark.usefixtures("active")
def test_dropout_is_the_same_in_the_backward() -> None:
    """With the identity as values the result is the dropped attention, which dv must have transposed."""
    q, k = _draw((1, 1, 32, 16), (1, 1, 32, 16), dtype=torch.float16)
    v = torch.eye(32, dtype=torch.float16, device=DEVICE)[None, None].requires_grad_()
    if GPU:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = functional.scaled_dot_product_attention(*(x.repeat(1, 1, 1, 2) for x in (q, k)), v, dropout_p=0.5)
    else:
        out = ops._scaled_dot_product_flash_attention(q.repeat(1, 1, 1, 2), k.repeat(1, 1, 1, 2), v, 0.5)[0]
    assert 0.3 < (out == 0).float().mean() < 0.7
    (dv,) = torch.autograd.grad(out, v, torch.eye(32, dtype=torch.float16, device=DEVICE)[None, None])
    torch.testing.assert_close(dv, out.mT, rtol=2e-3, atol=1e-4)


@pytest.mark.usefixtures("active")
def test_under_torch_compile() -> None:
    leaves = _draw((1, 2, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16), dtype=torch.float16)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _attend(q, k, v, is_causal=True, scale=None) * 1

    _compare(torch.compile(attend, backend="aot_eager")(*leaves), leaves, (-1, 0))


LENGTHS = ([7, 12, 1, 20], [7, 30, 16, 20])


def _starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def _each(x: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return [rows.transpose(0, 1) for rows in torch.split(x, lengths)]


def _varlen(*tensors: torch.Tensor, window: tuple[int, int], **options: Any) -> Any:
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    starts = map(_starts, LENGTHS)
    return varlen_attn(*tensors, *starts, *map(max, LENGTHS), **_windowed(window), **options)


def _windowed(window: tuple[int, int]) -> dict[str, Any]:
    """torch 2.11 calls a causal mask is_causal and has windows later."""
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    if "window_size" in inspect.signature(varlen_attn).parameters:
        return {"window_size": window}
    if window not in ((-1, -1), (-1, 0)):
        pytest.skip("this torch has no window")
    return {"is_causal": window == (-1, 0)}


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_varlen_attn(window: tuple[int, int], scale: float | None) -> None:
    leaves = _draw((40, 3, 32), (73, 3, 32), (73, 3, 32), dtype=torch.bfloat16)
    dout = torch.randn((40, 3, 32), generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    served = sdpa_report().served
    out = _varlen(*leaves, window=window, **({} if scale is None else {"scale": scale}))
    result = (out, *torch.autograd.grad(out, leaves, dout))
    assert sdpa_report().served == served + 1
    results = []
    for wide in (torch.float32, torch.bfloat16):
        copies = [x.detach().to(wide).requires_grad_() for x in leaves]
        rows = zip(*(_each(x, LENGTHS[index > 0]) for index, x in enumerate(copies)), strict=True)
        best = torch.cat([_exact(*each, window=window, scale=scale, wide=wide).transpose(0, 1) for each in rows])
        results.append((best, *torch.autograd.grad(best, copies, dout.to(wide))))
    for name, value, exact, rough in zip(("out", "dq", "dk", "dv"), result, *results, strict=True):
        assert_close(name, value, exact, rough=rough, tiny=2e-5)


@pytest.mark.usefixtures("active")
def test_varlen_attn_with_heads_that_share_keys_and_its_lse() -> None:
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    leaves = [x.detach() for x in _draw((40, 4, 32), (73, 2, 32), (73, 2, 32), dtype=torch.float16)]
    try:
        out, lse = _varlen(*leaves, window=(-1, -1), enable_gqa=True, return_aux=varlen.AuxRequest(lse=True))
    except TypeError:
        pytest.skip("this torch has no enable_gqa")
    rows = zip(*(_each(x.float(), LENGTHS[index > 0]) for index, x in enumerate(leaves)), strict=True)
    for got, got_lse, (q, k, v) in zip(
        torch.split(out, LENGTHS[0]), torch.split(lse, LENGTHS[0], 1), rows, strict=True
    ):
        expected = _exact(q, k, v, window=(-1, -1), scale=None, wide=torch.float32).transpose(0, 1)
        torch.testing.assert_close(got.float(), expected, rtol=2e-3, atol=2e-3)
        scores = q @ k.repeat_interleave(2, 0).mT * 32**-0.5
        torch.testing.assert_close(got_lse, scores.logsumexp(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_varlen_attn_over_pages(num_splits: int | None) -> None:
    """block_table and seqused_k, the result into a given tensor too."""
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this torch has no pages")
    size, used = 256 if GPU else 16, [20, 33]
    q, k, v = (x.detach() for x in _draw((3, 2, 64), (6, size, 2, 64), (6, size, 2, 64), dtype=torch.float16))
    table = torch.tensor([[4, 1, 5], [0, 3, 2]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    args = (q, k, v, _starts([1, 2]), None, 2, 3 * size)
    options = {"window_size": (-1, 0), "seqused_k": lengths, "block_table": table, "num_splits": num_splits}
    into = torch.empty_like(q)
    with torch.no_grad():
        out = varlen.varlen_attn(*args, **options)
        varlen.varlen_attn_out(into, *args, **options)
    assert torch.equal(out, into)
    for got, rows, pages, length in zip(
        torch.split(out, [1, 2]), torch.split(q, [1, 2]), table.tolist(), used, strict=True
    ):
        keys, values = (x[pages].flatten(0, 1)[:length].transpose(0, 1).float() for x in (k, v))
        expected = _exact(rows.transpose(0, 1).float(), keys, values, window=(-1, 0), scale=None, wide=torch.float32)
        torch.testing.assert_close(got.float(), expected.transpose(0, 1), rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("active")
def test_calls_without_a_kernel_are_refused() -> None:
    q = torch.zeros(1, 4, 2, 16, dtype=torch.float16, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"return_debug_mask: got True"):
        ops._flash_attention_forward(q, q, q, None, None, 4, 4, 0.0, False, True)
    with pytest.raises(ValueError, match=r"query: got head dim 12, wanted a multiple of 8"):
        ops._flash_attention_forward(*(x[..., :12] for x in (q, q, q)), None, None, 4, 4, 0.0, False, False)
    with pytest.raises(ValueError, match=r"k"):
        ops._flash_attention_forward(q, q[..., :8], q, None, None, 4, 4, 0.0, False, False)


def test_an_import_alone_activates_nothing() -> None:
    assert "flash_attn" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() is None


@pytest.mark.skipif(GPU, reason="PyTorch has kernels of its own there")
def test_the_handle_gives_the_operators_back() -> None:
    q = torch.zeros(1, 4, 2, 16, dtype=torch.float16)
    handle = aten.activate("CPU")
    ops._flash_attention_forward(q, q, q, None, None, 4, 4, 0.0, False, False)
    handle.remove()
    with pytest.raises(NotImplementedError, match="CPU"):
        ops._flash_attention_forward(q, q, q, None, None, 4, 4, 0.0, False, False)


class _Door:
    """PyTorch's code of FA3 or FA4 by its two functions that call the module, as (batch, seqlen, heads, head_dim)."""

    def __init__(self, name: str) -> None:
        _fa3: Any = importlib.import_module("torch.nn.attention._fa3")
        _fa4: Any = importlib.import_module("torch.nn.attention._fa4")
        self.name = name
        self.forward: Any
        self.backward: Any
        if name == "FA3":
            _fa3._fa3_import_module("flash_attn_interface")
            self.forward, self.backward = _fa3._fa3_run_forward, _fa3._fa3_run_backward
        else:
            _fa4._FA4_MODULE_PATH = "flash_attn.cute.interface"
            self.forward, self.backward = _fa4._fa4_run_forward, _fa4._fa4_run_backward
        self.forward_names, self.backward_names = (
            list(inspect.signature(f).parameters) for f in (self.forward, self.backward)
        )

    def check(self, lengths: tuple[list[int], list[int]] | None, is_causal: bool, window: tuple[int, int]) -> None:
        dtype = torch.bfloat16
        shapes = ((2, 9, 4, 32), (2, 21, 2, 32)) if lengths is None else ((40, 4, 32), (73, 2, 32))
        q, k, v = (x.detach() for x in _draw(shapes[0], shapes[1], shapes[1], dtype=dtype))
        dout = torch.randn(shapes[0], generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        starts = (None, None) if lengths is None else tuple(map(_starts, lengths))
        longest = (9, 21) if lengths is None else tuple(map(max, lengths))
        open_ = -1 if self.name == "FA3" else None
        sides = [open_ if side < 0 else side for side in window]
        given = torch.empty_like(q)
        # Releases of PyTorch differ in whether FA4's functions take the largest lengths and the window.
        middle = longest if "max_q" in self.forward_names else ()
        out, lse = self.forward(q, k, v, *starts, *middle, 0.2, is_causal, *sides, None, given)
        assert out.data_ptr() == given.data_ptr()
        middle = longest if self.name == "FA3" else ()
        sides = sides if "window_size_left" in self.backward_names else []
        gradients = self.backward(dout, q, k, v, out, lse, *starts, *middle, 0.2, is_causal, *sides)
        results = []
        for wide in (torch.float32, dtype):
            copies = [x.to(wide).requires_grad_() for x in (q, k, v)]
            seen = (window[0], 0) if is_causal else window
            if lengths is None:
                best = _exact(*(x.transpose(1, 2) for x in copies), window=seen, scale=0.2, wide=wide).transpose(1, 2)
            else:
                rows = zip(*(_each(x, lengths[index > 0]) for index, x in enumerate(copies)), strict=True)
                best = torch.cat([_exact(*each, window=seen, scale=0.2, wide=wide).transpose(0, 1) for each in rows])
            results.append((best, *torch.autograd.grad(best, copies, dout.to(wide))))
        for name, value, exact, rough in zip(("out", "dq", "dk", "dv"), (out, *gradients), *results, strict=True):
            assert_close(name, value, exact, rough=rough, tiny=2e-5)


@pytest.mark.parametrize("name", ["FA3", "FA4"])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
@pytest.mark.parametrize(("is_causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (4, 2))])
def test_pytorch_calls_functions_of_the_wheels(
    name: str, lengths: tuple[list[int], list[int]] | None, is_causal: bool, window: tuple[int, int]
) -> None:
    if window != (-1, -1) and not hasattr(importlib.import_module("torch.nn.attention.varlen"), "varlen_attn_out"):
        pytest.skip("this torch passes no window on")
    _Door(name).check(lengths, is_causal, window)


@pytest.mark.skipif(not GPU, reason="PyTorch's code asks for a GPU")
@pytest.mark.parametrize("name", ["flash_attn", "FA3", "FA4"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_activated_by_name(name: str, is_causal: bool) -> None:
    leaves = _draw((2, 4, 130, 64), (2, 4, 130, 64), (2, 4, 130, 64), dtype=torch.bfloat16)
    registry.activate_flash_attention_impl(name)
    try:
        assert registry.current_flash_attention_impl() == name
        out = _attend(*leaves, is_causal=is_causal, scale=None)
        _compare(out, leaves, (-1, 0) if is_causal else (-1, -1))
    finally:
        with contextlib.suppress(RuntimeError):
            registry.restore_flash_attention_impl()
