"""The count of SDPA calls: served by these kernels, or passed on to PyTorch, by reason."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Report:
    """Calls since the process began, in every thread. A call that raises an error does not count.

    A call in a compiled graph counts once for each graph, when it is compiled. Programs of torch.export, torch.fx,
    TorchScript and torch.compile(backend="eager") call PyTorch's function: there, each call counts.

    served: calls that ran on the kernels of this package.
    passed_on: reason -> calls that PyTorch computed.
    """

    served: int = 0
    passed_on: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        passed = [f"  {count:8d}  {reason}" for reason, count in Counter(self.passed_on).most_common()]
        total = sum(self.passed_on.values())
        return "\n".join(
            [
                f"scaled_dot_product_attention: {self.served} calls served by flash_attn, {total} by PyTorch",
                *passed,
            ]
        )


_served = 0
_passed_on: Counter[str] = Counter()
_lock = threading.Lock()


def count_served() -> None:
    """Counts a call that these kernels served."""
    global _served
    with _lock:
        _served += 1


def count_passed_on(reason: str) -> None:
    """Counts a call that PyTorch got. The reasons are few: they name no sizes."""
    with _lock:
        _passed_on[reason] += 1


def sdpa_report() -> Report:
    """The calls so far. Printing it gives a line for each reason."""
    with _lock:
        return Report(served=_served, passed_on=dict(_passed_on))
