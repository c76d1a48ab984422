"""The lock of the Composable Kernel headers and the patches to them."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_wheels.compile.ck import sources as ck_sources
from rocm_wheels.compile.ck.sources import Fix
from rocm_wheels.errors import DataError, MissingTool

FIX = Fix(file="a/b.hpp", why="it is wrong", find="old();", put="new();")


@pytest.fixture
def header(tmp_path: Path) -> Path:
    path = tmp_path / FIX.file
    path.parent.mkdir()
    return path


def test_a_fix_replaces_its_anchor(header: Path, tmp_path: Path) -> None:
    header.write_text("before\nold();\nafter\n")
    ck_sources.apply([FIX], tmp_path)
    assert header.read_text() == "before\nnew();\nafter\n"


@pytest.mark.parametrize(("text", "times"), [("nothing", 0), ("old(); old();", 2)])
def test_an_anchor_that_is_gone_or_ambiguous_is_an_error(header: Path, tmp_path: Path, text: str, times: int) -> None:
    header.write_text(text)
    with pytest.raises(DataError, match=f"occurs {times} times in a/b.hpp, not once: it is wrong") as caught:
        ck_sources.apply([FIX], tmp_path)
    assert "another revision" in caught.value.remedy
    assert header.read_text() == text


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="occurs 0 times"):
        ck_sources.apply([FIX], tmp_path)


def test_every_fix_has_a_reason_and_changes_something() -> None:
    source = ck_sources.load()
    assert len(source.fixes) == 21
    for fix in source.fixes:
        assert len(fix.why) > 40
        assert fix.find != fix.put
        assert fix.file.startswith("ck_tile/")


def test_the_key_changes_with_the_archive_and_with_a_fix() -> None:
    source = ck_sources.load()
    others = [
        replace(source, sha256="0" * 64),
        replace(source, fixes=source.fixes[1:]),
        replace(source, fixes=(*source.fixes, FIX)),
    ]
    assert len({source.key, *(other.key for other in others)}) == 4


def test_an_archive_of_another_digest_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(command: list[str], **_: object) -> object:
        output = Path(command[command.index("--dest") + 1])
        output.mkdir()
        (output / "flash_attn-2.8.3.tar.gz").write_bytes(b"something else")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(DataError, match=r"flash_attn-2\.8\.3\.tar\.gz has sha256 [0-9a-f]{64}, .* wants 1e71dd64"):
        ck_sources.headers(tmp_path)
    assert not list((tmp_path / "composable_kernel").iterdir())


def test_the_output_of_pip_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = type("Done", (), {"returncode": 1, "stderr": "ERROR: no index"})
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(MissingTool, match=r"could not fetch flash-attn==2\.8\.3.*\nERROR: no index"):
        ck_sources.headers(tmp_path)
