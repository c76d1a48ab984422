"""Stage 1: compiles kernel variants into the kernel store, one archive per GPU target.

Every compiled unit lands in a content-addressed cache first, so an interrupted build continues where it stopped,
shards of one build can run on different machines, and a build for another Python or torch compiles nothing.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rocm_wheels import codeobject, sources, triton_compiler
from rocm_wheels.errors import CompileFailed, MissingTool, RocmWheelsError

_ZIP_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One kernel variant for one GPU target, and the digest of everything that its code depends on.

    The variant travels as its fields: a worker process cannot unpickle a class of a package it has not found yet.
    """

    target: str
    name: str
    variant: tuple[Any, ...]
    key: str

    def path(self, cache: Path) -> Path:
        """Where the cache keeps the code object; its manifest entry lies beside it as .json."""
        return cache / "kernels" / self.key[:2] / f"{self.key}.co"


@cache
def compiler() -> tuple[str, str]:
    """Name and version of the kernel compiler. Raises MissingTool."""
    try:
        return "triton", version("triton")
    except PackageNotFoundError:
        raise MissingTool(
            "the kernel compiler is missing: no `triton` in this environment",
            remedy="run ./build_rocm.sh, which makes its own, or `pip install --group build`",
        ) from None


@cache
def _recipe() -> str:
    """Digest of the code that turns a kernel into an object and its manifest entry."""
    files = (Path(str(module.__file__)) for module in (triton_compiler, codeobject))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def units(targets: Sequence[str], *, shard: tuple[int, int] = (1, 1), only: str | None = None) -> list[Unit]:
    """What to compile, in a fixed order. The shards 1/n to n/n have no unit in common and all of them together."""
    variants = sources.module("runtime.variants")
    launches = sources.module("kernels.launches")
    index, count = shard
    found = []
    for target in targets:
        for variant in variants.table(target):
            if only is not None and not fnmatch.fnmatch(variant.name, only):
                continue
            specification = launches.specification(variant, target)
            files = (f"flash_attn/kernels/{name}.py" for name in (specification.module, "common", "lengths"))
            ingredients = {
                "variant": list(variant),
                "target": target,
                "constants": specification.constants,
                "options": specification.options,
                "arguments": variants.TYPES,
                "aligned": variants.ALIGNED,
                "compiler": compiler(),
                "sources": sources.digest(*files, "flash_attn/kernels/flags.py"),
                "recipe": _recipe(),
            }
            key = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()
            found.append(Unit(target=target, name=variant.name, variant=tuple(variant), key=key))
    return found[index - 1 :: count]


def compile_store(
    targets: Sequence[str],
    *,
    cache: Path,
    jobs: int,
    shard: tuple[int, int] = (1, 1),
    only: str | None = None,
) -> dict[str, Path]:
    """Compile what the cache lacks and pack one archive a target. Returns target -> archive.

    With a shard of several the archives are not packed: the result is empty, the cache holds the shard's units.
    Raises CompileFailed naming the unit; what was compiled before stays in the cache.
    """
    wanted = units(targets, shard=shard, only=only)
    if not wanted:
        raise CompileFailed(f"no variant matches {only!r}", remedy="`python -m rocm_wheels compile --list` shows all")
    missing = [unit for unit in wanted if _cached(unit, cache) is None]
    print(f"  {len(wanted)} kernels for {', '.join(targets)}: {len(wanted) - len(missing)} cached", flush=True)
    if missing:
        _compile(missing, cache, jobs)
    if shard[1] > 1:
        return {}
    return {target: _pack([unit for unit in wanted if unit.target == target], cache) for target in targets}


def require_cached(targets: Sequence[str], *, cache: Path) -> None:
    """Raises CompileFailed unless the cache has every kernel of the targets."""
    missing = [unit for unit in units(targets) if _cached(unit, cache) is None]
    if missing:
        raise CompileFailed(
            f"{len(missing)} kernels are not in the cache {cache}: first {missing[0].name} for {missing[0].target}",
            remedy="Bring the cache of the same sources and compiler, or leave --cached-kernels out.",
        )


def _compile(missing: Sequence[Unit], cache: Path, jobs: int) -> None:
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    scratch = tempfile.TemporaryDirectory(prefix="rocm_wheels-")
    pool = ProcessPoolExecutor(
        min(jobs, len(missing)), context, initializer=triton_compiler.prepare, initargs=(scratch.name,)
    )
    try:
        futures = {pool.submit(_compile_unit, unit, cache): unit for unit in missing}
        for done, future in enumerate(as_completed(futures), 1):
            unit = futures[future]
            problem = future.exception()
            if problem is not None and not isinstance(problem, (RocmWheelsError, BrokenProcessPool)):
                raise CompileFailed(f"compiling {unit.name} for {unit.target}: {problem!r}") from problem
            future.result()
            _progress(done, len(missing), started, unit)
    except BrokenProcessPool as error:
        raise CompileFailed(
            "a compiler process ended before it was done, most likely for want of memory",
            remedy=f"run it again with a smaller MAX_JOBS than {jobs}: what was compiled is kept",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        scratch.cleanup()


def _progress(done: int, total: int, started: float, unit: Unit) -> None:
    """A line that rewrites itself on a terminal; in a log, ten lines in all."""
    elapsed = time.monotonic() - started
    left = elapsed / done * (total - done)
    line = f"  compiled {done}/{total}, {elapsed:.0f} s, about {left:.0f} s left: {unit.target} {unit.name}"
    if sys.stdout.isatty():
        print(f"\r\x1b[K{line}", end="\n" if done == total else "", flush=True)
    elif done == total or done % max(1, total // 10) == 0:
        print(line, flush=True)


def _compile_unit(unit: Unit, cache: Path) -> None:
    """Runs in a worker. The entry is written last: a unit counts as compiled once both files are whole."""
    image, entry = triton_compiler.compile_variant(unit.target, unit.variant)
    entry["sha256"] = hashlib.sha256(image).hexdigest()
    path = unit.path(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, image)
    _write(path.with_suffix(".json"), json.dumps(entry, sort_keys=True).encode())


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, whenever the process is killed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _cached(unit: Unit, cache: Path) -> tuple[bytes, dict[str, Any]] | None:
    """A unit's code object and entry, or None where the cache lacks it or holds a damaged copy."""
    path = unit.path(cache)
    try:
        image = path.read_bytes()
        entry: dict[str, Any] = json.loads(path.with_suffix(".json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return (image, entry) if hashlib.sha256(image).hexdigest() == entry.get("sha256") else None


def _pack(wanted: Sequence[Unit], cache: Path) -> Path:
    """The archive of one target: the same units give the same bytes."""
    target = wanted[0].target
    name, compiler_version = compiler()
    kernels: dict[str, dict[str, Any]] = {}
    images: dict[str, bytes] = {}
    for unit in wanted:
        held = _cached(unit, cache)
        if held is None:
            raise CompileFailed(f"{unit.name} for {target} vanished from the cache {cache}")
        images[unit.name], kernels[unit.name] = held
    manifest = {
        "format": 1,
        "target": target,
        "compiler": {"name": name, "version": compiler_version},
        "kernels": kernels,
    }
    # One directory for one set of units, so that stores of different sets (`--only`) do not overwrite each other.
    identity = hashlib.sha256("".join(unit.key for unit in wanted).encode()).hexdigest()
    path = cache / "stores" / identity[:16] / f"{target}.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file, content in _files(manifest, images):
            information = zipfile.ZipInfo(file, _ZIP_DATE)
            information.compress_type = zipfile.ZIP_DEFLATED
            information.external_attr = 0o644 << 16
            archive.writestr(information, content)
    temporary.replace(path)
    return path


def _files(manifest: dict[str, Any], images: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    yield "manifest.json", json.dumps(manifest, sort_keys=True, indent=1).encode()
    for variant in sorted(images):
        yield f"{variant}.co", images[variant]
