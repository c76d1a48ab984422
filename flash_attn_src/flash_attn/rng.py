"""rng_state, which dropout's random numbers of one call come from."""

from __future__ import annotations

import torch


def draw(device: torch.device) -> torch.Tensor:
    """int64[2] from torch's own generator: it advances with it, and can be captured in a graph."""
    return torch.randint(0, 2**31 - 1, (2,), dtype=torch.int64, device=device)
