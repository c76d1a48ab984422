"""The launcher: its build, how it finds a driver, and launcher_cases.py under several Pythons."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fake_parts
import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection
from launcher_cases import CASES

from rocm_wheels.errors import CompileFailed, MissingTool
from rocm_wheels.paths import FLASH_ATTN_SRC
from rocm_wheels.wheel import launcher

SUPPORT = Path(__file__).parent / "support"
OTHER_PYTHONS = ("3.10", "3.12", "3.13")


@dataclass(frozen=True)
class Built:
    """The launcher in `modules`, each driver in a directory of its own."""

    modules: Path
    hip: Path
    cuda: Path
    old: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, warm_cache: Path) -> Built:
    root = tmp_path_factory.mktemp("launcher")
    launcher.build(root / "modules", cache=warm_cache)

    def fake(folder: str, name: str, *options: str) -> Path:
        library = root / folder / name
        library.parent.mkdir()
        zig = [sys.executable, "-m", "ziglang", "cc", "-std=c11", "-shared", "-fPIC", "-O1", "-g0"]
        zig += [
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pthread",
            f"-Wl,-soname,{name}",
            *options,
        ]
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(warm_cache / "zig")}
        environment["ZIG_LOCAL_CACHE_DIR"] = str(warm_cache / "zig")
        command = [*zig, "fake_driver.c", "-o", str(library)]
        subprocess.run(command, cwd=SUPPORT, env=environment, check=True)
        return library

    return Built(
        modules=root / "modules",
        hip=fake("hip", "libamdhip64.so.6"),
        cuda=fake("cuda", "libcuda.so.1", "-DFAKE_CUDA"),
        old=fake("old", "libamdhip64.so.6", "-DFAKE_OLD", "-Wno-unused-function"),
    )


def run(
    built: Built, *arguments: str, python: str = sys.executable, library_path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a Python that sees the launcher, with the given directory as the system's libraries."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(built.modules)
    if library_path is not None:
        environment["LD_LIBRARY_PATH"] = str(library_path)
    command = [python, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def run_code(built: Built, code: str, *, library_path: Path | None = None) -> str:
    """The output of a program; its last error line if it fails."""
    done = run(built, "-c", f"import ctypes, _launcher\n{code}", library_path=library_path)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"nothing, exit status {done.returncode}"


def run_cases(built: Built, platform: str, *names: str, python: str = sys.executable) -> list[str]:
    library = {"hip": built.hip, "cuda": built.cuda}[platform]
    arguments = [str(SUPPORT / "launcher_cases.py"), platform, str(built.modules), str(library), *names]
    done = run(built, *arguments, python=python, library_path=library.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def find_python(version: str) -> str:
    """An interpreter of this version that runs here. Skips the test if there is none."""
    homes = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python3"))
    for candidate in [shutil.which(f"python{version}"), *map(str, homes)]:
        if candidate is None:
            continue
        asked = subprocess.run(
            [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.stdout.strip() == version:
            return candidate
    pytest.skip(f"no Python {version} on this machine")


PLATFORM_CASES = [(platform, name) for name, (_, platforms) in CASES.items() for platform in platforms]


@pytest.mark.parametrize(("platform", "name"), PLATFORM_CASES)
def test_case(built: Built, platform: str, name: str) -> None:
    assert run_cases(built, platform, name) == [name]


@pytest.mark.parametrize("version", OTHER_PYTHONS)
@pytest.mark.parametrize("platform", ["hip", "cuda"])
def test_one_launcher_binary_runs_under_every_python(built: Built, platform: str, version: str) -> None:
    ran = run_cases(built, platform, python=find_python(version))
    assert ran == [name for where, name in PLATFORM_CASES if where == platform]


class TestBind:
    def test_no_hip_runtime(self, built: Built) -> None:
        said = run_code(built, "_launcher.bind('hip')")
        assert said == (
            "flash_attn._launcher.DriverError: "
            "no HIP runtime is loaded in this process: torch is not imported, or is not a build for ROCm"
        )

    def test_returns_the_real_path(self, built: Built, tmp_path: Path) -> None:
        link = tmp_path / "libamdhip64.so"
        link.symlink_to(built.hip)
        code = f"ctypes.CDLL({str(link)!r}); ctypes.CDLL({str(built.hip)!r}); print(_launcher.bind('hip'))"
        assert run_code(built, code) == str(built.hip.resolve())

    def test_the_runtime_of_sibling_packages(self, built: Built, tmp_path: Path) -> None:
        """From ROCm 7.14 on, torch finds HIP by RPATH in a package next to its own, and loads it under that path."""
        packages = tmp_path / "site-packages"
        runtime = packages / "_rocm_sdk_libraries_gfx94X_dcgpu/lib/libamdhip64.so.6"
        runtime.parent.mkdir(parents=True)
        shutil.copy(built.hip, runtime)
        for directory in ("_rocm_sdk_core", "torch"):  # the SDK package links to it
            (packages / directory / "lib").mkdir(parents=True)
        (packages / "_rocm_sdk_core/lib/libamdhip64.so.6").symlink_to(runtime)
        torch = fake_parts.library(
            packages / "torch/lib/libtorch_hip.so",
            "int hipGetDevice(int *); int torch_uses_hip(void) { int device; return hipGetDevice(&device); }\n",
            str(runtime), "-Wl,-rpath,$ORIGIN/../../_rocm_sdk_core/lib",
        )  # fmt: skip
        assert run_code(built, f"ctypes.CDLL({str(torch)!r}); print(_launcher.bind('hip'))") == str(runtime)

    def test_two_hip_runtimes(self, built: Built, tmp_path: Path) -> None:
        other = tmp_path / "libamdhip64-1a2b3c.so.6"
        shutil.copy(built.hip, other)
        code = f"ctypes.CDLL({str(built.hip)!r}); ctypes.CDLL({str(other)!r}); _launcher.bind('hip')"
        said = run_code(built, code)
        assert "two HIP runtimes" in said
        assert str(built.hip.resolve()) in said
        assert str(other.resolve()) in said

    def test_the_launcher_can_bind_again_after_a_failure(self, built: Built) -> None:
        code = f"""
try:
    _launcher.bind("hip")
except _launcher.DriverError as error:
    assert error.code is None, error.code
ctypes.CDLL({str(built.hip)!r})
print(_launcher.bind("hip"))
"""
        assert run_code(built, code) == str(built.hip.resolve())

    def test_missing_function(self, built: Built) -> None:
        said = run_code(built, f"ctypes.CDLL({str(built.old)!r}); _launcher.bind('hip')")
        assert f"{built.old.resolve()} has no function hipModuleLaunchKernel" in said

    def test_cuda_is_opened_when_needed(self, built: Built) -> None:
        said = run_code(built, "print(_launcher.bind('cuda'))", library_path=built.cuda.parent)
        assert said == str(built.cuda.resolve())

    def test_no_cuda_driver(self, built: Built, tmp_path: Path) -> None:
        (tmp_path / "libcuda.so.1").write_bytes(b"not a library")
        said = run_code(built, "_launcher.bind('cuda')", library_path=tmp_path)
        assert "no CUDA driver" in said
        assert "libcuda.so.1" in said

    @pytest.mark.parametrize(
        "call",
        ["devices()", "current_device()", "Kernel(b'-', 's', '', 0, 64, 'n').launch(0, 0, 1, 1, 1)"],
    )
    def test_nothing_works_unbound(self, built: Built, call: str) -> None:
        said = run_code(built, f"_launcher.{call}")
        assert said.endswith("DriverError: no driver is bound: call bind('hip') or bind('cuda') first")


class TestNoDevice:
    @pytest.mark.parametrize("platform", ["hip", "cuda"])
    def test_is_an_error_when_launching_only(self, built: Built, platform: str) -> None:
        library = {"hip": built.hip, "cuda": built.cuda}[platform]
        code = f"""
fake = ctypes.CDLL({str(library)!r})
fake.fake_set_devices(0)
_launcher.bind({platform!r})
assert _launcher.devices() == 0
_launcher.Kernel(b"-", "s", "", 0, 64, "n").launch(0, 0, 1, 1, 1)
"""
        said = run_code(built, code, library_path=library.parent)
        assert "kernel n on device 0: no device" in said
        assert str(library.resolve()) in said

    def test_other_failures_of_counting_are_reported_and_not_kept(self, built: Built) -> None:
        code = f"""
fake = ctypes.CDLL({str(built.hip)!r})
fake.fake_fail(b"hipGetDeviceCount", 3)
_launcher.bind("hip")
try:
    _launcher.devices()
except _launcher.DriverError as error:
    print(error.function, error.code, _launcher.devices())
"""
        assert run_code(built, code) == "hipGetDeviceCount 3 2"


def test_sub_interpreters_are_refused(built: Built) -> None:
    code = """
import importlib
try:
    interpreters = importlib.import_module("_xxsubinterpreters")
except ImportError:
    interpreters = importlib.import_module("_interpreters")
number = interpreters.create()
try:
    failure = interpreters.run_string(number, "import _launcher")
    print("imported" if failure is None else failure.formatted)
except Exception as error:
    print(error)
interpreters.destroy(number)
"""
    assert re.search(r"ImportError.*_launcher", run_code(built, code))


def test_importing_again_gives_the_same_types(built: Built) -> None:
    code = """
import sys
first = sys.modules.pop("_launcher")
import _launcher as second
print(first is not second, first.Kernel is second.Kernel, first.DriverError is second.DriverError)
"""
    assert run_code(built, code) == "True True True"


def test_signatures_are_readable(built: Built) -> None:
    code = "from inspect import signature as s; print(s(_launcher.Kernel.launch), s(_launcher.bind))"
    assert run_code(built, code) == "(self, device, stream, grid_x, grid_y, grid_z, /, *args) (platform, /)"


class TestBuild:
    def test_is_deterministic(self, built: Built, tmp_path: Path) -> None:
        first = launcher.build(tmp_path / "first", cache=tmp_path / "a")
        assert first.read_bytes() == (built.modules / launcher.FILE_NAME).read_bytes()

    def test_names_no_path_of_this_machine(self, built: Built, warm_cache: Path) -> None:
        content = (built.modules / launcher.FILE_NAME).read_bytes()
        for path in (launcher.SOURCE.parent, warm_cache, built.modules, Path(sys.prefix), Path(sys.base_prefix)):
            assert os.fsencode(path) not in content
        assert re.search(rb"/(root|home|tmp|work|usr|opt)/", content) is None

    def test_needs_nothing_but_an_old_glibc(self, built: Built) -> None:
        with (built.modules / launcher.FILE_NAME).open("rb") as file:
            elf = ELFFile(file)
            dynamic = elf.get_section_by_name(".dynamic")
            assert isinstance(dynamic, DynamicSection)
            needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}  # type: ignore[attr-defined]
            assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0"}
            versions = elf.get_section_by_name(".gnu.version_r")
            assert isinstance(versions, GNUVerNeedSection)
            names = {aux.name for _, auxiliaries in versions.iter_versions() for aux in auxiliaries}
            assert all(tuple(map(int, name.removeprefix("GLIBC_").split("."))) <= (2, 17) for name in names)
            symbols = elf.get_section_by_name(".dynsym")
            assert isinstance(symbols, SymbolTableSection)
            exported = [s.name for s in symbols.iter_symbols() if s["st_shndx"] != "SHN_UNDEF" and s.name]
            assert exported == ["PyInit__launcher"]
            assert elf.get_section_by_name(".symtab") is None
            assert not any(section.name.startswith(".debug") for section in elf.iter_sections())

    def test_builds_for_aarch64(self, warm_cache: Path, tmp_path: Path) -> None:
        with launcher.build(tmp_path, cache=warm_cache, machine="aarch64").open("rb") as file:
            assert ELFFile(file)["e_machine"] == "EM_AARCH64"

    @pytest.mark.long
    def test_is_deterministic_for_windows(self, windows_launcher: Path, tmp_path: Path) -> None:
        again = launcher.build_for_windows(tmp_path, version="2.8.3", cache=tmp_path / "cache")
        assert again.read_bytes() == windows_launcher.read_bytes()

    def test_builds_for_windows(self, windows_launcher: Path) -> None:
        """A PE file for x86_64 (machine 0x8664) without a path of this machine."""
        content = windows_launcher.read_bytes()
        header = int.from_bytes(content[60:64], "little")
        assert content[header : header + 6] == b"PE\0\0\x64\x86"
        assert b"PyInit__launcher" in content
        assert re.search(rb"/(root|home|tmp|work|usr|opt)/", content) is None

    def test_cache_saves_the_compiler(
        self, built: Built, warm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launcher, "_compile", None)
        again = launcher.build(tmp_path, cache=warm_cache)
        assert again.read_bytes() == (built.modules / launcher.FILE_NAME).read_bytes()
        assert sorted(tmp_path.iterdir()) == [again]

    @pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"\0" + content[1:]])
    def test_a_damaged_copy_in_the_cache_is_compiled_again(
        self, damage: Callable[[bytes], bytes], built: Built, warm_cache: Path, tmp_path: Path
    ) -> None:
        whole = (built.modules / launcher.FILE_NAME).read_bytes()
        (kept,) = (path for path in warm_cache.glob(f"launcher/*/{launcher.FILE_NAME}") if path.read_bytes() == whole)
        kept.write_bytes(damage(whole))
        assert launcher.build(tmp_path, cache=warm_cache).read_bytes() == whole == kept.read_bytes()

    def test_leaves_the_home_directory_alone(
        self, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home = tmp_path / "home"
        home.mkdir()
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        source = tmp_path / "launcher"
        shutil.copytree(launcher.SOURCE, source)
        (source / "another.c").write_text("/* another source, so it is compiled */\n")
        monkeypatch.setattr(launcher, "SOURCE", source)
        launcher.build(tmp_path / "out", cache=warm_cache)
        assert list(home.iterdir()) == []

    def test_compiler_errors_are_shown(self, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = tmp_path / "launcher"
        source.mkdir()
        (source / "broken.c").write_text("int broken(void) { return nothing; }\n")
        monkeypatch.setattr(launcher, "SOURCE", source)
        with pytest.raises(CompileFailed, match="undeclared identifier 'nothing'"):
            launcher.build(tmp_path / "out", cache=warm_cache)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("machine", launcher.TARGETS)
    def test_headers_as_debian_keeps_them(
        self, machine: str, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """pyconfig.h includes another file for this machine type, in a directory next to Python.h."""
        own = Path(sysconfig.get_path("include"))
        split = own.parent / str(sysconfig.get_config_var("MULTIARCH")) / own.name / "pyconfig.h"
        include, apart = tmp_path / "include" / "python3", tmp_path / "include" / "host-linux-gnu" / "python3"
        shutil.copytree(own, include)
        apart.mkdir(parents=True)
        shutil.copyfile(split if split.is_file() else own / "pyconfig.h", apart / "pyconfig.h")
        (include / "pyconfig.h").write_text(f"#include <{machine}-linux-gnu/python3/pyconfig.h>\n")
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(include))
        monkeypatch.setattr("sysconfig.get_config_var", lambda _: "host-linux-gnu")
        other = tmp_path / "cache"
        other.mkdir()
        (other / "zig").symlink_to(warm_cache / "zig")
        assert launcher.build(tmp_path / "out", cache=other, machine=machine).is_file()

    def test_missing_headers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sysconfig.get_path", tmp_path.joinpath)
        with pytest.raises(MissingTool, match=r"Python\.h.*\n.*-dev"):
            launcher.build(tmp_path)

    def test_missing_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.path", [])
        with pytest.raises(MissingTool, match="ziglang"):
            launcher.build(tmp_path)

    def test_unknown_machine(self, tmp_path: Path) -> None:
        with pytest.raises(MissingTool, match=r"riscv64.*\n.*x86_64"):
            launcher.build(tmp_path, machine="riscv64")


def test_each_piece_of_a_long_call_is_a_submission(built: Built) -> None:
    """HIP on Windows would submit the pieces of a call together, by the queues of the fake driver."""
    arguments = (SUPPORT / "submitted_pieces.py", built.modules, built.hip)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(FLASH_ATTN_SRC)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    size, microseconds, told = (result.pop(name) for name in ("size", "microseconds", "warnings"))
    for case, submissions in result.items():
        for stream in sorted({stream for stream, *_ in submissions}):
            seconds = [sum(blocks) / size / 2 for of, *blocks in submissions if of == stream]
            print(f"{case}, stream {stream}: {len(seconds)} submissions, the longest {max(seconds):.2f} s")
            assert max(seconds) <= (0.51 if case != "whole calls, never submitted" else 65)
    print(f"{microseconds:.2f} us for a submission that finds nothing to do")
    pieces = [*[size] * 46, 32768 - 46 * size]
    assert result["whole calls, never submitted"] == [
        [1, *(pieces * 3)[:129]], [1, *(pieces * 3)[129:]]
    ]  # fmt: skip
    assert result["whole calls"] == [[1, programs] for programs in pieces * 3]
    assert len(told) == 2, told  # one for each graph
    assert told[0].startswith("attn_fwd makes a captured graph longer than 0.5 s by an estimate.")
