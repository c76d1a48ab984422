"""A plan: everything that is decided before anything is compiled, as a value that can be printed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rocm_wheels.errors import BadTarget, DataError, ImpossibleCell, UnknownVersion
from rocm_wheels.matrix import names
from rocm_wheels.matrix.cells import Cell, resolve
from rocm_wheels.matrix.machine import Machine, survey
from rocm_wheels.matrix.targets import has_kernels, known_targets, served, targets, without_kernels
from rocm_wheels.matrix.versions import Backend, Versions

STEPS = ("check", "compile", "assemble", "repair", "verify")
TORCH_TARGETS = "PYTORCH_ROCM_ARCH"  # torch's own: an image of rocm/pytorch sets it to what its torch was built for
_TARGET_VARIABLES = ("GPU_ARCHS", TORCH_TARGETS)
TRITON_ENABLE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
BUILD_TRITON = "BUILD_TRITON_BACKEND"
# uv's --torch-backend knows the same directories.
TORCH_INDEX = "https://download.pytorch.org/whl"
# 1980-01-01 and the end of 2107 in seconds since 1970, UTC: the dates that a zip file can hold.
OLDEST_EPOCH, NEWEST_EPOCH = 315532800, 4354819199


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One wheel to be built; `image` is a container with its ROCm, `notes` are what the user should know of."""

    cell: Cell
    targets: tuple[str, ...]
    targets_from: str
    jobs: int
    label: str
    wheel: str
    torch_index: str
    image: str | None
    compiler: str
    toolchain: str
    steps: tuple[str, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """The plan as JSON-ready values, the cell as a nested table."""
        return asdict(self)


def make_plan(
    versions: Versions,
    *,
    flash_attn: str,
    python: str,
    torch: str,
    rocm: str,
    backend: str | None = None,
    env: Mapping[str, str],
    machine: Machine | None = None,
) -> Plan:
    """The plan of one cell under these environment variables; `machine` is surveyed unless given.

    Its backend is `backend`, else the one that FLASH_ATTENTION_TRITON_AMD_ENABLE asks for, else the first that is
    ready and has kernels for a target named or found. UnknownVersion, ImpossibleCell, BadTarget or DataError
    (a malformed variable) if it cannot be built.
    """
    source_date_epoch(env)  # malformed, it is refused now and not after hours
    triton_too = _flag(env, BUILD_TRITON)
    asked = backend or _asked(env)
    cell = resolve(
        versions, flash_attn=flash_attn, python=python, torch=torch, rocm=rocm, backend=_backend(versions, asked)
    )
    requested, source, notes = _requested(versions, env)
    if requested is not None and requested != ("native",):
        if asked is None:
            cell, more = _serving(versions, cell, known_targets(versions, requested))
            notes += more
        built = targets(versions, cell, requested)
    machine = machine or survey(env)
    if requested is None or requested == ("native",):
        if asked is None:
            cell, more = _serving(versions, cell, [gpu for gpu in machine.gpus if gpu in versions.targets])
            notes += more
        found, source, more = _found(versions, cell, machine, native=requested is not None, variable=source)
        built = targets(versions, cell, found)
        notes += more
    if triton_too and cell.backend != "triton":
        notes += (f"{BUILD_TRITON}: {names.wheel_name(replace(cell, backend='triton'))} is built after it",)
    compiler = versions.backends[cell.backend].compiler
    return Plan(
        cell=cell,
        targets=built,
        targets_from=source,
        jobs=parallel_jobs(versions, env, machine, cell.backend),
        label=names.local_label(cell),
        wheel=names.wheel_name(cell),
        torch_index=versions.torch[cell.torch].rocm[cell.rocm],
        image=versions.rocm[cell.rocm].image,
        compiler=f"{compiler} {versions.compilers[compiler]}",
        toolchain=toolchain_of(machine, cell.backend),
        steps=STEPS,
        notes=notes,
    )


def wants_triton_too(plan: Plan, env: Mapping[str, str]) -> bool:
    """Whether BUILD_TRITON_BACKEND asks for the triton wheel of the cell besides the planned one."""
    return _flag(env, BUILD_TRITON) and plan.cell.backend != "triton"


def toolchain_of(machine: Machine, backend: str) -> str:
    """Where the compiler of a backend comes from: "rocm" or "pypi"."""
    # Triton brings its own compiler: its kernels are the same on a machine with and without ROCm.
    return "rocm" if machine.rocm and backend == "ck" else "pypi"


def parallel_jobs(versions: Versions, env: Mapping[str, str], machine: Machine, backend: str = "triton") -> int:
    """Compile jobs that run at once: MAX_JOBS (DataError if malformed), else by cores and memory."""
    text = env.get("MAX_JOBS", "").strip()
    if not text:
        return max(1, min(machine.cores, machine.available_mib // versions.backends[backend].job_memory_mib))
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise DataError(
            f"MAX_JOBS={text!r} is not a whole number above 0",
            remedy="Unset MAX_JOBS to let cores and memory decide.",
        )
    return int(text)


def source_date_epoch(env: Mapping[str, str]) -> int | None:
    """SOURCE_DATE_EPOCH, not before the oldest date of a zip file; None where unset. DataError if malformed."""
    text = env.get("SOURCE_DATE_EPOCH", "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > NEWEST_EPOCH:
        raise DataError(
            f"SOURCE_DATE_EPOCH={text!r} is not a number of seconds from 0 to {NEWEST_EPOCH}",
            remedy="Unset it, or set it to a number such as $(date +%s).",
        )
    return max(int(text), OLDEST_EPOCH)


def _flag(env: Mapping[str, str], name: str) -> bool:
    """A boolean variable, off where unset. DataError for a value that is neither true nor false."""
    text = env.get(name, "").strip().lower()
    if text not in ("", "0", "1", "false", "true", "off", "on", "no", "yes"):
        raise DataError(f"{name}={env[name]!r} is neither true nor false", remedy=f"Set {name}=true, or unset it.")
    return text in ("1", "true", "on", "yes")


def _asked(env: Mapping[str, str]) -> str | None:
    """The backend that FLASH_ATTENTION_TRITON_AMD_ENABLE asks for, None where it is unset."""
    if not env.get(TRITON_ENABLE, "").strip():
        return None
    return "triton" if _flag(env, TRITON_ENABLE) else "ck"


def _backend(versions: Versions, asked: str | None) -> str:
    if asked is None:
        return next(backend.name for backend in versions.backends.values() if backend.ready)
    check_backend(versions, asked)
    return asked


def _serving(versions: Versions, cell: Cell, names: Sequence[str]) -> tuple[Cell, tuple[str, ...]]:
    """The cell, with the triton backend and a note where its own has kernels for none of these targets."""
    if not names or cell.backend == "triton" or any(has_kernels(versions, name, cell.backend) for name in names):
        return cell, ()
    note = f"the {cell.backend} backend has no kernels for {', '.join(names)}: this builds the triton wheel"
    return replace(cell, backend="triton"), (note,)


def known_backend(versions: Versions, name: str) -> Backend:
    """The backend of that name, ready or not. UnknownVersion if there is none."""
    if name not in versions.backends:
        raise UnknownVersion(
            f"backend {name!r} is not known", remedy=f"Known backends: {', '.join(versions.backends)}."
        )
    return versions.backends[name]


def check_backend(versions: Versions, name: str) -> None:
    """UnknownVersion or ImpossibleCell unless wheels of the backend can be built."""
    if not known_backend(versions, name).ready:
        ready = next(backend.name for backend in versions.backends.values() if backend.ready)
        raise ImpossibleCell(
            f"the {name} backend is not there yet: its kernels are not in this repository",
            remedy=f"Use --backend {ready}.",
        )


def requested_targets(versions: Versions, env: Mapping[str, str]) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """The targets that the environment names, None where it names none or "native"; notes."""
    found, _, notes = _requested(versions, env)
    return None if found == ("native",) else found, notes


def _requested(versions: Versions, env: Mapping[str, str]) -> tuple[tuple[str, ...] | None, str, tuple[str, ...]]:
    """The targets of the environment, in lower case, the variable that names them, and notes.

    flash-attn's own variable counts before torch's, which an image may have set. Of torch's, targets are left out for
    which no backend has kernels, as long as others remain.
    """
    lists = {name: tuple(filter(None, re.split(r"[;,\s]+", env.get(name, "").lower()))) for name in _TARGET_VARIABLES}
    given = {name: entries for name, entries in lists.items() if entries}
    for name, entries in given.items():
        if "native" in entries and len(entries) > 1:
            raise BadTarget(
                f"{name}={';'.join(entries)} mixes native with targets",
                remedy="Name native alone, or targets only.",
            )
    if not given:
        return None, "", ()
    name, entries = next(iter(given.items()))
    if any(set(others) != set(entries) for others in given.values()):
        return entries, name, (f"{name} counts, not {TORCH_TARGETS}={';'.join(given[TORCH_TARGETS])}",)
    left_out = without_kernels(versions, entries) if name == TORCH_TARGETS else ()
    if not left_out or len(left_out) == len(entries):
        return entries, name, ()
    note = f"{name}: {', '.join(left_out)} left out, for which no backend has kernels"
    return tuple(entry for entry in entries if entry not in left_out), name, (note,)


def _found(
    versions: Versions, cell: Cell, machine: Machine, *, native: bool, variable: str
) -> tuple[tuple[str, ...] | None, str, tuple[str, ...]]:
    """The machine's GPUs that the cell serves, else None for all common targets; where from; notes."""
    serves = [target.name for target in served(versions, cell)]
    fit = tuple(gpu for gpu in machine.gpus if gpu in serves)
    rest = ", ".join(gpu for gpu in machine.gpus if gpu not in serves)
    if native and not fit:
        raise BadTarget(
            f"{variable}=native, but this machine has no GPU that the cell serves (found: {rest or 'none'})",
            remedy=f"Name targets instead: {', '.join(serves)}.",
        )
    notes = (f"no kernels are built for {rest} of this machine: the cell does not serve it",) if rest else ()
    if fit:
        return fit, "GPU of this machine", notes
    return None, "all common targets", notes
