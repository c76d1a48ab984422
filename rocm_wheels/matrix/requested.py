"""The GPU targets that a build is asked for: by the environment, else by the GPUs of this machine."""

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
    """Targets as they were spelt, None where nothing names any; where they come from; what the user should know."""

    targets: tuple[str, ...] | None
    source: str
    notes: tuple[str, ...] = ()

    @property
    def of_this_machine(self) -> bool:
        """Whether the GPUs of this machine decide."""
        return self.targets in (None, (NATIVE,))


def from_environment(versions: Versions, env: Mapping[str, str]) -> Requested:
    """What the environment names; `source` is the variable. BadTarget or DataError for a malformed one.

    flash-attn's own variable counts before torch's, which an image may have set. Targets in torch's variable that no
    backend has kernels for are left out, as long as others remain.
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
    """The GPUs of this machine that the cell serves, else None, which is the default targets.

    BadTarget if the environment asks for native and this machine has no such GPU.
    """
    serves = [target.name for target in served(versions, cell)]
    fit = tuple(gpu for gpu in machine.gpus if gpu in serves)
    rest = ", ".join(gpu for gpu in machine.gpus if gpu not in serves)
    if asked.targets is not None and not fit:
        raise BadTarget(
            f"{asked.source}=native, but this machine has no GPU that the cell serves (found: {rest or 'none'})",
            remedy=f"Name targets instead: {', '.join(serves)}.",
        )
    notes = (f"no kernels are built for {rest} of this machine: the cell does not serve it",) if rest else ()
    if fit:
        return Requested(fit, "GPU of this machine", notes)
    return Requested(None, "no GPU found here; PYTORCH_ROCM_ARCH chooses others", notes)
