"""The count of calls of a function of PyTorch: served by these kernels, or passed on to PyTorch, by reason."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Report:
    """Calls since the process began, in every thread. A call that raises an error does not count.

    A call in a compiled graph counts once for each graph, when it is compiled. Programs of torch.export, torch.fx,
    TorchScript and torch.compile(backend="eager") call PyTorch's function: there, each call counts.

    function: the name of PyTorch's function.
    served: calls that ran on the kernels of this package.
    passed_on: reason -> calls that PyTorch computed.
    """

    function: str = "scaled_dot_product_attention"
    served: int = 0
    passed_on: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        passed = [f"  {count:8d}  {reason}" for reason, count in Counter(self.passed_on).most_common()]
        total = sum(self.passed_on.values())
        return "\n".join([f"{self.function}: {self.served} calls served by flash_attn, {total} by PyTorch", *passed])


class Counts:
    """The counts of a function's calls, for every thread."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._served = 0
        self._passed_on: Counter[str] = Counter()
        self._lock = threading.Lock()

    def served(self) -> None:
        """Counts a call that these kernels served."""
        with self._lock:
            self._served += 1

    def passed_on(self, reason: str) -> None:
        """Counts a call that PyTorch got. The reasons are few: they name no sizes."""
        with self._lock:
            self._passed_on[reason] += 1

    def report(self) -> Report:
        """The calls so far."""
        with self._lock:
            return Report(function=self._function, served=self._served, passed_on=dict(self._passed_on))


_SDPA = Counts("scaled_dot_product_attention")
count_served = _SDPA.served
count_passed_on = _SDPA.passed_on


def sdpa_report() -> Report:
    """The calls so far. Printing it gives a line for each reason."""
    return _SDPA.report()
