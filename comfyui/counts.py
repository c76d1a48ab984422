"""What became of the attention calls of one model: served by flash_attn, or passed on, by reason."""

from __future__ import annotations

import threading
from collections import Counter


class Counts:
    """Counts calls since the last `take`. Several threads may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._served = 0

    def served(self) -> None:
        """Counts a call that flash_attn's kernels served."""
        with self._lock:
            self._served += 1

    def passed_on(self, reason: str) -> None:
        """Counts a call that went elsewhere. The reasons are few: they name no sizes."""
        with self._lock:
            self._calls[reason] += 1

    def take(self) -> str:
        """The calls as text, one line for each reason, and begins anew."""
        with self._lock:
            served, self._served = self._served, 0
            passed_on, self._calls = self._calls, Counter()
        lines = [f"flash_attn served {served} attention calls; {passed_on.total()} went elsewhere"]
        lines += [f"{count} x {reason}" for reason, count in passed_on.most_common()]
        return "\n".join(lines)
