"""Cross entropy: PyTorch's form against torch's own loss, the kernels against both, a vocabulary over processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from assert_close import assert_close
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton import cross_entropy
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from small_calls import Late
from two_ranks import both

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {
    "plain": (0.0, 1.0, 0.0),
    "smoothing": (0.1, 1.0, 0.0),
    "z-loss": (0.0, 1.0, 1e-2),
    "all": (0.2, 0.7, 1e-3),
    "all smoothing": (1.0, 1.0, 0.0),
}


def _draw(rows: int, classes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(classes)
    labels = torch.randint(classes, (rows,), device=DEVICE)
    labels[::4] = -100
    return (torch.randn(rows, classes, device=DEVICE) * 3).to(dtype), labels


def _wanted(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, scale: float, square: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses, z_losses, gradient of sum(losses * (1, 2, 3, ...))) in fp64."""
    exact = logits.detach().double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(
        exact * scale, labels, reduction="none", label_smoothing=smoothing, ignore_index=-100
    )
    z_losses = (square * (exact * scale).logsumexp(1).square()).masked_fill(labels == -100, 0.0)
    losses = losses + z_losses
    weights = torch.arange(1, len(losses) + 1, device=losses.device, dtype=torch.float64)
    return losses.detach(), z_losses.detach(), torch.autograd.grad(losses, exact, weights)[0]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("classes", [1, 7, 4096, 5003])
def test_kernels(classes: int, dtype: torch.dtype, option: str) -> None:
    logits, labels = _draw(9, classes, dtype)
    options = (*OPTIONS[option], -100, classes, 0)
    losses, z_losses, lse = cross_entropy.launch_forward(logits, labels, None, *options)
    expected, wanted_z, gradient = _wanted(logits, labels, *OPTIONS[option])
    assert_close("losses", losses, expected, tiny=2e-6)
    assert_close("z_losses", z_losses, wanted_z, tiny=2e-6)
    again, _, _ = cross_entropy.launch_forward(logits, labels, lse, *options)
    assert torch.equal(again, losses)
    weights = torch.arange(1.0, 10.0, device=DEVICE)
    # The interpreter truncates to bf16 where a GPU rounds, so it has twice the error.
    tiny = 2.0**-7 if dtype is torch.bfloat16 and DEVICE == "cpu" else 2e-6
    got = cross_entropy.launch_backward(logits, labels, lse, weights, *options, False)
    assert_close("dlogits", got, gradient, rough=gradient.to(dtype), tiny=tiny, dtype=dtype)
    inplace = logits.clone()
    assert cross_entropy.launch_backward(inplace, labels, lse, weights, *options, True) is inplace
    assert torch.equal(inplace, got)


def test_the_gradient_may_be_on_its_way() -> None:
    logits, labels = _draw(6, 40, torch.float32)
    losses, _ = cross_entropy._CrossEntropy.apply(
        logits.requires_grad_(), labels, None, 0.0, 1.0, 0.0, -100, False, None
    )
    weights = torch.rand(6, device=DEVICE)
    (expected,) = torch.autograd.grad(losses, logits, weights, retain_graph=True)
    (got,) = torch.autograd.grad(losses, logits, Late(weights))
    assert torch.equal(got, expected)


def test_kernels_take_rows_apart_and_masked_classes() -> None:
    logits, labels = _draw(6, 40, torch.float32)
    logits[:, 30:] = -torch.inf
    labels = labels.clamp(max=29)
    wide = torch.zeros(6, 47, device=DEVICE)[:, 3:43].copy_(logits)
    options = (0.0, 1.0, 0.0, -100, 40, 0)
    expected, _, _ = _wanted(logits, labels, 0.0, 1.0, 0.0)
    losses, _, lse = cross_entropy.launch_forward(wide, labels, None, *options)
    assert_close("losses", losses, expected, tiny=2e-6)
    ones = torch.ones(6, device=DEVICE)
    gradient = cross_entropy.launch_backward(wide, labels, lse, ones, *options, False)
    assert gradient[:, 30:].eq(0).all()
    assert cross_entropy.launch_backward(wide, labels, lse, ones, *options, True) is wide
    assert torch.equal(wide, gradient)


def test_a_label_that_is_no_class_shows() -> None:
    logits, _ = _draw(3, 5, torch.float32)
    labels = torch.tensor([5, -1, 2], device=DEVICE)
    losses, _, _ = cross_entropy.launch_forward(logits, labels, None, 0.0, 1.0, 0.0, -100, 5, 0)
    assert losses.isnan().tolist() == [True, True, False]
    with pytest.raises(IndexError, match="labels: got 5 at row 0, wanted 0 to 4 or ignore_index -100"):
        cross_entropy_loss(logits.cpu(), labels.cpu())


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
def test_odd_rows(kernel: bool) -> None:
    """NaN in an ignored row has no effect, and neither has the square of a huge lse if its scale is 0."""
    logits, labels = _draw(4, 8, torch.float32)
    logits[0], logits[1] = torch.nan, 0.0
    logits[1, 2], labels[1] = 1e25, 2
    logits.requires_grad_()
    if kernel:
        losses, _ = cross_entropy._CrossEntropy.apply(logits, labels, None, 0.0, 1.0, 0.0, -100, False, None)
    else:
        losses, _ = cross_entropy_loss(logits.cpu(), labels.cpu())
    assert losses.isfinite().all()
    assert losses[:2].eq(0.0).all()
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient.isfinite().all()
    assert gradient[:2].eq(0.0).all()


@pytest.mark.parametrize("option", OPTIONS)
def test_pytorch_form_and_its_gradient(option: str) -> None:
    smoothing, scale, square = OPTIONS[option]
    logits, labels = (x.cpu() for x in _draw(9, 33, torch.float64))
    logits.requires_grad_()
    call = {"label_smoothing": smoothing, "logit_scale": scale, "lse_square_scale": square}
    losses, z_losses = cross_entropy_loss(logits, labels, **call)
    expected, wanted_z, gradient = _wanted(logits, labels, smoothing, scale, square)
    assert_close("losses", losses, expected, tiny=1e-12)
    assert_close("z_losses", z_losses, wanted_z, tiny=1e-12)
    assert not z_losses.requires_grad
    weights = torch.arange(1, 10, dtype=torch.float64)
    assert_close("dlogits", torch.autograd.grad(losses, logits, weights)[0], gradient, tiny=1e-12)
    known = logits.logsumexp(1).detach()
    losses, _ = cross_entropy_loss(logits, labels, known, **call)
    assert_close("losses", losses, expected, tiny=1e-12)
    assert_close("dlogits", torch.autograd.grad(losses, logits, weights)[0], gradient, tiny=1e-12)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_known_lse_serves_plain_logits_alone(option: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As upstream: with a scale or smoothing it is not what the loss needs. One that is wrong shows if it counts."""
    if kernel:
        apply = cross_entropy._CrossEntropy.apply
        monkeypatch.setattr(cross_entropy, "reference", lambda *args: apply(*args[:7], False, args[7]))
    smoothing, scale, square = OPTIONS[option]
    logits, labels = _draw(9, 33, torch.float32)
    call = {"label_smoothing": smoothing, "logit_scale": scale, "lse_square_scale": square}
    losses, _ = cross_entropy_loss(logits, labels, **call)
    known, _ = cross_entropy_loss(logits, labels, logits.logsumexp(1) + 1.0, **call)
    assert torch.equal(known, losses) == (scale != 1.0 or smoothing != 0.0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_module_reduces_as_torch_does(reduction: str) -> None:
    logits, labels = (x.cpu() for x in _draw(9, 33, torch.float32))
    module = CrossEntropyLoss(reduction=reduction, label_smoothing=0.1)
    expected = torch.nn.CrossEntropyLoss(reduction=reduction, label_smoothing=0.1)(logits, labels)
    assert_close("loss", module(logits, labels), expected)
    loss, z_loss = CrossEntropyLoss(reduction=reduction, lse_square_scale=0.1, return_z_loss=True)(logits, labels)
    plain = torch.nn.CrossEntropyLoss(reduction=reduction)(logits, labels)
    assert_close("loss", loss - z_loss, plain)
    labels = labels.clamp_min(0)
    expected = torch.nn.CrossEntropyLoss(reduction=reduction, ignore_index=0)(2.0 * logits, labels)
    assert_close("loss", CrossEntropyLoss(0, reduction, logit_scale=2.0)(logits, labels), expected)


def test_compiles_whole() -> None:
    logits, labels = (x.cpu() for x in _draw(5, 11, torch.float32))
    logits.requires_grad_()
    compiled = torch.compile(lambda x: cross_entropy_loss(x, labels)[0].sum(), fullgraph=True, backend="aot_eager")
    assert_close("loss", compiled(logits), cross_entropy_loss(logits, labels)[0].sum())


def test_compiles_with_options_that_change() -> None:
    torch._dynamo.reset()
    logits, labels = (x.cpu() for x in _draw(5, 11, torch.float32))

    def loss(x: torch.Tensor, smoothing: float) -> torch.Tensor:
        losses, _ = cross_entropy_loss(x, labels, label_smoothing=smoothing, logit_scale=smoothing)
        return CrossEntropyLoss()(x, labels) + losses.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="eager", dynamic=True)
    for smoothing in (0.1, 0.2, 1.0):
        assert_close("loss", compiled(logits, smoothing), loss(logits, smoothing))


def _half_of_the_classes(rank: int) -> list[torch.Tensor]:
    """Losses and the gradient of this rank's half: PyTorch's form, then the kernels' parts."""
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 10), torch.tensor([0, 9, 4, -100, 5, 2])
    part = logits[:, rank * 5 : rank * 5 + 5].clone().requires_grad_()
    call = {"label_smoothing": 0.1, "lse_square_scale": 0.01, "logit_scale": 0.8}
    losses, z_losses = cross_entropy_loss(part, labels, **call, process_group=dist.group.WORLD)
    losses.sum().backward()
    return [losses, z_losses, part.grad]


def test_classes_over_two_processes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 10).requires_grad_(), torch.tensor([0, 9, 4, -100, 5, 2])
    losses, z_losses = cross_entropy_loss(logits, labels, label_smoothing=0.1, lse_square_scale=0.01, logit_scale=0.8)
    losses.sum().backward()
    for rank, (got, got_z, gradient) in enumerate(both(tmp_path, _half_of_the_classes)):
        assert_close("losses", got, losses)
        assert_close("z_losses", got_z, z_losses)
        assert_close("dlogits", gradient, logits.grad[:, rank * 5 : rank * 5 + 5])


def test_the_kernels_parts_add_up() -> None:
    """What a process group makes of two kernels' results: the losses of the whole."""
    logits, labels = _draw(6, 32, torch.float32)
    parts = []
    for rank in range(2):
        part = logits[:, rank * 16 : rank * 16 + 16]
        options = (0.1, 0.8, 0.01, -100, 32, rank * 16)
        parts.append(cross_entropy.launch_forward(part, labels, None, *options))
    lse = torch.stack([part[2] for part in parts]).logsumexp(0)
    expected, _, gradient = _wanted(logits, labels, 0.1, 0.8, 0.01)
    kept = labels != -100
    losses = parts[0][0] + parts[1][0] + torch.where(kept, lse + 0.01 * lse.square(), 0.0)
    assert_close("losses", losses, expected, tiny=2e-6)
    weights = torch.arange(1.0, 7.0, device=DEVICE)
    for rank in range(2):
        columns = slice(rank * 16, rank * 16 + 16)
        options = (0.1, 0.8, 0.01, -100, 32, rank * 16)
        got = cross_entropy.launch_backward(logits[:, columns], labels, lse, weights, *options, False)
        assert_close("dlogits", got, gradient[:, columns], tiny=2e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU that torch can use")
def test_autograd_on_the_gpu() -> None:
    logits, labels = _draw(17, 1003, torch.bfloat16)
    logits.requires_grad_()
    expected, wanted_z, gradient = _wanted(logits, labels, 0.1, 1.0, 0.01)
    weights = torch.arange(1.0, 18.0, device=DEVICE)
    for inplace in (False, True):
        losses, z_losses = cross_entropy_loss(
            logits, labels, label_smoothing=0.1, lse_square_scale=0.01, inplace_backward=inplace
        )
        assert_close("losses", losses, expected, tiny=2e-6)
        assert_close("z_losses", z_losses, wanted_z, tiny=2e-6)
        (got,) = torch.autograd.grad(losses, logits, weights)
        assert_close("dlogits", got, gradient, rough=gradient.bfloat16(), tiny=2e-6)


ERRORS = {
    "logits rank": ({"logits": torch.zeros(3)}, ValueError, "logits: got shape"),
    "no classes": ({"logits": torch.zeros(3, 0)}, ValueError, "logits: got 0 classes"),
    "logits dtype": ({"logits": torch.zeros(3, 4, dtype=torch.int32)}, TypeError, "logits: got torch.int32"),
    "labels dtype": ({"labels": torch.zeros(3)}, TypeError, "labels: got torch.float32"),
    "labels shape": ({"labels": torch.zeros(4, dtype=torch.int64)}, ValueError, r"labels: got shape \(4,\)"),
    "labels device": (
        {"labels": torch.zeros(3, dtype=torch.int64, device="meta")},
        ValueError,
        "labels: got a tensor on meta",
    ),
    "lse dtype": ({"precomputed_lse": torch.zeros(3).half()}, TypeError, "precomputed_lse: got torch.float16"),
    "smoothing": ({"label_smoothing": 1.5}, ValueError, "label_smoothing: got 1.5"),
    "smoothing type": ({"label_smoothing": None}, TypeError, "label_smoothing: got None"),
    "scale": ({"logit_scale": float("nan")}, ValueError, "logit_scale: got nan"),
    "square": ({"lse_square_scale": "a"}, TypeError, "lse_square_scale: got 'a'"),
    "ignore": ({"ignore_index": 1.5}, TypeError, "ignore_index: got 1.5"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    change, error, match = ERRORS[case]
    arguments = {"logits": torch.zeros(3, 4), "labels": torch.zeros(3, dtype=torch.int64), **change}
    with pytest.raises(error, match=match):
        cross_entropy_loss(**arguments)


def test_reduction_is_checked() -> None:
    with pytest.raises(NotImplementedError, match="reduction: got 'max'"):
        CrossEntropyLoss(reduction="max")
