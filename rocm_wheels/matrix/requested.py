"""The GPU targets that a build requests: in environment variables, else the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rocm_wheels.environment import NATIVE, TORCH_TARGETS, target_lists
from rocm_wheels.errors import BadTarget
from rocm_wheels.matrix.cells import Cell
from rocm_wheels.matrix.machine import Machine
from rocm_wheels.matrix.targets import served, without_kernels
from rocm_wheels.matrix.versions import Versions


class Requested(NamedTuple):
    """Targets as they were spelt (None if nothing names any), their origin, and messages for the user."""

    targets: tuple[str, ...] | None
    source: str
    notes: tuple[str, ...] = ()

    @property
    def of_this_machine(self) -> bool:
        """Whether the targets are the GPUs of this machine."""
        return self.targets in (None, (NATIVE,))


def from_environment(versions: Versions, env: Mapping[str, str]) -> Requested:
    """The targets in the environment; `source` is the variable. Raises BadTarget or DataError for a malformed variable.

    flash-attn's own variable takes precedence over torch's variable, which an image may have set. Targets in torch's
    variable for which no backend has kernels are left out if others remain.
    """
    given = target_lists(env)
    if not given:
        return Requested(None, "")
    name, entries = next(iter(given.items()))
    if any(set(others) != set(entries) for others in given.values()):
        note = f"{name} counts, not {TORCH_TARGETS}={';'.join(given[TORCH_TARGETS])}"
        return Requested(entries, name, (note,))
    left_out = without_kernels(versions, entries) if name == TORCH_TARGETS else ()
    if not left_out or len(left_out) == len(entries):
        return Requested(entries, name)
    note = f"{name}: {', '.join(left_out)} left out, for which no backend has kernels"
    return Requested(tuple(entry for entry in entries if entry not in left_out), name, (note,))


def from_machine(versions: Versions, cell: Cell, machine: Machine, asked: Requested) -> Requested:
    """The GPUs of this machine that the combination supports, else None (the default targets).

    Raises BadTarget if the environment requests native and this machine has no such GPU.
    """
    serves = [target.name for target in served(versions, cell)]
    fit = tuple(gpu for gpu in machine.gpus if gpu in serves)
    rest = ", ".join(gpu for gpu in machine.gpus if gpu not in serves)
    if asked.targets is not None and not fit:
        raise BadTarget(
            f"{asked.source}=native, but this machine has no GPU that it supports (found: {rest or 'none'})",
            remedy=f"Name targets instead: {', '.join(serves)}.",
        )
    notes = (f"no kernels are built for {rest} of this machine: the combination does not support it",) if rest else ()
    if fit:
        return Requested(fit, "GPU of this machine", notes)
    return Requested(None, "no GPU found here; PYTORCH_ROCM_ARCH chooses others", notes)
