"""The last lines of a build: facts of the wheel, and the command that installs it on this machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocm_wheels.matrix import advice_facts, names, versions
from rocm_wheels.matrix.cells import Cell
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.matrix.plan import TORCH_INDEX, Plan
from rocm_wheels.matrix.platforms import DEFAULT
from rocm_wheels.package_modules import single_file
from rocm_wheels.tables import version_key
from rocm_wheels.wheel import interpreters

advice = single_file("diagnosis.advice")
NEW_ENVIRONMENT = "flash-attn-env"
# Prints what decides whether pip may install a wheel into the environment of a Python.
_PROBE = """
import importlib.metadata, importlib.util, json, os, sys, sysconfig
marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
torch = next(iter(importlib.metadata.Distribution.discover(name="torch")), None)
print(json.dumps({
    "python": sys.executable,
    "version": "%d.%d" % sys.version_info[:2] + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""),
    "managed": sys.prefix == sys.base_prefix and os.path.exists(marker),
    "pip": importlib.util.find_spec("pip") is not None,
    "torch": torch and torch.version or "",
}))
"""
_PROBE_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python of the user. managed: whether the system's package manager forbids pip to install into it. torch: the
    version of its torch, "" for none.
    """

    python: str
    version: str
    managed: bool
    pip: bool
    torch: str = ""

    def serves(self, plan: Plan) -> bool:
        """Whether its Python can import the wheel, and pip or uv may install it."""
        return not self.managed and (self.pip or shutil.which("uv") is not None) and _fits(plan, self.version)

    def install(self, plan: Plan, path: str) -> str:
        """The command that installs the wheel of a plan into this environment, from a path that is quoted. It installs
        torch for ROCm first where there is none: with the wheel alone, pip installs PyPI's torch, which is for CUDA, or
        none.
        """
        python = shlex.quote(self.python)
        pip = f"{python} -m pip install" if self.pip else f"uv pip install --python {python}"
        has_torch = "+rocm" in self.torch
        if isinstance(plan.cell, Cell):
            has_torch = has_torch and self.torch.startswith(f"{plan.cell.torch_minor}.")
        return f"{pip} {path}" if has_torch else f"{pip} {_torch(plan, self.version)} && {pip} {path}"


def facts(plan: Plan, wheel: Path, beside: Sequence[Path]) -> list[str]:
    """What a user must know of a wheel that was built, a line each."""
    cell = plan.cell
    if isinstance(cell, Cell):
        torch, python = f"pip install {_torch(plan)}", cell.python
    else:
        oldest = versions.load().advice.oldest_torch
        torch, python = f"any ROCm build from {oldest} on, which has to be installed first", f"{cell.python} and newer"
    return [
        f"wheel    {wheel}",
        f"size     {size(wheel)}",
        f"targets  {', '.join(plan.targets)}",
        f"verdict  {wheel}{VERDICT}",
        f"python   {python}",
        f"torch    {torch}",
        *(f"beside   {_beside(plan, path)}  # {_module(path)}" for path in beside),
    ]


def _beside(plan: Plan, path: Path) -> str:
    """How another wheel of the build is installed: from here, or from where it is copied to."""
    if plan.platform != DEFAULT:
        return f'python -m pip install "{path.name}"'
    return f"pip install {shlex.quote(str(path))}"


def installation(plan: Plan, wheel: Path, env: Mapping[str, str] = os.environ) -> list[str]:
    """The command that installs the wheel on this machine, after a line that says where to. For a wheel of another
    system, where it can be installed.
    """
    if plan.platform != DEFAULT:
        return [
            f"{wheel.name} installs on {plan.platform.capitalize()} alone. Copy it there; in the Python that has "
            "AMD's torch, type:",
            f'    python -m pip install "{wheel.name}"',
        ]
    path = shlex.quote(str(wheel))
    for environment in _environments(env):
        if environment.serves(plan):
            return [f"Install it here, with Python {environment.version}:", f"    {environment.install(plan, path)}"]
    base = _base(plan)
    if base is None:
        return [
            f"It installs with Python {plan.cell.python}, which was not found on this machine. Where it is, type:",
            f"    python{plan.cell.python} -m pip install {path}",
        ]
    pip = f"{NEW_ENVIRONMENT}/bin/python -m pip install"
    torch = _torch(plan, "" if isinstance(plan.cell, Cell) else "{}.{}".format(*sys.version_info[:2]))
    new = f"{shlex.quote(str(base))} -m venv {NEW_ENVIRONMENT} && {pip} {torch} && {pip} {path}"
    return ["Install it here, in a new environment:", f"    {new}"]


def built(plan: Plan, dist: Path) -> Path | None:
    """The wheel of a plan that a container left in `dist`; None if there is none."""
    wheels = dist.glob(f"{names.DISTRIBUTION}-{names.version(plan.cell)}-*{plan.cell.abi_tag}-manylinux*.whl")
    return max(wheels, key=lambda wheel: wheel.stat().st_mtime, default=None)


def size(path: Path) -> str:
    """The size of a file, for users."""
    count = path.stat().st_size
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def _environments(env: Mapping[str, str]) -> list[Environment]:
    """The active environment, else the Python that the user's shell runs."""
    active = env.get("VIRTUAL_ENV") or env.get("CONDA_PREFIX")
    on_path = [shutil.which(name, path=env.get("PATH")) for name in ("python", "python3")]
    candidates = [Path(active) / "bin/python"] if active else [Path(python) for python in on_path if python]
    return [environment for path in candidates if (environment := _probe(path)) is not None]


def _probe(python: Path) -> Environment | None:
    try:
        done = subprocess.run(
            [python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True
        )
        return Environment(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _fits(plan: Plan, python: str) -> bool:
    """Whether a Python of this version can import the wheel."""
    if isinstance(plan.cell, Cell) or python.endswith("t"):  # the stable ABI is not free-threaded Python's
        return python == plan.cell.python
    return version_key(python) >= version_key(plan.cell.python)


def _base(plan: Plan) -> Path | None:
    """A Python of this machine that can import the wheel, outside of the environments of a build."""
    python = interpreters.found(plan.cell.python) if isinstance(plan.cell, Cell) else Path(sys.executable)
    return Path(os.path.realpath(python)) if python else None


def _torch(plan: Plan, python: str = "") -> str:
    """Arguments of `pip install` for torch, with its label: without it, pip keeps another build of that version, such
    as PyPI's. Of a combination, else what the adviser recommends for the first GPU of the wheel and a Python.
    """
    if isinstance(plan.cell, Cell):
        return f"torch=={plan.cell.torch}+{plan.torch_index} --index-url {TORCH_INDEX}/{plan.torch_index}"
    data = versions.load()
    (gpu, *_) = (*(name for name in plan.targets if name in data.targets and not data.targets[name].is_generic), "")
    known, extras = advice_facts.facts(data), f"device-{gpu}" if gpu else ""
    line, _ = advice.torch_line(known, gpu, DEFAULT, python, "", extras)
    line = line or advice.torch_line(known, gpu, DEFAULT, "", "", extras)[0]
    return str(line).removeprefix("install ")


def _module(path: Path) -> str:
    """The name of an interface's wheel, for users."""
    interface = versions.load().interfaces[names.parse_interface(path.name)[0]]
    return f"{interface.name.replace('_', '-')}: the module {interface.module}"
