"""Replaces the stages of a build."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocm_wheels.errors import RocmWheelsError
from rocm_wheels.matrix import names
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.matrix.versions import Interface


class Verdict:
    ok = True

    def summary(self) -> str:
        return "passed\n  tests: 12 passed"


class Stages:
    """Replaces the modules that compile, assemble, repair and verify, and records their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.failure: RocmWheelsError | None = None
        self.compiled: dict[str, object] = {}
        self.reported = Path()
        modules: dict[str, dict[str, Callable[..., object]]] = {
            "compile.toolchain": {"check": self.note("toolchain.check")},
            "compile.kernels": {"compile_store": self.compile_store},
            "wheel.launcher": {"build": self.launcher, "build_for_windows": self.launcher_for_windows},
            "compile.ck.planner": {"build": self.planner},
            "wheel.assemble": {"assemble": self.assemble, "assemble_interface": self.assemble_interface},
            "wheel.interpreters": {"find": self.find, "found": self.find},
            "wheel.manylinux": {"check": self.note("manylinux.check"), "assemble": self.in_an_image},
            "wheel.repair": {"check": self.note("repair.check"), "repair": self.repair},
            "wheel.verify": {"verify": self.verify},
            "wheel.windows": {"repair": self.repair_for_windows, "verify": self.verify_for_windows},
            "compile.inspect_store": {"report": self.report},
        }
        for module, functions in modules.items():
            fake = SimpleNamespace(**functions)
            package, _, name = f"rocm_wheels.{module}".rpartition(".")
            monkeypatch.setitem(sys.modules, f"{package}.{name}", fake)
            monkeypatch.setattr(importlib.import_module(package), name, fake, raising=False)

    def note(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append(name)

    def find(self, version: str) -> Path:
        self.calls.append(f"find {version}")
        return Path("/somewhere/python")

    def compile_store(self, targets: Sequence[str], *, cache: Path, **options: object) -> dict[str, Path]:
        self.calls.append("compile")
        self.compiled = {"targets": tuple(targets), "cache": cache, **options}
        return {target: self.file(cache / f"{target}.zip") for target in targets}

    def launcher(self, output: Path, *, cache: Path) -> Path:
        assert cache.is_dir()
        self.calls.append("launcher")
        return self.file(output / "_launcher.abi3.so")

    def launcher_for_windows(self, output: Path, *, version: str, cache: Path) -> Path:
        assert version
        assert cache.is_dir()
        self.calls.append("launcher for windows")
        return self.file(output / "_launcher.pyd")

    def planner(self, output: Path, *, cache: Path) -> Path:
        assert cache.is_dir()
        self.calls.append("planner")
        return self.file(output / "_ck_planner.so")

    def assemble(
        self, plan: Plan, stores: Mapping[str, Path], launcher: Path, output: Path, *, planner: Path | None
    ) -> Path:
        assert (planner is not None) == (plan.cell.backend == "ck")
        assert set(stores) == set(plan.targets)
        assert launcher.is_file()
        self.calls.append("assemble")
        return self.file(output / plan.wheel)

    def in_an_image(self, *arguments: Any, **options: Any) -> Path:
        made = self.assemble(*arguments, **options)
        self.calls[-1] = "cibuildwheel"
        return made

    def assemble_interface(self, interface: Interface, plan: Plan, output: Path) -> Path:
        self.calls.append("interface")
        return self.file(output / names.interface_wheel_name(interface, plan.cell))

    def repair(self, wheel: Path, output: Path) -> Path:
        assert wheel.is_file()
        self.calls.append("repair")
        return self.file(output / wheel.name.replace("-linux_", "-manylinux_2_17_"))

    def repair_for_windows(self, wheel: Path, output: Path) -> Path:
        assert wheel.is_file()
        self.calls.append("repair for windows")
        return self.file(output / wheel.name)

    def verify(self, wheel: Path, plan: Plan, work: Path, *, beside: Sequence[Path]) -> Verdict:
        assert all(path.is_file() for path in (wheel, *beside))
        assert work.is_dir()
        assert plan.torch_index == ("rocm6.2" if "+rocm62" in wheel.name else None)
        self.calls.append("verify")
        if self.failure:
            raise self.failure
        return Verdict()

    def verify_for_windows(self, wheel: Path, plan: Plan, work: Path) -> Verdict:
        assert wheel.is_file()
        assert work.is_dir()
        assert plan.platform == "windows"
        self.calls.append("verify for windows")
        return Verdict()

    def report(self, path: Path) -> str:
        self.reported = path
        return "gfx942  12 kernels"

    @staticmethod
    def file(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 3000)
        return path
