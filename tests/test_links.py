from __future__ import annotations

import random
from typing import Any

from rocm_wheels.publish.links import Wheel


def _wheel(flash_attn: str, **other: Any) -> Wheel:
    facts: dict[str, Any] = {"rocm": "6.2", "torch": "2.5", "backend": "ck", "python": "3.10", **other}
    fields = dict.fromkeys(("name", "url", "sha256", "metadata_sha256", "requires_python", "release"), "")
    return Wheel(flash_attn=flash_attn, yanked=None, size=0, targets=(), verdict=None, **facts, **fields)  # type: ignore[arg-type]


def test_the_order_of_wheels() -> None:
    """Newest first, a release before its post releases in their order, then the universal wheel, ROCm, torch, backend
    and Python.
    """
    ordered = [
        _wheel("2.10.0"),
        _wheel("2.8.3", rocm="", torch=""),
        _wheel("2.8.3", rocm="10.1"),
        _wheel("2.8.3", rocm="7.2"),
        _wheel("2.8.3", torch="2.10"),
        _wheel("2.8.3", torch="2.9"),
        _wheel("2.8.3"),
        _wheel("2.8.3", python="3.9"),
        _wheel("2.8.3", backend="triton"),
        _wheel("2.8.3.post1", rocm="", torch=""),
        _wheel("2.8.3.post2"),
        _wheel("2.8.3.post10"),
        _wheel("2.7.4"),
        _wheel("2.7.4.post1"),
    ]
    ordered[6:8] = ordered[7:5:-1]  # Python ascends: 3.9 before 3.10
    for seed in range(20):
        shuffled = random.Random(seed).sample(ordered, len(ordered))
        assert sorted(shuffled) == ordered
