"""The repair stage of a wheel for Windows: it changes nothing, and refuses what another machine could not load."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from rocm_wheels.errors import DataError, RepairFailed
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.matrix.platforms import PLATFORMS
from rocm_wheels.wheel import pe
from rocm_wheels.wheel.contents import Contents
from rocm_wheels.wheel.repair import MAX_BYTES

LAUNCHER = f"flash_attn/{PLATFORMS['windows'].launcher}"
# Python's limited API, the system and its C runtime. torch brings the HIP runtime, which nothing is linked to.
_ALLOWED = re.compile(r"python3\.dll|kernel32\.dll|ucrtbase\.dll|api-ms-win-crt-[a-z]+-l1-1-0\.dll")


def repair(wheel: Path, output: Path) -> Path:
    """Copies `wheel` into `output` after its checks. Returns the path of the copy.

    Deletes the test report of another wheel of that name. Raises RepairFailed if the wheel has no launcher or another
    library, if the launcher imports more than Python, the system and its C runtime, if RECORD is wrong, or if a release
    does not accept so many bytes.
    """
    try:
        with Contents(wheel) as contents:
            libraries = [name for name in contents.names if name.endswith((".pyd", ".dll", ".so"))]
            wrong = contents.record_errors()
            imports = pe.imported(contents.archive.read(LAUNCHER)) if libraries == [LAUNCHER] else ()
    except DataError as error:
        raise RepairFailed(f"{wheel.name}: {error.message}", remedy="Run the assemble stage again.") from error
    if libraries != [LAUNCHER]:
        raise RepairFailed(f"{wheel.name} has the libraries {', '.join(libraries) or 'none'}, not {LAUNCHER} alone")
    if foreign := [name for name in imports if not _ALLOWED.fullmatch(name)]:
        raise RepairFailed(
            f"{LAUNCHER} imports {', '.join(foreign)}",
            remedy="Look the function up at run time, as csrc/launcher/windows/library.c does.",
        )
    if wrong:
        raise RepairFailed(f"RECORD of {wheel.name} is wrong: {'; '.join(wrong)}")
    if (size := wheel.stat().st_size) > MAX_BYTES:
        raise RepairFailed(
            f"{wheel.name} has {size} bytes, a release asset takes at most {MAX_BYTES}",
            remedy='Build for fewer targets, such as PYTORCH_ROCM_ARCH="gfx1030;gfx1100".',
        )
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{wheel.name}{VERDICT}").unlink(missing_ok=True)
    return Path(shutil.copy(wheel, output / wheel.name))
