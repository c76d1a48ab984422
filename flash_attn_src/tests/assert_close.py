"""The one comparison of results: shape, dtype, pattern of inf and NaN, largest and RMS error."""

from __future__ import annotations

import torch

_WORST = 5


def assert_close(
    name: str,
    got: torch.Tensor,
    wanted: torch.Tensor,
    *,
    rough: torch.Tensor | None = None,
    factor: float = 2.0,
    tiny: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> None:
    """Fails unless the error of `got` against `wanted`, an fp32 or fp64 reference, is at most `factor` times `rough`'s
    plus `tiny`.

    `rough` is the same computed by PyTorch in the type of `got`; without it the bar is `tiny` alone. `tiny`
    is relative to the largest finite value of `wanted` where that is above 1. dtype, if given, is got's.
    """
    if got.shape != wanted.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}")
    if dtype is not None and got.dtype is not dtype:
        raise AssertionError(f"{name}: dtype {got.dtype}, wanted {dtype}")
    if got.numel() == 0:
        return
    exact = wanted.detach().double()
    value = got.detach().to(exact.device).double()
    finite = exact.isfinite()
    same = torch.where(finite, value.isfinite(), (value == exact) | (value.isnan() & exact.isnan()))
    if not bool(same.all()):
        raise AssertionError(f"{name}: inf and NaN differ{_places(~same, value, exact)}")
    error = torch.where(finite, value - exact, 0.0).abs()
    floor = tiny * max(1.0, float(torch.where(finite, exact, 0.0).abs().max()))
    bar_max = bar_rms = floor
    if rough is not None:
        rough_error = torch.where(finite, rough.detach().to(exact.device).double() - exact, 0.0).abs()
        bar_max = factor * float(rough_error.max()) + floor
        bar_rms = factor * _rms(rough_error) + floor
    if float(error.max()) > bar_max or _rms(error) > bar_rms:
        raise AssertionError(
            f"{name}: max error {float(error.max()):.3e} (bar {bar_max:.3e}), "
            f"RMS {_rms(error):.3e} (bar {bar_rms:.3e}){_places(error, value, exact)}"
        )


def _rms(error: torch.Tensor) -> float:
    return float(error.square().mean().sqrt())


def _places(badness: torch.Tensor, value: torch.Tensor, exact: torch.Tensor) -> str:
    """The worst coordinates, a line each."""
    worst = badness.double().flatten().topk(min(_WORST, badness.numel())).indices
    lines = []
    for flat in worst.tolist():
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), badness.shape))
        if badness[place]:
            lines.append(f"\n  at {place}: got {float(value[place]):.6g}, wanted {float(exact[place]):.6g}")
    return "".join(lines)
