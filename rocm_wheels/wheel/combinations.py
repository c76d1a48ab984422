"""The combinations of Python and torch that a wheel is tested with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rocm_wheels.errors import MissingTool
from rocm_wheels.matrix.cells import Cell
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.matrix.versions import Versions


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Full versions, "3.11" and "2.13.0", and the directory of the torch wheel index, "rocm7.2"."""

    python: str
    torch: str
    torch_index: str

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}"


def of(
    plan: Plan, versions: Versions, found: Callable[[str], object | None], *, every: bool = False
) -> tuple[Combination, ...]:
    """The combinations to test the plan's wheel with. The first gets all tests, the others the smoke tests.

    The wheel of a cell has one combination. The universal wheel is tested with the newest and the oldest torch, each
    with the newest Python that this machine has for it; with `every`, with the newest patch release of every torch and
    each Python. A universal wheel for one GPU target is nothing to publish: it is tested with the newest torch that a
    source confirmed. found: returns the path of a Python, or None. Raises MissingTool if the machine has no Python that
    torch supports.
    """
    cell = plan.cell
    if isinstance(cell, Cell):
        assert plan.torch_index is not None
        return (Combination(python=cell.python, torch=cell.torch, torch_index=plan.torch_index),)
    newest_patches = {".".join(torch.split(".")[:2]): torch for torch in versions.torch}
    here = [python for python in reversed(versions.python) if found(python) is not None]
    possible = [
        Combination(python=python, torch=torch, torch_index=list(versions.torch[torch].rocm.values())[-1])
        for torch in reversed(newest_patches.values())
        for python in here
        if python in versions.torch[torch].python
    ]
    if not possible:
        raise MissingTool(
            f"the universal wheel cannot be tested: this machine has none of Python {', '.join(versions.python)}",
            remedy=f"Install one: apt-get install python{versions.python[-1]}, or uv python install "
            f"{versions.python[-1]}.",
        )
    if every:
        return tuple(possible)
    if len(plan.targets) == 1:
        sure = [each for each in possible if not versions.torch[each.torch].uncertain]
        return tuple((sure or possible)[:1])
    oldest = next(each for each in possible if each.torch == possible[-1].torch)
    return tuple(dict.fromkeys((possible[0], oldest)))
