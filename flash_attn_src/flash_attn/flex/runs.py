"""Runs of queries that see a band of keys, and the groups of them that one call of variable lengths serves.

In a run the first visible key stays and then moves by one with each query, or one of both; the last key moves and then
stays. So causal masks, windows, documents, chunks, prefixes and padding are a few runs each, in any combination.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_Window = tuple[int, int]


@dataclass(frozen=True)
class Run:
    """Queries [start, start + queries) of a batch that see keys among [first, first + keys).

    window: (left, right) aligned to the last query and the last key, -1 where open, as flash_attn_func takes it.
    """

    batch: int
    start: int
    queries: int
    first: int
    keys: int
    window: _Window

    @property
    def is_aligned(self) -> bool:
        """Whether the last query and the last key have the same position, as ALiBi's distances need it."""
        return self.start + self.queries == self.first + self.keys

    def fits(self, window: _Window) -> bool:
        """Whether another window hides the same keys: it reaches as far as this run has keys."""
        left, right = self.window
        return (window[0] == left or (left < 0 and window[0] >= self.keys - 1)) and (
            window[1] == right or (right < 0 and window[1] >= self.queries - 1)
        )


def of_rows(batch: int, first: list[int], last: list[int]) -> Iterator[Run]:
    """The runs of queries that see keys first[query] to last[query]. A query with last < first sees none."""
    start = None
    # A band's left edge moves once it has moved; its right edge stays once it has stayed.
    has_moved = has_stayed = False
    for row in range(len(first)):
        if start is not None:
            by_first, by_last = first[row] - first[row - 1], last[row] - last[row - 1]
            breaks = by_first not in (0, 1) or by_last not in (0, 1) or last[row] < first[row]
            if breaks or (has_moved and not by_first) or (has_stayed and by_last):
                yield _run(batch, start, row, first, last)
                start = None
            else:
                has_moved, has_stayed = by_first == 1, by_last == 0
        if start is None and last[row] >= first[row]:
            start, has_moved, has_stayed = row, False, False
    if start is not None:
        yield _run(batch, start, len(first), first, last)


def _run(batch: int, start: int, stop: int, first: list[int], last: list[int]) -> Run:
    queries, keys = stop - start, last[stop - 1] - first[start] + 1
    # Query `start + i` sees keys i + keys - queries - left to ... + right of the run's.
    left = last[stop - 1] - first[stop - 1] if first[stop - 1] > first[start] else -1
    right = last[start] - first[start] - (keys - queries) if last[start] < last[stop - 1] else -1
    return Run(batch, start, queries, first[start], keys, (left, right))


def groups(runs: Iterable[Run], most: int) -> list[tuple[_Window, list[Run]]] | None:
    """The runs grouped by window. None if there are more than `most` groups."""
    found: dict[_Window, list[Run]] = {}
    # Runs with closed windows first: the others may join them.
    for run in sorted(runs, key=lambda run: run.window.count(-1)):
        window = next((window for window in found if run.fits(window)), run.window)
        found.setdefault(window, []).append(run)
        if len(found) > most:
            return None
    return [(window, sorted(members, key=lambda run: (run.batch, run.start))) for window, members in found.items()]
