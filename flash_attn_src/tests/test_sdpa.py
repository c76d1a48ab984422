"""PyTorch's scaled_dot_product_attention on these kernels, against PyTorch's own math path.

On a CPU the door is a stand-in: tensors of the CPU count as tensors of a GPU, and the backend `torch` serves them.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn import flash_attn_func, sdpa_report, use_for_sdpa
from flash_attn.sdpa import attention as door
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.set_num_threads(2)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
functional: Any = torch.nn.functional
pytorch = functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not GPU:
        monkeypatch.setattr(door, "is_on_gpu", lambda _: True)
    yield
    assert functional.scaled_dot_product_attention is pytorch


def _draw(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def _math(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        out: torch.Tensor = pytorch(*tensors, **options)
    return out


def _in_own_type(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    """SDPA by its definition in the type of q. PyTorch's math path computes fp16 and bf16 in fp32."""
    if q.dim() == 4:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (options.get("scale") or q.shape[-1] ** -0.5)
    if options.get("is_causal"):
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    out: torch.Tensor = scores.softmax(-1).nan_to_num(0.0) @ v
    return out


def _check(leaves: list[torch.Tensor], mask: torch.Tensor | None = None, **options: Any) -> None:
    """A served call, forward and backward: its error against the math path in fp32 is at most twice that of SDPA by its
    definition in the call's own type."""
    served = sdpa_report().served
    with use_for_sdpa():
        out = functional.scaled_dot_product_attention(*leaves, attn_mask=mask, **options)
    assert sdpa_report().served == served + 1
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, out.dtype)
    inputs = [*leaves, mask] if mask is not None and mask.requires_grad else leaves
    got = (out, *torch.autograd.grad(out, inputs, dout))
    results = []
    ways: list[tuple[Any, torch.dtype]] = [(_math, torch.float32), (_in_own_type, out.dtype)]
    for attend, dtype in ways:
        wide = [x.detach().to(dtype).requires_grad_() for x in inputs]
        bias = wide[3] if len(wide) > 3 else mask
        if bias is not None and bias.dtype not in (torch.bool, dtype):
            bias = bias.to(dtype)
        best = attend(*wide[:3], attn_mask=bias, **options)
        results.append((best, *torch.autograd.grad(best, wide, dout.to(dtype))))
    names = ("out", "dq", "dk", "dv", "dmask")[: len(got)]
    for name, value, exact, rough in zip(names, got, *results, strict=True):
        assert value.dtype is (mask.dtype if name == "dmask" and mask is not None else out.dtype)
        assert_close(name, value, exact, rough=rough, tiny=2e-5)


SHAPES = [
    ((2, 3, 17, 40), (2, 3, 17, 40)),
    ((1, 4, 33, 64), (1, 2, 20, 64)),
    ((2, 1, 5, 80), (2, 1, 77, 80)),
    ((1, 2, 40, 128), (1, 2, 19, 128)),
    ((3, 12, 32), (3, 25, 32)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("q", "k"), SHAPES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_full_and_causal(dtype: torch.dtype, q: tuple[int, ...], k: tuple[int, ...], is_causal: bool) -> None:
    leaves = _draw(q, k, k, dtype=dtype)
    _check(leaves, is_causal=is_causal, enable_gqa=len(q) == 4 and q[1] != k[1])


def _masks(q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Masks of every shape that broadcasts to the scores: boolean, of q's type, fp32."""
    generator = torch.Generator().manual_seed(3)
    full = (*q[:-1], k[-2])
    for axes in itertools.product(*([(1, size) for size in full[:-1]])):
        shape = (*axes, full[-1])
        seen = torch.rand(shape, generator=generator) < 0.7
        seen[..., 0] = True
        yield seen.to(DEVICE)
        yield torch.randn(shape, generator=generator).masked_fill(~seen, -torch.inf).to(DEVICE, dtype)
    yield seen.to(DEVICE)[(0,) * (seen.dim() - 2)]
    yield seen.to(DEVICE)[(0,) * (seen.dim() - 1)].expand(full)
    yield torch.randn(full, generator=generator).to(DEVICE, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("q", "k"), [SHAPES[1], SHAPES[4]])
def test_masks(dtype: torch.dtype, q: tuple[int, ...], k: tuple[int, ...]) -> None:
    for mask in _masks(q, k, dtype):
        _check(_draw(q, k, k, dtype=dtype), mask, enable_gqa=len(q) == 4 and q[1] != k[1])


def test_padding_is_ids_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bias of each score is made where heads and queries share a boolean mask."""
    monkeypatch.setattr(door, "as_bias", None)
    q, k = (2, 4, 9, 16), (2, 2, 12, 16)
    numbers = torch.rand(2, 1, 1, 12, generator=torch.Generator().manual_seed(4))
    seen = (numbers < 0.7).to(DEVICE)  # before it is expanded: a copy has no shared axes
    for mask in (seen, seen.expand(2, 4, 9, 12), seen[:1], seen[1, 0, 0]):
        _check(_draw(q, k, k, dtype=torch.float32), mask, enable_gqa=True)


def test_a_mask_has_a_gradient() -> None:
    for shape in ((1, 1, 9, 12), (2, 4, 9, 12), (1, 4, 9, 12), (9, 12), (12,)):
        (mask,) = _draw(shape, dtype=torch.float32, seed=5)
        _check(_draw((2, 4, 9, 16), (2, 4, 12, 16), (2, 4, 12, 16), dtype=torch.float32), mask)


def test_rows_without_a_key_give_zeros() -> None:
    leaves = _draw((1, 2, 6, 16), (1, 2, 8, 16), (1, 2, 8, 16), dtype=torch.float32)
    mask = torch.ones(6, 8, dtype=torch.bool, device=DEVICE)
    mask[2] = False
    _check(leaves, mask)
    with use_for_sdpa():
        assert not functional.scaled_dot_product_attention(*leaves, attn_mask=mask)[:, :, 2].any()


def test_values_of_another_head_dim_and_a_scale() -> None:
    _check(_draw((1, 2, 9, 48), (1, 2, 11, 48), (1, 2, 11, 32), dtype=torch.float32), scale=0.3)
    _check(_draw((1, 1, 3, 512), (1, 1, 5, 512), (1, 1, 5, 512), dtype=torch.float32))


def test_dropout_drops() -> None:
    q, k, v = _draw((2, 2, 64, 32), (2, 2, 64, 32), (2, 2, 64, 32), dtype=torch.float32)
    torch.manual_seed(0)
    with use_for_sdpa():
        dropped = functional.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.5)
    assert 0.5 < dropped.std() + dropped.mean() < 1.5
    assert dropped.std() > 0.05


def test_random_calls() -> None:
    """Calls drawn at random: all agree with the math path, served or not."""
    draw = random.Random(7)
    for number in range(30):
        heads_k, group = draw.choice([1, 2]), draw.choice([1, 1, 3])
        batch, seqlen_q, seqlen_k = draw.choice([1, 2]), draw.randint(1, 40), draw.randint(1, 40)
        dim, dtype = draw.choice([1, 8, 24, 64, 100]), draw.choice(DTYPES)
        leaves = _draw(
            (batch, heads_k * group, seqlen_q, dim), (batch, heads_k, seqlen_k, dim), (batch, heads_k, seqlen_k, dim),
            dtype=dtype, seed=number,
        )  # fmt: skip
        options: dict[str, Any] = {"enable_gqa": group > 1, "scale": draw.choice([None, 0.2])}
        mask = None
        if draw.random() < 0.4:
            mask = torch.rand(draw.choice([1, seqlen_q]), seqlen_k).to(DEVICE) < 0.8
            mask[..., 0] = True
        else:
            options["is_causal"] = draw.random() < 0.5
        _check(leaves, mask, **options)


def _unserved() -> dict[str, tuple[list[torch.Tensor], dict[str, Any]]]:
    q, k, v = _draw((1, 2, 6, 16), (1, 2, 6, 16), (1, 2, 6, 16), dtype=torch.float32)
    wide = [x.detach().double() for x in (q, k, v)]
    # PyTorch's own kernels on a GPU refuse a mask of one column, which its math path takes.
    column: dict[str, tuple[list[torch.Tensor], dict[str, Any]]] = {}
    if not GPU:
        column["its last axis does not have one element per key"] = ([q, k, v], {"attn_mask": torch.zeros(6, 1)})
    return column | {
        "types": (wide, {}),
        "tensors of other than 3 or 4": ([x[0, 0] for x in (q, k, v)], {}),
        "broadcast": ([q.expand(3, -1, -1, -1), k, v], {}),
        "together with dropout_p": ([q, k, v], {"attn_mask": torch.ones(6, 6, device=DEVICE) > 0, "dropout_p": 0.1}),
        "head dims": ([x.repeat(1, 1, 1, 40) for x in (q, k, v)], {}),
        "a size of 0": ([q[:, :, :0], k, v], {}),
    }


@pytest.mark.parametrize("reason", list(_unserved()))
def test_a_call_that_is_not_served_goes_to_pytorch(reason: str) -> None:
    tensors, options = _unserved()[reason]
    before = sdpa_report()
    with use_for_sdpa():
        torch.manual_seed(0)
        out = functional.scaled_dot_product_attention(*tensors, **options)
    torch.manual_seed(0)
    assert torch.equal(out, pytorch(*tensors, **options))
    after = sdpa_report()
    assert after.served == before.served
    (named,) = (key for key in after.passed_on if after.passed_on[key] != before.passed_on.get(key, 0))
    assert reason in named
    assert named in str(after)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_go_to_pytorch() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3, 8), torch.ones(2, 4, 8)], device=DEVICE)
    assert door.reason_to_pass_on(nested, nested, nested, None, 0.0, False, False) == "a nested tensor"


def test_wrong_calls_have_pytorchs_errors() -> None:
    q, k, v = _draw((1, 2, 6, 16), (1, 2, 6, 16), (1, 2, 6, 16), dtype=torch.float32)
    wrong: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = [
        ((q, k[..., :8], v), {}),
        ((q, k.half(), v), {}),
        ((q, k, v), {"attn_mask": torch.ones(5, 6, device=DEVICE)}),
    ]
    for tensors, options in wrong:
        messages = []
        with use_for_sdpa():
            for function in (functional.scaled_dot_product_attention, pytorch):
                with pytest.raises(RuntimeError) as caught:
                    function(*tensors, **options)
                messages.append(str(caught.value))
        assert messages[0] == messages[1]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_backends_that_the_program_disables_are_not_served() -> None:
    q, k, v = _draw((1, 2, 6, 16), (1, 2, 6, 16), (1, 2, 6, 16), dtype=torch.float32)
    with use_for_sdpa(), sdpa_kernel(SDPBackend.MATH):
        served = sdpa_report().served
        functional.scaled_dot_product_attention(q, k, v)
    assert sdpa_report().served == served
    with use_for_sdpa():
        vectorised = torch.func.vmap(functional.scaled_dot_product_attention)(*(x[None].detach() for x in (q, k, v)))
    assert torch.equal(vectorised[0], pytorch(q, k, v))


def test_tensors_of_a_cpu_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q = torch.randn(1, 1, 4, 8)
    served = sdpa_report().served
    with use_for_sdpa():
        functional.scaled_dot_product_attention(q, q, q)
    assert sdpa_report().served == served


def test_layers_of_torch_are_served() -> None:
    layer = torch.nn.MultiheadAttention(32, 2, batch_first=True, device=DEVICE)
    x = torch.randn(2, 7, 32, device=DEVICE, requires_grad=True)
    expected = layer(x, x, x, need_weights=False)[0]
    served = sdpa_report().served
    with use_for_sdpa():
        out = layer(x, x, x, need_weights=False)[0]
    assert sdpa_report().served == served + 1
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [False, True])
def test_under_torch_compile(mask: bool) -> None:
    leaves = _draw((1, 2, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16), dtype=torch.float32)
    seen = torch.rand(9, 9, device=DEVICE) < 0.9 if mask else None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen) * 2
        return out

    with use_for_sdpa():
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        out = compiled(*leaves)
        gradients = torch.autograd.grad(out.sum(), leaves)
    expected = attend(*leaves)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for got, wanted in zip(gradients, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_autocast() -> None:
    q, k, v = (x.detach() for x in _draw((1, 2, 9, 64), (1, 2, 9, 64), (1, 2, 9, 64), dtype=torch.float32))
    for inputs in ((q, k, v), (q.half(), k.half(), v.half()), (q, k.bfloat16(), v)):
        with torch.autocast(DEVICE, torch.bfloat16):
            expected = pytorch(*inputs)
            with use_for_sdpa():
                served = sdpa_report().served
                out = functional.scaled_dot_product_attention(*inputs)
        assert sdpa_report().served == served + 1
        assert out.dtype is expected.dtype is torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def _run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flash_attn.sdpa", *words]
    environment = {"PYTHONPATH": str(Path(door.__file__).parents[2])}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def test_a_program_that_is_not_changed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\nfrom torch.nn.functional import scaled_dot_product_attention as attend\n"
        "print(sys.argv[1:], __name__)\nattend(*torch.randn(3, 1, 2, 4, 8))\n",
        encoding="utf-8",
    )
    done = _run(tmp_path, str(program), "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['--steps', '3'] __main__"
    assert "0 calls served by flash_attn, 1 by PyTorch" in done.stderr
    assert "tensors that are not on one GPU" in done.stderr
    assert _run(tmp_path, "-m", "program").stdout.strip() == "[] __main__"
    absent = _run(tmp_path, "absent.py")
    assert (absent.returncode, "no program absent.py" in absent.stderr) == (2, True)


def test_an_import_alone_changes_nothing() -> None:
    assert flash_attn_func is not None
    assert functional.scaled_dot_product_attention is pytorch
