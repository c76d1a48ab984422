"""The universal wheel for Windows:

its plan, its contents, what its repair step refuses, and which installers accept it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import fake_parts
import pytest
import wheelhouse

from rocm_wheels import cli, packages
from rocm_wheels.errors import BadTarget, DataError, RepairFailed
from rocm_wheels.matrix import names, plan, targets, versions
from rocm_wheels.matrix.cells import Universal
from rocm_wheels.matrix.machine import Machine
from rocm_wheels.matrix.plan import Plan, make_universal_plan
from rocm_wheels.publish import assets, catalogue
from rocm_wheels.wheel import assemble, build, pe, verdict, version_resource, windows
from rocm_wheels.wheel.contents import Contents

DATA = versions.load()
_LOAD_CONFIG_BYTES = 0xC0  # csrc/launcher/windows/guard.S
MACHINE = Machine(cores=1, available_mib=4096)
NAME = "flash_attn-2.8.3+rocm-cp310-abi3-win_amd64.whl"


def planned(**env: str) -> Plan:
    return make_universal_plan(DATA, flash_attn="2.8.3", env=env, machine=MACHINE, platform="windows")


@pytest.fixture(scope="module")
def wheel(windows_launcher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wheel")
    stores = {"gfx1030": fake_parts.store(root / "stores", "gfx1030")}
    made = planned(PYTORCH_ROCM_ARCH="gfx1030")
    return windows.repair(assemble.assemble(made, stores, windows_launcher, root / "raw"), root / "dist")


def test_its_plan_has_the_gpus_of_torch_for_windows() -> None:
    made = planned()
    assert made.wheel == NAME
    generic = ("gfx10-1-generic", "gfx10-3-generic", "gfx11-generic", "gfx12-generic")
    assert sorted(made.targets) == sorted(("gfx1030", "gfx1100", *generic))
    assert not [name for name in made.targets if not DATA.targets[name].windows]
    assert {*made.targets} < {*targets.universal(DATA, None)}
    assert (made.cell.backend, made.steps[-1]) == ("triton", "verify")
    assert plan.load(plan.dump([made])) == [made]
    with pytest.raises(BadTarget, match="torch for Windows does not serve gfx942") as error:
        planned(PYTORCH_ROCM_ARCH="gfx942;gfx1030")
    assert "gfx1201" in str(error.value.remedy)


def test_a_build_for_all_platforms_makes_a_wheel_for_each() -> None:
    def other(**env: str) -> list[Plan]:
        return plan.other_platforms(DATA, make_universal_plan(DATA, flash_attn="2.8.3", env=env, machine=MACHINE))

    (everything,) = other()
    assert everything == replace(planned(), jobs=everything.jobs)
    (some,) = other(PYTORCH_ROCM_ARCH="gfx942;gfx1101")
    assert (some.wheel, some.targets) == (NAME, ("gfx1101",))
    assert some.targets_from == "PYTORCH_ROCM_ARCH"
    assert other(PYTORCH_ROCM_ARCH="gfx942") == []


def test_a_build_for_all_platforms_says_which_has_no_wheel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "no wheel for Windows: its torch has none of these GPU targets"
    for expected, notes in (("gfx942", [note]), ("gfx942;gfx1101", [])):
        monkeypatch.setenv("PYTORCH_ROCM_ARCH", expected)
        assert cli.main(["check", "2.8.3", "--platform", "all"]) == 0
        linux, *_ = plan.load(capsys.readouterr().out)
        assert [*linux.notes] == notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2.8.3", "--docker"], "run Linux containers"),
        (["2.8.3", "3.11", "2.5.1", "6.2"], "the wheel of one combination is for Linux"),
    ],
)
def test_options_for_linux_alone_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments, "--platform", "windows"]) == DataError.exit_code
    assert message in capsys.readouterr().err


def test_its_contents(wheel: Path, windows_launcher: Path) -> None:
    assert wheel.name == NAME
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    binaries = {
        name for name in members if not name.endswith((".py", ".pyi", ".typed", ".json")) and "info/" not in name
    }
    assert binaries == {"flash_attn/_launcher.pyd", "flash_attn/_kernels/gfx1030.zip"}
    assert members["flash_attn/_launcher.pyd"] == windows_launcher.read_bytes()
    info = "flash_attn-2.8.3+rocm.dist-info"
    assert b"Tag: cp310-abi3-win_amd64\n" in members[f"{info}/WHEEL"]
    assert b"Requires-Dist: torch" not in members[f"{info}/METADATA"]
    assert b"Operating System :: Microsoft :: Windows" in members[f"{info}/METADATA"]
    assert b"POSIX" not in members[f"{info}/METADATA"]
    assert json.loads(members["flash_attn/_build_info.json"])["backend"] == "triton"
    bill = json.loads(members[f"{info}/sboms/flash_attn.cdx.json"])
    assert [tool["name"] for tool in bill["metadata"]["tools"]["components"]] == ["triton", "ziglang"]
    assert "flash_attn/_launcher.pyd" in [part["name"] for part in bill["components"]]


def test_the_same_parts_give_the_same_bytes(wheel: Path, windows_launcher: Path, tmp_path: Path) -> None:
    stores = {"gfx1030": fake_parts.store(tmp_path / "stores", "gfx1030")}
    again = assemble.assemble(planned(PYTORCH_ROCM_ARCH="gfx1030"), stores, windows_launcher, tmp_path / "raw")
    assert again.read_bytes() == wheel.read_bytes()


def test_the_launcher_imports_python_and_the_system_alone(windows_launcher: Path) -> None:
    assert pe.imported(windows_launcher.read_bytes()) == ("kernel32.dll", "python3.dll", "ucrtbase.dll")


@pytest.mark.parametrize("damage", [b"", b"MZ", b"\x7fELF" + bytes(200)])
def test_files_that_are_no_windows_library_are_refused(damage: bytes) -> None:
    with pytest.raises(DataError, match="not a Windows library"):
        pe.imported(damage)


def test_a_library_that_is_cut_off_is_refused(windows_launcher: Path) -> None:
    content = windows_launcher.read_bytes()
    for length in (100, 300, 600):
        with pytest.raises(DataError, match="not a Windows library"):
            pe.imported(content[:length])


def _changed(wheel: Path, directory: Path, change: dict[str, bytes | None]) -> Path:
    """A copy of the wheel with other members; None takes a member away. RECORD stays as it is."""
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(directory / wheel.name, "w") as new:
        for name in {**dict.fromkeys(old.namelist()), **change}:
            content = change[name] if name in change else old.read(name)
            if content is not None:
                new.writestr(name, content)
    return directory / wheel.name


def test_unusable_libraries_in_a_windows_wheel_are_refused(wheel: Path, windows_launcher: Path, tmp_path: Path) -> None:
    linked = windows_launcher.read_bytes().replace(b"ucrtbase.dll", b"amdhip64.dll")
    changes: list[tuple[dict[str, bytes | None], str]] = [
        ({"flash_attn/_launcher.pyd": linked}, r"_launcher\.pyd imports amdhip64\.dll"),
        ({"flash_attn/_launcher.pyd": b"\x7fELF"}, "not a Windows library"),
        ({"flash_attn/_launcher.pyd": None}, "has the libraries none"),
        ({"flash_attn/other.dll": b""}, r"the libraries flash_attn/_launcher\.pyd, flash_attn/other\.dll"),
        ({"flash_attn/__init__.py": b"1"}, r"RECORD .* is wrong: flash_attn/__init__\.py has another hash"),
    ]
    for change, message in changes:
        with pytest.raises(RepairFailed, match=message):
            windows.repair(_changed(wheel, tmp_path / "changed", change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_no_part_of_a_wheel(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        written(path, content[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        windows.repair(wheel, tmp_path / "out")
    assert [*(tmp_path / "out").iterdir()] == []


def test_linux_installs_a_windows_wheel_and_does_not_run_it(wheel: Path, tmp_path: Path) -> None:
    assert build.plan_of(wheel).platform == "windows"
    with pytest.raises(DataError, match=f"{re.escape(NAME)} is for Windows, this machine cannot run it"):
        build.verify_again([wheel], cache=tmp_path, require_gpu=True)
    there = Path(shutil.copy(wheel, tmp_path / wheel.name))
    (made,) = build.verify_again([there], cache=tmp_path / "cache", require_gpu=False)
    assert verdict.beside(there) == made
    assert made.ok
    assert {name: stage.status for name, stage in made.stages.items()} == {
        **dict.fromkeys((verdict.REPAIRED, verdict.PIP, verdict.UV), "passed"),
        **dict.fromkeys(verdict.TESTED, "not run: Linux cannot run a wheel for Windows"),
    }
    assert made.stages[verdict.UV].details == {"pythons": ["3.10", "3.15"]}
    assert made.stages[verdict.REPAIRED].details["imports"] == ["kernel32.dll", "python3.dll", "ucrtbase.dll"]
    assert names.parse(NAME).platforms == ("win_amd64",)
    # The same report of a wheel for Linux is none of success.
    linux = replace(made, wheel=NAME.replace("win_amd64", "manylinux_2_17_x86_64"))
    assert [name for name, _ in linux.unmet()] == [*verdict.TESTED][:-1]


def test_both_platforms_are_admitted_and_listed(wheel: Path, tmp_path: Path) -> None:
    linux = wheelhouse.write(tmp_path, Universal(flash_attn="2.8.3", python="3.10", backend="ck"), commit="")
    there = Path(shutil.copy(wheel, tmp_path / wheel.name))
    for path in (linux, there):  # both of one commit
        wheelhouse.write_verdict(
            path, targets=("gfx1030",) if path == there else ("gfx90a", "gfx942"), commit=_commit(path)
        )
    windows.verify(there, build.plan_of(there), tmp_path / "work")
    shutil.rmtree(tmp_path / "work")
    directory, assets_ = assets.collect(tmp_path)
    assert [(each.name, each.platform, each.ran_on) for each in directory.wheels] == [
        (linux.name, "linux", "CPU"),
        (there.name, "windows", "nothing"),
    ]
    assert {linux.name, there.name, f"{there.name}{names.VERDICT}"} <= {asset.name for asset in assets_}
    assert len(catalogue.newest(directory.wheels)) == 2
    assert names.stem(there.name) != names.stem(linux.name)


def _commit(wheel: Path) -> str:
    with Contents(wheel) as opened:
        assert not opened.record_errors()
        return str(opened.build_info().get("commit") or "")


@pytest.mark.parametrize("python", [*(pytest.param(each, marks=pytest.mark.long) for each in ("3.10", "3.12")), "3.14"])
@pytest.mark.parametrize(("platform", "taken"), [("win_amd64", True), ("manylinux_2_17_x86_64", False)])
def test_installers_that_accept_a_windows_wheel(
    python: str, platform: str, taken: bool, wheel: Path, tmp_path: Path
) -> None:
    options = ["--no-deps", "--no-index", "--only-binary", ":all:", "--find-links", str(wheel.parent)]
    pip = [sys.executable, "-m", "pip", "download", "-q", *options, "--platform", platform, "--python-version", python]
    done = subprocess.run([*pip, "-d", str(tmp_path), "flash_attn"], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == taken, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [NAME] * taken


@pytest.mark.parametrize("python", ["3.10", "3.14"])
def test_uv_takes_the_wheel_of_its_system(python: str, wheel: Path, tmp_path: Path) -> None:
    linux = wheelhouse.write(tmp_path / "both", Universal(flash_attn="2.8.3", python="3.10", backend="ck"))
    shutil.copy(wheel, tmp_path / "both")
    options = ["--dry-run", "--verbose", "--no-deps", "--no-index", "--find-links", str(tmp_path / "both")]
    for platform, name in (("windows", NAME), ("linux", linux.name)):
        system = ["--python-platform", platform, "--python-version", python, "--target", str(tmp_path / "target")]
        command = [packages.uv(), "pip", "install", *options, *system, "flash_attn"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert re.findall(r"Selecting: flash-attn.*\((\S+)\)", done.stderr) == [name]


def test_the_header_of_the_launcher(windows_launcher: Path) -> None:
    """Its checksum, here by the sum modulo 65535, and the protections: addresses of 64 bits, moved, data not run, and
    Control Flow Guard."""
    content = windows_launcher.read_bytes()
    optional = int.from_bytes(content[0x3C:0x40], "little") + 24
    checksum = int.from_bytes(content[optional + 64 : optional + 68], "little")
    rest = content[: optional + 64] + bytes(4) + content[optional + 68 :]
    words = [int.from_bytes(rest[place : place + 2], "little") for place in range(0, len(rest), 2)]
    assert 0 < checksum - len(content) <= 0xFFFF
    assert (checksum - len(content) - sum(words)) % 0xFFFF == 0
    assert int.from_bytes(content[optional + 70 : optional + 72], "little") == 0x20 | 0x40 | 0x100 | 0x4000
    assert pe.with_checksum(content) == content
    with pytest.raises(DataError, match="not a Windows library"):
        pe.with_checksum(b"MZ")


def test_control_flow_guard_knows_the_functions_of_the_launcher(windows_launcher: Path) -> None:
    """Windows checks the target of each call through a pointer against a table, which the linker writes."""
    content = windows_launcher.read_bytes()
    optional = int.from_bytes(content[0x3C:0x40], "little") + 24
    (place,) = (
        match.start() for match in re.finditer(re.escape(struct.pack("<I", _LOAD_CONFIG_BYTES) + bytes(0x6C)), content)
    )
    check, dispatch, table, count, flags = struct.unpack_from("<4QI", content, place + 0x70)
    base = int.from_bytes(content[optional + 24 : optional + 32], "little")
    assert base < check < dispatch
    assert base < table
    assert count > 10
    assert flags & 0x500 == 0x500  # instrumented, and with a table
    directory = optional + 112 + 8 * 10
    assert int.from_bytes(content[directory + 4 : directory + 8], "little") == _LOAD_CONFIG_BYTES


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.8.3", (2, 8, 3, 0)), ("2.7.4.post1", (2, 7, 4, 1)), ("2.8.0.post2", (2, 8, 0, 2))]
)
def test_the_version_resource(version: str, numbers: tuple[int, ...]) -> None:
    """tests/test_wine.py reads it by Windows' own function."""
    content = version_resource.resource(version, {"OriginalFilename": "_launcher.pyd"})
    assert len(content) % 4 == 0
    first, second, third, fourth = numbers
    assert struct.pack("<II4H", 0xFEEF04BD, 0x10000, second, first, fourth, third) in content
    for text in ("FileVersion", "ProductVersion", version, "OriginalFilename", "_launcher.pyd"):
        assert f"{text}\0".encode("utf-16-le") in content
