"""What depends on the operating system: the rows of both systems, and the files that flash_attn keeps."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
from flash_attn.core import files
from flash_attn.core.platform import PLATFORM
from flash_attn.core.platform.linux import Linux
from flash_attn.core.platform.windows import Windows


@pytest.mark.parametrize(
    ("platform", "variable", "home"),
    [(Linux(), "XDG_CACHE_HOME", ".cache"), (Windows(), "LOCALAPPDATA", "AppData/Local")],
)
def test_where_caches_lie(platform: Linux | Windows, variable: str, home: str) -> None:
    assert platform.cache_directory({variable: "/mine"}) == Path("/mine/flash_attn")
    assert platform.cache_directory({}) == platform.cache_directory({variable: ""}) == Path.home() / home / "flash_attn"


def test_wsl_has_another_device_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_attn.core.platform.linux._WSL_GPU", tmp_path / "dxg")
    assert (Linux().has_kfd, Windows().has_kfd) == (True, False)
    (tmp_path / "dxg").touch()
    assert not Linux().has_kfd


def test_the_names_of_gpu_runtimes() -> None:
    linux = ["/a/libamdhip64.so.6", "/a b/libcuda.so.1", "/libcuda.so/libc.so"]
    assert [Linux().is_gpu_library(path) for path in linux] == [True, True, False]
    windows = [r"C:\t b\bin\amdhip64_7.dll", r"C:\Windows\System32\nvcuda.dll", r"D:\amdhip64\python312.dll"]
    assert [Windows().is_gpu_library(path) for path in windows] == [True, True, False]
    assert (Linux().hip_library, Windows().hip_library) == ("libamdhip64", "amdhip64")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps is Linux's")
def test_the_gpu_runtimes_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "my torch" / "libamdhip64.so.6", tmp_path / "libamdhip64.so"
    real.parent.mkdir()
    real.touch()
    maps = tmp_path / "maps"
    link.symlink_to(real)
    maps.write_text("".join(f"7f00-7f01 r-xp 0 00:00 1   {path}\n" for path in (real, link, "/lib/libc.so.6", "")))
    monkeypatch.setattr("flash_attn.core.platform.linux._MAPS", maps)
    assert PLATFORM.libraries() == [str(real)]


@pytest.mark.skipif(sys.platform != "linux", reason="rocjitsu runs on Linux alone")
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/env/_rocm_sdk_devel/lib/librocjitsu.so", "rocjitsu"),
        ("/my sdk/librocjitsu_kmd.so", "rocjitsu"),
        ("/lib/libc.so.6", ""),
    ],
)
def test_the_emulator_of_this_process(path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "maps").write_text(f"7f00-7f01 r-xp 0 00:00 1   {path}\n")
    monkeypatch.setattr("flash_attn.core.platform.linux._MAPS", tmp_path / "maps")
    assert (PLATFORM.emulator(), Windows().emulator()) == (name, "")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "rows.json"
    files.write_whole(path, "old \N{GREEK SMALL LETTER ALPHA}")

    def refuse(*_: object) -> None:
        raise PermissionError("open elsewhere")

    monkeypatch.setattr(type(PLATFORM), "replace", refuse)
    with pytest.raises(PermissionError, match="open elsewhere"):
        files.write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "old \N{GREEK SMALL LETTER ALPHA}"
    assert list(path.parent.iterdir()) == [path]


def test_windows_waits_for_the_readers_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses to replace an open file. The reader here closes it after some tries."""
    source, target = tmp_path / "a", tmp_path / "b"
    source.touch()
    opened, original = threading.Event(), Path.replace
    opened.set()

    def replace(self: Path, to: Path) -> Path:
        if opened.is_set():
            raise PermissionError(13, "open")
        return original(self, to)

    monkeypatch.setattr(Path, "replace", replace)
    threading.Timer(0.1, opened.clear).start()
    Windows().replace(source, target)
    assert target.exists()

    opened.set()
    monkeypatch.setattr("flash_attn.core.platform.windows._HELD_SECONDS", 0.1)
    started = time.monotonic()
    with pytest.raises(PermissionError):
        Windows().replace(target, source)
    assert time.monotonic() - started < 5
    assert target.exists()
