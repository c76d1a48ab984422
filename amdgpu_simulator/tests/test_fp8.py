"""FP8 conversions give the same bits as torch's. Also tests overflow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from amdgpu_simulator.isa import fp8, targets


@pytest.mark.parametrize(("target", "dtype"), [("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn)])
def test_fp8_is_the_format_of_torch(target: str, dtype: torch.dtype) -> None:
    """Every byte, and every upper half of a float32 with three lower halves: exact, just above, just below."""
    gpu, largest = targets.get(target), torch.finfo(dtype).max
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(fp8.widen(np.arange(256), gpu), numbers)
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    values = np.concatenate([halves, halves | 1, halves | 0xFFFF]).view(np.float32)
    expected = torch.from_numpy(values).clamp(-largest, largest).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(fp8.narrow(values, gpu, saturates=True), expected)
    # Without saturation, NaN from half a step above the largest number on. torch 2.13 saturates e4m3fn there.
    step = largest / 15 if target == "gfx942" else largest / 14
    inside = np.abs(values) < largest + step / 2
    np.testing.assert_array_equal(fp8.narrow(values[inside], gpu), expected[inside])
    assert np.isnan(fp8.widen(fp8.narrow(values[np.abs(values) > largest + step / 2], gpu), gpu)).all()
