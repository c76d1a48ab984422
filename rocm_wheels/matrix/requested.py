"""The GPU targets that a build requests: in environment variables, else the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rocm_wheels.environment import NATIVE, TORCH_TARGETS, target_lists
from rocm_wheels.errors import BadTarget
from rocm_wheels.matrix.cells import Cell
from rocm_wheels.matrix.machine import Machine, why_no_gpu
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
    lists = target_lists(env)
    if not lists:
        return Requested(None, "")
    name, entries = next(iter(lists.items()))
    if any(set(others) != set(entries) for others in lists.values()):
        note = f"{name} counts, not {TORCH_TARGETS}={';'.join(lists[TORCH_TARGETS])}"
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
    kept = cards(versions, [gpu for gpu in machine.gpus if gpu in serves])
    fit, notes = kept.targets or (), kept.notes
    rest = ", ".join(gpu for gpu in machine.gpus if gpu not in serves)
    if asked.targets is not None and not fit:
        raise no_gpu(asked.source, serves, rest)
    notes += (f"no kernels are built for {rest} of this machine: the combination does not support it",) if rest else ()
    if fit:
        return Requested(fit, "GPU of this machine", notes)
    return Requested(None, "no GPU found here; PYTORCH_ROCM_ARCH chooses others", notes)


def cards(versions: Versions, gpus: Sequence[str]) -> Requested:
    """The cards among GPUs of a machine, with a note on GPUs in a processor that are left out; without a card, all."""
    inside = [gpu for gpu in gpus if versions.targets[gpu].integrated]
    if not inside or len(inside) == len(gpus):
        return Requested(tuple(gpus), "")
    kept = tuple(gpu for gpu in gpus if gpu not in inside)
    left = ", ".join(inside)
    note = (
        f"built for {', '.join(kept)} alone; to serve the {left} in the processor too, name both in PYTORCH_ROCM_ARCH"
    )
    return Requested(kept, "", (note,))


def no_gpu(source: str, serves: Iterable[str], found: str) -> BadTarget:
    """The error of `native` on a machine without a GPU that wheels serve."""
    why = f"found: {found}" if found else why_no_gpu()
    return BadTarget(
        f"{source}=native, but this machine has no GPU that a wheel serves. {why}",
        remedy="Name the GPU by its product or target, PYTORCH_ROCM_ARCH=RX9070XT or gfx1201. README.md has a table. "
        f"Targets: {', '.join(serves)}.",
    )
