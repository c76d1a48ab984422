"""The plan of a wheel: all decisions before the first compilation, as a value that can be printed and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_type_hints

from rocm_wheels import environment
from rocm_wheels.errors import DataError, ImpossibleCell
from rocm_wheels.matrix import names
from rocm_wheels.matrix import targets as gpu_targets
from rocm_wheels.matrix.cells import AXES, Cell, Claim, Universal, known_backend, resolve, universal
from rocm_wheels.matrix.machine import Machine, survey
from rocm_wheels.matrix.platforms import DEFAULT, PLATFORMS, STEPS
from rocm_wheels.matrix.requested import cards, from_environment, from_machine, no_gpu
from rocm_wheels.matrix.targets import has_kernels, known_targets, targets
from rocm_wheels.matrix.versions import Versions

# uv's --torch-backend knows the same directories.
TORCH_INDEX = "https://download.pytorch.org/whl"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one wheel. `image` is a container with its ROCm, `notes` are messages for the user, `platform` is the
    operating system of its users.

    The universal wheel has neither a container nor a `torch_index`, because it supports every torch.
    """

    cell: Claim
    targets: tuple[str, ...]
    targets_from: str
    jobs: int
    label: str
    wheel: str
    torch_index: str | None
    image: str | None
    compiler: str
    toolchain: str
    steps: tuple[str, ...]
    notes: tuple[str, ...]
    platform: str = DEFAULT

    @property
    def shorter(self) -> str:
        """Options that make the build shorter, as a sentence; "" if there are none."""
        if isinstance(self.cell, Universal):
            return "PYTORCH_ROCM_ARCH=gfx942 builds for one GPU target alone" if len(self.targets) > 1 else ""
        return "--backend triton leaves Composable Kernel out" if self.cell.backend == "ck" else ""

    def as_dict(self) -> dict[str, object]:
        """The plan as JSON-ready values, with the combination as a nested table."""
        return asdict(self)


def dump(plans: Sequence[Plan]) -> str:
    """Plans as one line of JSON, which `load` reads."""
    return json.dumps([plan.as_dict() for plan in plans])


def load(text: str) -> list[Plan]:
    """The plans in a text of `dump`. Raises DataError for any other text."""
    try:
        return [Plan(**{**entry, "cell": _claim(entry["cell"]), **_tuples(entry)}) for entry in json.loads(text)]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"--planned is not what `check` prints: {error!r}", remedy="Leave it out: `build` plans for itself."
        ) from error


def _claim(entry: Mapping[str, str]) -> Claim:
    return Cell(**entry) if "torch" in entry else Universal(**entry)


def _tuples(entry: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Turns the fields that JSON stores as lists back into tuples."""
    kinds = get_type_hints(Plan)
    return {field.name: tuple(entry[field.name]) for field in fields(Plan) if kinds[field.name] == tuple[str, ...]}


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
    """The plan of one combination for these environment variables. The machine is inspected unless `machine` is passed.

    The backend is `backend`, else the one that FLASH_ATTENTION_TRITON_AMD_ENABLE requests, else the first backend that
    is ready and has kernels for a requested or detected target. Raises UnknownVersion, ImpossibleCell, BadTarget or
    DataError (a malformed variable) if the wheel cannot be built.
    """
    environment.source_date_epoch(env)  # refuse a malformed variable now, not after hours
    triton_too = environment.flag(env, environment.BUILD_TRITON)
    asked = backend or environment.backend(env)
    cell = resolve(
        versions, flash_attn=flash_attn, python=python, torch=torch, rocm=rocm, backend=_backend(versions, asked)
    )
    requested = from_environment(versions, env)
    notes = requested.notes
    if "." not in python:
        notes += (f"Python {python!r} is taken for {cell.python}",)
    if not requested.of_this_machine:
        if asked is None:
            cell, more = _serving(versions, cell, known_targets(versions, requested.targets or ()))
            notes += more
        built = targets(versions, cell, requested.targets)
    machine = machine or survey(env)
    if requested.of_this_machine:
        if asked is None:
            cell, more = _serving(versions, cell, [gpu for gpu in machine.gpus if gpu in versions.targets])
            notes += more
        requested = from_machine(versions, cell, machine, requested)
        built = targets(versions, cell, requested.targets)
        notes += requested.notes
    if triton_too and cell.backend != "triton":
        other = names.wheel_name(replace(cell, backend="triton"))
        notes += (f"{environment.BUILD_TRITON}: {other} is built after it",)
    notes += versions.uncertain(cell.torch, cell.rocm)
    compiler = versions.backends[cell.backend].compiler
    return Plan(
        cell=cell,
        targets=built,
        targets_from=requested.source,
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


def make_universal_plan(
    versions: Versions,
    *,
    flash_attn: str,
    env: Mapping[str, str],
    machine: Machine | None = None,
    platform: str = DEFAULT,
) -> Plan:
    """The plan of the universal wheel of a flash-attn version, with every GPU target of the platform unless the
    environment names targets.

    The wheel for Windows has Triton's kernels alone, because AMD's torch for Windows has no GPU of the other backends.
    Raises UnknownVersion, BadTarget, and DataError for a malformed variable or one that requests another wheel.
    """
    environment.source_date_epoch(env)
    claim = universal(versions, flash_attn)
    machine = machine or survey(env)
    requested = from_environment(versions, env)
    named = None if requested.of_this_machine else requested.targets
    notes = requested.notes
    if requested.of_this_machine and requested.targets is not None:
        here = cards(versions, [gpu for gpu in machine.gpus if gpu in versions.targets])
        named, notes = here.targets, (*notes, *here.notes)
        if not named:
            raise no_gpu(requested.source, versions.targets, ", ".join(machine.gpus))
    if environment.backend(env) == "triton" or environment.flag(env, environment.BUILD_TRITON):
        raise DataError(
            f"{environment.TRITON_ENABLE} and {environment.BUILD_TRITON} ask for a triton wheel; the universal wheel "
            "holds the kernels of every backend",
            remedy="Unset them, or name a whole combination: build_rocm.sh 2.8.3 3.11 2.5.1 6.2",
        )
    built = gpu_targets.universal(versions, named, platform=platform)
    if platform != DEFAULT or not any(has_kernels(versions, target, claim.backend) for target in built):
        claim = replace(claim, backend="triton")  # such as for one Radeon: no Composable Kernel
    compiler = versions.backends[claim.backend].compiler
    return Plan(
        cell=claim,
        targets=built,
        targets_from="every GPU target" if named is None else requested.source,
        jobs=parallel_jobs(versions, env, machine, claim.backend),
        label=names.local_label(claim),
        wheel=names.wheel_name(claim, PLATFORMS[platform].tag),
        torch_index=None,
        image=None,
        compiler=f"{compiler} {versions.compilers[compiler]}",
        toolchain=toolchain_of(machine, claim.backend),
        steps=STEPS,
        notes=notes,
        platform=platform,
    )


def of_row(versions: Versions, name: str, gpus: str) -> list[Plan]:
    """The plans of the wheels of a row of create_matrix.py: of a combination, or of a universal wheel for every system.

    name: "2.8.3 3.11 2.5.1 6.2 ck" or "2.8.3 universal". gpus: its GPU targets, "gfx90a;gfx942".
    """
    env = {environment.TORCH_TARGETS: gpus}
    flash_attn, *cell = name.split()
    if cell == ["universal"]:
        made = make_universal_plan(versions, flash_attn=flash_attn, env=env)
        return [made, *other_platforms(versions, made)]
    if len(cell) != len(AXES) - 1:
        raise DataError(f"{name!r} is no row of create_matrix.py", remedy="./create_matrix.py --list prints them.")
    python, torch, rocm, backend = cell
    return [make_plan(versions, flash_attn=flash_attn, python=python, torch=torch, rocm=rocm, backend=backend, env=env)]


def other_platforms(versions: Versions, made: Plan, *, machine: Machine | None = None) -> list[Plan]:
    """The plans of the universal wheel for the other systems. Each has the GPU targets of `made` that the torch of the
    system serves; a system whose torch serves none of them has no plan.
    """
    plans = []
    for platform in PLATFORMS.values():
        served = gpu_targets.served_on(versions, platform.name)
        built = tuple(name for name in made.targets if name in served)
        if platform.name != made.platform and built:
            plan = make_universal_plan(
                versions, flash_attn=made.cell.flash_attn, env={}, machine=machine, platform=platform.name
            )
            plans.append(replace(plan, targets=built, targets_from=made.targets_from, jobs=made.jobs))
    return plans


def wants_triton_too(plan: Plan, env: Mapping[str, str]) -> bool:
    """Whether BUILD_TRITON_BACKEND requests the triton wheel of the combination in addition to the planned wheel."""
    return environment.flag(env, environment.BUILD_TRITON) and plan.cell.backend != "triton"


def toolchain_of(machine: Machine, backend: str) -> str:
    """The toolchain of a backend: "rocm" or "pypi"."""
    # Triton brings its own compiler, so its kernels are the same on a machine with and without ROCm.
    return "rocm" if machine.rocm and backend == "ck" else "pypi"


def parallel_jobs(versions: Versions, env: Mapping[str, str], machine: Machine, backend: str = "triton") -> int:
    """Number of parallel compile jobs: MAX_JOBS (DataError if malformed), else by memory; at most one a core."""
    by_memory = machine.available_mib // versions.backends[backend].job_memory_mib
    return max(1, min(machine.cores, environment.max_jobs(env) or by_memory))


def _backend(versions: Versions, asked: str | None) -> str:
    """The requested backend, else the first one that is ready. Raises UnknownVersion, and ImpossibleCell if it is not
    ready.
    """
    ready = next(backend.name for backend in versions.backends.values() if backend.ready)
    if asked is not None and not known_backend(versions, asked).ready:
        raise ImpossibleCell(
            f"the {asked} backend is not there yet: its kernels are not in this repository",
            remedy=f"Use --backend {ready}.",
        )
    return asked or ready


def _serving(versions: Versions, cell: Cell, gpus: Sequence[str]) -> tuple[Cell, tuple[str, ...]]:
    """The combination; with the triton backend and a note if its own backend has no kernels for any of these
    targets.
    """
    if not gpus or cell.backend == "triton" or any(has_kernels(versions, name, cell.backend) for name in gpus):
        return cell, ()
    note = f"the {cell.backend} backend has no kernels for {', '.join(gpus)}: this builds the triton wheel"
    return replace(cell, backend="triton"), (note,)
