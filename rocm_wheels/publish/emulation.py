"""Tests a wheel on a GPU that AMD's rocjitsu emulates. The result names the emulator and never becomes a test report.

rocjitsu runs HIP without a GPU (ROCm/rocm-systems, emulation/rocjitsu). It comes with the package rocm-sdk-devel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_wheels import packages
from rocm_wheels.compile import cache as files
from rocm_wheels.errors import DataError, VerifyFailed
from rocm_wheels.matrix import locks, versions
from rocm_wheels.wheel import verify
from rocm_wheels.wheel.verdict import FAILED, GPU, PASSED, TESTED

# GPU target -> the configuration that rocjitsu installs for it (docs/configuration.md in rocjitsu): one GPU of each
# family. rocjitsu has no configuration for gfx908, gfx1010 and gfx1030, which its README calls experimental.
CONFIGURATIONS = {
    "gfx90a": "gfx90a_mi210_kmd.json",
    "gfx942": "gfx942_cdna3.json",
    "gfx950": "gfx950_mi355x.json",
    "gfx1100": "gfx1100_w7900.json",
    "gfx1151": "gfx1151.json",
    "gfx1201": "gfx1201_r9700.json",
}
_NAMES = ("rocjitsu", "mirage")  # of the program; it was called mirage for some months of 2026
_GRACE_SECONDS = 3600  # of the last test, which may begin at the end of its minutes
_ANSWER_SECONDS = 1800  # of a command that prints a line; under the emulator it imports torch
_PROBE = """
import torch
from flash_attn.core.platform import PLATFORM
print(torch.__version__, torch.cuda.get_device_properties(0).gcnArchName.split(":")[0], PLATFORM.emulator(), sep="|")
"""


@dataclass(frozen=True, kw_only=True)
class Emulator:
    """An installed rocjitsu: the words before a command that runs under it, its version and ROCm's."""

    prefix: tuple[str, ...]
    version: str
    rocm: str

    @classmethod
    def of(cls, environment: Path, target: str) -> Emulator:
        """The emulator in an environment with rocm-sdk-devel. Raises VerifyFailed if it or its configuration lacks."""
        tool = str(environment / "bin/rocm-sdk")
        _output([tool, "init"])
        root = Path(_output([tool, "path", "--root"]))
        programs = [root / "bin" / name for name in _NAMES if (root / "bin" / name).is_file()]
        configuration = root / "share/rocjitsu/configs" / CONFIGURATIONS[target]
        if not programs or not configuration.is_file():
            missing = configuration if programs else root / "bin" / _NAMES[0]
            raise VerifyFailed(
                f"rocm-sdk-devel has no {missing}", remedy="See what AMD's packages hold now: rocm-sdk path --root"
            )
        program = str(programs[0])
        # In one process with the program: the daemon needs ptrace, which a hosted runner does not allow.
        takes = "--in-process" in _output([program, "run", "--help"], codes=(0, 1, 2))
        words = ("run", "--in-process") if takes else ()
        return cls(
            prefix=(program, *words, "--config", str(configuration), "--"),
            version=_output([program, "--version"]).splitlines()[0].removeprefix(f"{programs[0].name} "),
            rocm=_output([tool, "version"]),
        )


def run(target: str, wheel: Sequence[str], *, minutes: float, output: Path) -> dict[str, Any]:
    """Installs torch, the emulator and a wheel, runs the selftest and the GPU tests, and writes `output`/TARGET.json
    and two logs. Returns what it wrote.

    wheel: what uv installs, a file or a requirement with its index. minutes: limit of the selftest, and of the tests;
    a check or test that did not begin in time counts as not run. Raises DataError for a target that is not emulated,
    VerifyFailed if the selftest or the tests cannot run at all.
    """
    if target not in CONFIGURATIONS:
        raise DataError(
            f"rocjitsu has no configuration for {target}", remedy=f"Give one of {', '.join(CONFIGURATIONS)}."
        )
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="emulation-") as scratch:
        environment = Path(scratch) / "env"
        python = _install(environment, target, wheel)
        emulator = Emulator.of(environment, target)
        torch, device, name = _output([*emulator.prefix, str(python), "-c", _PROBE]).splitlines()[-1].split("|")
        if (device, name) != (target, _NAMES[0]):
            raise VerifyFailed(
                f"rocjitsu {emulator.version} shows a {device} of {name or 'no emulator'}, not an emulated {target}"
            )
        selftest, tests = Path(scratch) / "selftest.json", Path(scratch) / "tests.json"
        limit = ["--minutes", f"{minutes:g}"]
        under = (*emulator.prefix, str(python), "-m")
        command = [*under, "flash_attn.selftest", *limit, "--json", str(selftest)]
        _log(command, output / f"{target}-selftest.log", minutes)
        command = [*under, "pytest", "-p", "no:cacheprovider", "-c", str(verify.WHEEL_TESTS / "pytest.ini")]
        command += [*limit, "--report", str(tests), *(str(verify.WHEEL_TESTS / name) for name in TESTED[GPU])]
        _log(command, output / f"{target}-tests.log", minutes)
        result = {
            "emulator": _NAMES[0],
            "version": emulator.version,
            "rocm": emulator.rocm,
            "torch": torch,
            "target": target,
            **_selftest(selftest),
            **_tests(tests),
        }
    files.write(output / f"{target}.json", (json.dumps(result, indent=1) + "\n").encode())
    return result


def ok(result: Mapping[str, Any]) -> bool:
    """Whether everything that ran passed, and something of each part ran."""
    return all(part["passed"] and not part["failed"] for part in (result["selftest"], result["tests"]))


def summary(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    parts = {"selftest": "selftest", "tests": "wheel_tests"}
    rows = [f"| {name} | {result[key]['passed']} | {len(result[key]['failed'])} | {result[key]['not run']} |"
            for key, name in parts.items()]  # fmt: skip
    failed = [f"- {name}" for key in parts for name in result[key]["failed"]]
    return "\n".join(
        [
            f"### {result['target']}, emulated, by AMD's {result['emulator']}, version {result['version']}",
            "",
            f"flash_attn {result['wheel']}, torch {result['torch']}, ROCm {result['rocm']}. Nothing ran on hardware.",
            "",
            "| part | passed | failed | not run |",
            "|-|-|-|-|",
            *rows,
            *(["", *failed] if failed else []),
            "",
        ]
    )


def _install(environment: Path, target: str, wheel: Sequence[str]) -> Path:
    """A new environment for this Python, with torch, the emulator, the wheel and its tests. Returns its Python."""
    verify.run_installer([packages.uv(), "venv", "--no-project", "--python", sys.executable, environment])
    python = environment / "bin/python"
    install: list[str | Path] = [packages.uv(), "pip", "install", "--python", python]
    index = [rocm.amd_index for rocm in versions.load().rocm.values() if rocm.amd_index][-1]
    verify.run_installer([*install, "--index-url", index, f"torch[device-{target}]", "rocm[libraries,devel]"])
    before = _output([str(python), "-c", "import torch; print(torch.__version__)"])
    verify.run_installer([*install, "--require-hashes", "-r", locks.DIRECTORY / "wheel_tests.txt"])
    verify.run_installer([*install, *wheel])
    after = _output([str(python), "-c", "import torch; print(torch.__version__)"])
    if before != after:
        raise VerifyFailed(f"uv replaced torch {before} by {after}", remedy=f"See what {' '.join(wheel)} requires.")
    return python


def _selftest(path: Path) -> dict[str, Any]:
    report = _read(path, "the selftest")
    if report["machine"].get("emulator") != _NAMES[0]:
        raise VerifyFailed("the selftest did not see the emulator, so its report could be taken for one of hardware")
    checks = Counter(str(check["ok"]) for check in report["checks"])
    failed = [f"{check['check']}: {check['failure']}" for check in report["checks"] if check["ok"] is False]
    failed += [f"damaged: {damaged}" for damaged in report["wheel"]["damaged"]]
    left = re.search(r"minutes are over: (\d+) of", report["trouble"])
    failed += [report["trouble"]] if report["trouble"] and not left else []
    wheel = f"{report['wheel']['version']}, contents {report['wheel']['contents'][:12]}"
    part = {"passed": checks["True"], "failed": failed, "not run": int(left[1]) if left else 0}
    return {"wheel": wheel, "date": report["date"], "selftest": part}


def _tests(path: Path) -> dict[str, Any]:
    tests = _read(path, "pytest")["tests"]
    failed = [test["name"] for test in tests if test["outcome"] == FAILED]
    passed = sum(test["outcome"] == PASSED for test in tests)
    return {"tests": {"passed": passed, "failed": failed, "not run": len(tests) - passed - len(failed)}}


def _read(path: Path, who: str) -> Any:
    if not path.is_file():
        raise VerifyFailed(f"{who} wrote no report under the emulator", remedy="The log says how far it came.")
    return json.loads(path.read_text(encoding="utf-8"))


def _log(command: Sequence[str], path: Path, minutes: float) -> None:
    """Runs a command, with its output in a file. A program that the emulator leaves behind could keep a pipe open."""
    with path.open("wb") as log:
        try:
            subprocess.run(
                command, env=_environment(), stdout=log, stderr=subprocess.STDOUT,
                timeout=60 * minutes + _GRACE_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"`{' '.join(command)}` was ended after {60 * minutes + _GRACE_SECONDS:.0f} s", file=sys.stderr)


def _environment() -> dict[str, str]:
    return {**verify.clean_environment(), "PYTHONNOUSERSITE": "1"}


def _output(command: Sequence[str], codes: Sequence[int] = (0,)) -> str:
    """The stdout of a command. Raises VerifyFailed for another exit code, or if it takes too long."""
    try:
        done = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise VerifyFailed(f"`{' '.join(command)}` took over {_ANSWER_SECONDS} s") from error
    if done.returncode not in codes:
        raise VerifyFailed(f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()
