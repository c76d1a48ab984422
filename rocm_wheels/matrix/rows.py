"""The rows of the workflow's jobs: kernels (backend, ROCm, target, shard), wheels (combinations), the jobs that
assemble and test them, and the GPU job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rocm_wheels import package_modules
from rocm_wheels.errors import BadTarget, DataError
from rocm_wheels.matrix import names
from rocm_wheels.matrix.cells import AXES, Cell, Claim, Universal
from rocm_wheels.matrix.platforms import PLATFORMS, Platform
from rocm_wheels.matrix.targets import CUDA, Fit, fit, has_kernels, served_on
from rocm_wheels.matrix.targets import universal as targets_of_universal
from rocm_wheels.matrix.versions import Versions

Row = dict[str, str | int]
T = TypeVar("T")
_Rows = Callable[[Versions, Sequence[Cell], Sequence[str] | None], list[Row]]

MAX_ROWS = 256  # limit of GitHub: matrix rows of one workflow run
NO_ROCM = "any"  # stands for a ROCm version: the kernels are the same for all of them
# Options with which a container reaches the GPUs of its machine. A job without a GPU needs options that are not empty.
GPU_OPTIONS = (
    "--device=/dev/kfd --device=/dev/dri --group-add video --cap-add=SYS_PTRACE"
    " --security-opt seccomp=unconfined --ipc=host"
)
CPU_OPTIONS = "--ipc=host"


def rows(
    data: Versions,
    cells: Sequence[Cell],
    requested: Sequence[str] | None = None,
    universals: Sequence[Universal] = (),
    *,
    universal_targets: Sequence[str] | None = None,
) -> dict[str, list[Row]]:
    """The rows of both jobs. universal_targets: GPU targets of the universal wheels, if they differ from `requested`.
    Raises DataError, which names the runs to split it into, if there are too many rows for
    one run.
    """
    made = {}
    for name, make, more in (
        ("kernels", kernel_rows, universal_kernel_rows),
        ("wheels", wheel_rows, universal_wheel_rows),
    ):
        known = make(data, cells, requested)
        own = more(data, universals, requested if universal_targets is None else universal_targets)
        made[name] = (_joined if name == "kernels" else list)([*own, *known])
        if (count := len(made[name])) > MAX_ROWS:
            raise DataError(
                f"the matrix has {count} rows, a workflow run holds {MAX_ROWS}",
                remedy=_split(data, cells, requested, make),
            )
    made["assemble"] = assemble_rows(data, made["wheels"])
    made["verify"] = verify_rows(data, made["wheels"])
    made["gpu"] = gpu_rows(data, made["wheels"])
    return made


def _joined(rows: Sequence[Row]) -> list[Row]:
    """The rows of kernels. Targets with the same assembly share a row, so that it is compiled once.

    A ck row compiles Triton's kernels too, so it takes the targets of a triton row for the same assembly.
    """
    joined: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: _part(row).startswith("kernels-triton-")):
        of_ck = _part(row).replace("kernels-triton-", "kernels-ck-")
        shards = [artifact for artifact, other in joined.items() if _part(other) == of_ck != _part(row)]
        for artifact in shards or [str(row["artifact"])]:
            joined[artifact] = _with_target(joined.get(artifact, row), str(row["target"]))
    return list(joined.values())


def _part(row: Row) -> str:
    """The artifact of a row of kernels without its shard."""
    return str(row["artifact"]).rpartition("-")[0]


def _with_target(row: Row, target: str) -> Row:
    targets = str(row["target"]).split(";")
    if target in targets:
        return row
    more = [*targets, target]
    return {**row, "target": ";".join(more), "name": str(row["name"]).replace("+".join(targets), "+".join(more))}


def cell_name(cell: Claim) -> str:
    """The name of a combination for `--only` and for a job: "2.8.3 3.11 2.5.1 6.2 triton", or "2.8.3 universal"."""
    return f"{cell} universal" if isinstance(cell, Universal) else f"{cell} {cell.backend}"


def kernel_rows(data: Versions, cells: Sequence[Cell], requested: Sequence[str] | None = None) -> list[Row]:
    """One row for each shard of the kernels in the wheels of `cells`."""
    jobs = data.jobs
    containers: dict[tuple[str, str, str], str] = {}
    for cell in cells:
        rocm = cell.rocm if jobs.container and cell.backend == "ck" else NO_ROCM
        for target in row_targets(data, cell, requested):
            containers.setdefault((cell.backend, rocm, target), cell.rocm)
    return _kernel_rows(data, containers)


def universal_kernel_rows(
    data: Versions, universals: Sequence[Universal], requested: Sequence[str] | None = None
) -> list[Row]:
    """One row for each shard of the kernels in a universal wheel; all universal wheels have the same kernels."""
    if not universals:
        return []
    image_of = _gpu_rocm(data)
    containers = {("ck", NO_ROCM, target): image_of for target in published_targets(data, requested)}
    return _kernel_rows(data, containers)


def _kernel_rows(data: Versions, containers: Mapping[tuple[str, str, str], str]) -> list[Row]:
    """The rows of (backend, ROCm, target), each with the ROCm of its container."""
    jobs = data.jobs
    rows: list[Row] = []
    for (backend, rocm, target), image_of in containers.items():
        # Composable Kernel has no kernels for some targets of a ck wheel. Only Triton's kernels serve these targets.
        compiler = backend if has_kernels(data, target, backend) else "triton"
        count = jobs.shards[compiler]
        for shard in range(1, count + 1):
            # Targets that take the assembly of one GPU share a job, where it is compiled once.
            part = f"{backend}-rocm_{rocm}-{_assembled_from(target)}"
            rows.append(
                {
                    "name": f"{backend} {target}{'' if rocm == NO_ROCM else f' ROCm {rocm}'} {shard}/{count}",
                    "backend": compiler,
                    "rocm-version": rocm,
                    "target": target,
                    "shard": f"{shard}/{count}",
                    "runner": jobs.runner,
                    **_container(data, image_of),
                    "artifact": f"kernels-{part}-{shard}",
                    "cache": f"kernels-{part}-{shard}of{count}",
                    "compile-minutes": jobs.compile_minutes,
                    "timeout-minutes": jobs.kernel_minutes,
                }
            )
    return rows


def _assembled_from(target: str) -> str:
    """The GPU whose assembly is assembled for a target: itself, unless its row names another GPU."""
    return package_modules.module("kernels.targets").get(target).made_for or target


def wheel_rows(data: Versions, cells: Sequence[Cell], requested: Sequence[str] | None = None) -> list[Row]:
    """One row for each combination, with the inputs of _build_rocm.yml under their names."""
    jobs = data.jobs
    rows: list[Row] = []
    for cell in cells:
        rocm = cell.rocm if jobs.container and cell.backend == "ck" else NO_ROCM
        rows.append(
            {
                "name": cell_name(cell),
                "flash-attn-version": cell.flash_attn,
                "python-version": cell.python,
                "torch-version": cell.torch,
                "rocm-version": cell.rocm,
                "backend": cell.backend,
                "targets": ";".join(row_targets(data, cell, requested)),
                "label": names.local_label(cell),
                "torch-index": data.torch[cell.torch].rocm[cell.rocm],
                "runner": jobs.runner,
                **_container(data, cell.rocm),
                "image": _gpu_image(data, cell.rocm),
                "gpu-runner": jobs.gpu_runner,
                "gpu-options": GPU_OPTIONS,
                "kernels": f"kernels-{cell.backend if rocm != NO_ROCM else '*'}-rocm_{rocm}-*",
                "artifact": f"wheel-{names.stem(names.wheel_name(cell))}",
                "wheels": _globs(cell),
                "timeout-minutes": jobs.wheel_minutes,
            }
        )
    return rows


def universal_wheel_rows(
    data: Versions, universals: Sequence[Universal], requested: Sequence[str] | None = None
) -> list[Row]:
    """One row for each universal wheel. It names no Python, torch, ROCm or backend, because the wheel supports all of
    them.
    """
    jobs, targets = data.jobs, ";".join(published_targets(data, requested)) if universals else ""
    return [
        {
            "name": cell_name(claim),
            "flash-attn-version": claim.flash_attn,
            **dict.fromkeys(("python-version", "torch-version", "rocm-version", "backend"), ""),
            "targets": targets,
            "label": names.local_label(claim),
            "torch-index": "",
            "runner": jobs.universal_runner,
            "container": "",
            "container-options": CPU_OPTIONS,
            "image": _gpu_image(data, _gpu_rocm(data)),
            "gpu-runner": jobs.gpu_runner,
            "gpu-options": GPU_OPTIONS,
            "kernels": f"kernels-ck-rocm_{NO_ROCM}-*",
            "artifact": f"wheel-{names.stem(names.wheel_name(claim))}",
            "wheels": _globs(claim),
            "timeout-minutes": jobs.wheel_minutes,
        }
        for claim in universals
    ]


def _globs(claim: Claim) -> str:
    """Globs for the files of a combination and of the interfaces beside it, whatever their build numbers."""
    label = names.local_label(claim)
    return f"flash_attn-{names.version(claim)}-*{claim.python_tag}-*;*+{label}-*py3-none-any.whl*"


def assemble_rows(data: Versions, wheels: Sequence[Row]) -> list[Row]:
    """One row for each version of flash-attn, and for each container that its wheels are built in. It has the rows of
    its wheels, as names and GPU targets in JSON.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in wheels:
        groups.setdefault((str(row["flash-attn-version"]), str(row["container"])), []).append(row)
    made: list[Row] = []
    for (version, container), of in groups.items():
        part = f"{version}-rocm{of[0]['rocm-version']}" if container else version
        made.append(
            {
                "name": part,
                "flash-attn-version": version,
                "rows": json.dumps([[row["name"], row["targets"]] for row in of]),
                "universal": "" if all(row["python-version"] for row in of) else "true",
                "runner": of[0]["runner"],
                "container": container,
                "container-options": of[0]["container-options"],
                "artifact": f"wheels-{part}",
                "timeout-minutes": data.jobs.assemble_minutes,
            }
        )
    return made


def verify_rows(data: Versions, wheels: Sequence[Row]) -> list[Row]:
    """One row for each torch and Python, which tests all their wheels, and one for all universal wheels."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in wheels:
        groups.setdefault((str(row["torch-version"]), str(row["python-version"])), []).append(row)
    return [
        {
            "name": f"torch {torch}, Python {python}" if python else "universal wheels",
            "wheels": ";".join(dict.fromkeys(str(row["wheels"]) for row in of)),
            "runner": of[0]["runner"],
            "artifact": f"verdicts-torch{torch}-py{python}" if python else "verdicts-universal",
            "timeout-minutes": data.jobs.verify_minutes,
        }
        for (torch, python), of in groups.items()
    ]


def count_for_windows(data: Versions, wheels: Sequence[Row]) -> int:
    """How many jobs build a wheel for Windows too: universal wheels with a GPU target that torch has there."""
    universals = [str(row["targets"]).split(";") for row in wheels if not row["python-version"]]
    return sum(PLATFORMS["windows"] in systems_of(data, targets) for targets in universals)


def systems_of(data: Versions, targets: Sequence[str]) -> tuple[Platform, ...]:
    """The systems for which a universal wheel of these GPU targets is built: those whose torch serves one of them."""
    return tuple(each for each in PLATFORMS.values() if not set(served_on(data, each.name)).isdisjoint(targets))


def confirmed(data: Versions, found: Sequence[T], versions_of: Callable[[T], tuple[str, str]]) -> list[T]:
    """The combinations that a sample is taken from: those without an uncertain fact, or all if each has one.

    A sample needs its torch from PyTorch's index: a directory that does not exist there would fail the whole run.
    versions_of: gives the torch and the ROCm of a combination.
    """
    return [each for each in found if not data.uncertain(*versions_of(each))] or list(found)


def newest(data: Versions, wheels: Sequence[Row]) -> list[Row]:
    """The first wheel of the newest combination without an uncertain fact, [] without wheels. If both backends are
    built, it is the ck wheel, which has the kernels of both.
    """
    sample = confirmed(data, [row for row in wheels if row["python-version"]], _torch_and_rocm) or list(wheels)
    cells = [str(row["name"]).rpartition(" ")[0] for row in sample]
    return sample[cells.index(cells[-1]) :][:1] if sample else []


def _torch_and_rocm(row: Row) -> tuple[str, str]:
    return str(row["torch-version"]), str(row["rocm-version"])


def gpu_rows(data: Versions, wheels: Sequence[Row]) -> list[Row]:
    """The job on the GPU runner: the universal wheels, which hold all contents, and a sample of the combinations.

    A job for each wheel would pull an image of 32 GB 170 times through one runner, and GitHub cancels jobs that wait
    for more than 24 hours. The wheels of the combinations hold the same kernels and modules as the universal wheels.
    The sample is the oldest and the newest combination of each backend, without those that have uncertain facts.
    """
    backends: dict[str, list[Row]] = {}
    for row in wheels:
        backends.setdefault(str(row["backend"]), []).append(row)
    universals = [str(row["wheels"]) for row in backends.pop("", [])]
    sample: list[str] = []
    for built in backends.values():
        cells = [str(row["wheels"]) for row in confirmed(data, built, _torch_and_rocm)]
        sample += dict.fromkeys((cells[0], cells[-1]))
    if not (universals or sample):
        return []
    return [
        {
            "name": f"{len(universals)} universal wheels and {len(sample)} combinations",
            "wheels": ";".join([*universals, *sample]),
            "image": _gpu_image(data, _gpu_rocm(data)),
            "gpu-runner": data.jobs.gpu_runner,
            "gpu-options": GPU_OPTIONS,
            "gpu-timeout-minutes": data.jobs.gpu_minutes,
        }
    ]


def published_targets(data: Versions, requested: Sequence[str] | None) -> list[str]:
    """The targets of the universal wheel. Raises BadTarget if all requested ones are NVIDIA GPUs, whose wheels are
    never published.
    """
    built = [name for name in targets_of_universal(data, requested) if not CUDA.fullmatch(name)]
    if not built:
        raise BadTarget(
            f"wheels for NVIDIA GPUs are never published: {', '.join(requested or ())}",
            remedy="Name AMD targets, such as gfx942, or none for all of them.",
        )
    return built


def _gpu_rocm(data: Versions) -> str:
    """The newest ROCm, whose image runs the GPU job of the universal wheel."""
    return list(data.rocm)[-1]


def row_targets(data: Versions, cell: Cell, requested: Sequence[str] | None) -> tuple[str, ...]:
    """The GPU targets of a combination's wheel: the default ones, or the requested ones that it supports. Raises
    BadTarget if there are none.
    """
    choice = _fit(data, cell, requested)
    if requested is not None and not choice.targets:
        raise BadTarget(
            f"none of {', '.join(choice.refused)} is supported by the combination {cell_name(cell)}",
            remedy="Leave the combination out with --only, or name another target.",
        )
    return choice.targets


def with_targets(
    data: Versions, cells: Sequence[Cell], requested: Sequence[str] | None
) -> tuple[tuple[Cell, ...], list[str]]:
    """The combinations that support a requested target, and a line for those that support none."""
    kept = tuple(cell for cell in cells if requested is None or _fit(data, cell, requested).targets)
    others = [cell_name(cell) for cell in cells if cell not in kept]
    named = ", ".join(requested or ())
    return kept, [f"left out: {others[0]} and {len(others) - 1} more: none of {named} is supported"] if others else []


def left_out(data: Versions, cells: Sequence[Cell], requested: Sequence[str] | None) -> list[str]:
    """A line for each requested target that some of the combinations do not support."""
    refusals: dict[str, list[tuple[Cell, str]]] = {}
    for cell in cells:
        for name, error in _fit(data, cell, requested).refused.items():
            refusals.setdefault(name, []).append((cell, error.message))
    lines = []
    for name, some in refusals.items():
        cell, why = some[0]
        more = f" and {len(some) - 1} more" if len(some) > 1 else ""
        lines.append(f"{name} is left out of {cell_name(cell)}{more}: {why}")
    return lines


def _fit(data: Versions, cell: Cell, requested: Sequence[str] | None) -> Fit:
    """The targets that build_rocm.sh would build for the combination, without those that are never published."""
    choice = fit(data, cell, requested)
    why = BadTarget("wheels for NVIDIA GPUs are never published")
    cuda = {name: why for name in choice.targets if CUDA.fullmatch(name)}
    return Fit(targets=tuple(name for name in choice.targets if name not in cuda), refused={**choice.refused, **cuda})


def _container(data: Versions, rocm: str) -> Row:
    """The image of a build job; none if the runner has no room for one."""
    image = data.rocm[rocm].image
    if data.jobs.container and image is None:
        raise DataError(f"versions.toml: rocm/{rocm}: no image, and jobs run in containers", remedy="Add its image.")
    return {"container": image if data.jobs.container and image else "", "container-options": CPU_OPTIONS}


def _gpu_image(data: Versions, rocm: str) -> str:
    """The image of a GPU job: of the nearest ROCm that has an image, of two the newer one. torch's wheels contain the
    HIP runtime of their ROCm, so the image only provides Python and tools.
    """
    place = {version: position for position, version in enumerate(data.rocm)}
    images = {version: each.image for version, each in data.rocm.items() if each.image}
    if not images:
        raise DataError("versions.toml: rocm: no version has an image, and GPU jobs run in one", remedy="Add an image.")
    nearest = min(images, key=lambda version: (abs(place[version] - place[rocm]), -place[version]))
    return images[nearest]


def _split(data: Versions, cells: Sequence[Cell], requested: Sequence[str] | None, make: _Rows) -> str:
    """The runs that together hold all combinations: one for each version of the first axis whose parts all fit."""
    for position, axis in enumerate(AXES):
        parts: dict[str, list[Cell]] = {}
        for cell in cells:
            parts.setdefault(getattr(cell, axis), []).append(cell)
        if all(len(make(data, part, requested)) <= MAX_ROWS for part in parts.values()):
            globs = [" ".join(version if at == position else "*" for at in range(len(AXES))) for version in parts]
            each = ", ".join(f"--only '{glob}'" for glob in globs)
            return f"Build it in {len(parts)} runs, each for a tag of its own: {each}."
    return "Build it in several runs, each for a tag of its own, with its own --only."
