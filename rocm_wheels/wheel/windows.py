"""The wheel for Windows, which is made on Linux: its repair stage and its test report. The repair stage changes nothing
and refuses a file that another machine cannot load. The report says that pip and uv install it: Linux cannot run it.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from rocm_wheels import packages
from rocm_wheels.compile import cache
from rocm_wheels.errors import DataError, RepairFailed, VerifyFailed
from rocm_wheels.matrix import locks, versions
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.matrix.platforms import PLATFORMS
from rocm_wheels.tables import version_key
from rocm_wheels.wheel import contents, pe
from rocm_wheels.wheel.contents import Contents
from rocm_wheels.wheel.repair import MAX_BYTES
from rocm_wheels.wheel.verdict import PASSED, PIP, REPAIRED, TESTED, UV, Stage, Verdict
from rocm_wheels.wheel.verify import run_installer

LAUNCHER = f"flash_attn/{PLATFORMS['windows'].launcher}"
# Python's limited API, the system and its C runtime. torch brings the HIP runtime, which nothing is linked to.
_ALLOWED = re.compile(r"python3\.dll|kernel32\.dll|ucrtbase\.dll|api-ms-win-crt-[a-z]+-l1-1-0\.dll")
_NOT_RUN = "Linux cannot run a wheel for Windows"


def repair(wheel: Path, output: Path) -> Path:
    """Copies `wheel` into `output` after its checks. Returns the path of the copy.

    Deletes the test report of another wheel of that name. Raises RepairFailed as `check` does.
    """
    check(wheel)
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{wheel.name}{VERDICT}").unlink(missing_ok=True)
    cache.write(output / wheel.name, wheel.read_bytes())
    return output / wheel.name


def check(wheel: Path) -> tuple[str, ...]:
    """The libraries that the launcher in the wheel imports.

    Raises RepairFailed if the wheel has no launcher or another library, if the launcher imports more than Python, the
    system and its C runtime, if RECORD is wrong, or if a release does not accept so many bytes.
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
    return tuple(imports)


def verify(wheel: Path, plan: Plan, work: Path) -> Verdict:
    """Installs the wheel for Windows by pip and uv, for the oldest and the newest Python, into directories of this
    machine. Writes <wheel>.verdict.json and returns the test report.

    Raises VerifyFailed with the installer's message, RepairFailed as `check` does, MissingTool without uv.
    """
    pythons = (plan.cell.python, max(versions.load().python, key=version_key))
    imports = check(wheel)
    stages = {REPAIRED: Stage(status=PASSED, details={"imports": list(imports)})}
    uv, env = packages.uv(), work / "envs" / "windows"
    run_installer([uv, "venv", "--clear", "--no-project", env])
    interpreter = env / "bin" / "python"
    run_installer(
        [uv, "pip", "install", "--python", interpreter, "--require-hashes", "-r", locks.DIRECTORY / "pip.txt"]
    )
    tag = PLATFORMS["windows"].tag
    commands: dict[str, list[str | Path]] = {
        PIP: [interpreter, "-m", "pip", "install", "--no-input", "--only-binary", ":all:", "--platform", tag],
        UV: [uv, "pip", "install", "--python-platform", "windows"],
    }
    for name, command in commands.items():
        started = time.monotonic()
        for python in pythons:
            target = env / f"{name}-{python}"
            run_installer([*command, "--no-deps", "--python-version", python, "--target", target, wheel.resolve()])
            if not (target / LAUNCHER).is_file():
                raise VerifyFailed(f"{wheel.name}, {name} for Python {python}: {target} has no {LAUNCHER}")
        seconds = round(time.monotonic() - started, 2)
        stages[name] = Stage(status=PASSED, seconds=seconds, details={"pythons": list(pythons)})
    stages |= {name: Stage.not_run(_NOT_RUN) for name in TESTED}
    verdict = Verdict.of(
        contents.read(wheel), plan, torch_source=f"nowhere: {_NOT_RUN}", python=", ".join(pythons), stages=stages,
        tests={}, failures=(),
    )  # fmt: skip
    verdict.write(wheel)
    return verdict
