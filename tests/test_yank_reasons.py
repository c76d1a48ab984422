"""`yank --reason` with any text: yanked.toml stays valid, and a reason that does not fit in a line is refused."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

from rocm_wheels import cli
from rocm_wheels.errors import DataError
from rocm_wheels.publish import yanks

WHEEL = "flash_attn-2.8.3+rocm62torch2.5-cp311-cp311-manylinux_2_17_x86_64.whl"
OTHER = WHEEL.replace("2.8.3", "2.7.4")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "yanked.toml"
    shutil.copy(yanks.DATA_FILE, path)
    yanks.mark(OTHER, "dQ is wrong", path)
    return path


@pytest.mark.parametrize(
    "reason",
    [
        "\U0001f4a5 dQ",
        "\U0001f469\u200d\U0001f4bb",
        "a \"b\" \\ 'c'",
        "a = [b]  # c",
        "\u00fc\u6f22",
        "'''",
        '"""',
        "x" * 300,
    ],
)
def test_a_line_of_text_is_kept(file: Path, reason: str) -> None:
    yanks.mark(WHEEL, reason, file)
    assert yanks.load(file) == {OTHER: "dQ is wrong", WHEEL: reason}
    yanks.mark(WHEEL, None, file)
    assert yanks.load(file) == {OTHER: "dQ is wrong"}


@pytest.mark.parametrize(
    "reason", ["", "  ", "a\nb", "a\r", "\x00", "\x1b[31m", "\x7f", "\ud800", "\u202ea", "\u2028", "\ufeff", "x" * 301]
)
def test_a_reason_that_cannot_be_shown_is_refused(file: Path, reason: str) -> None:
    before = file.read_bytes()
    with pytest.raises(DataError, match="the reason") as caught:
        yanks.mark(WHEEL, reason, file)
    assert "--reason" in caught.value.remedy
    str(caught.value).encode()
    assert file.read_bytes() == before


def test_any_text_leaves_the_file_readable(file: Path) -> None:
    chance = random.Random(0)
    kept = 0
    for _ in range(500):
        top = chance.choice([0x7F, 0x2FF, 0xFFFF, sys.maxunicode])
        reason = "".join(chr(chance.randint(0, top)) for _ in range(chance.randint(1, 4)))
        try:
            yanks.mark(WHEEL, reason, file)
        except DataError as error:
            str(error).encode()
            continue
        kept += 1
        assert yanks.load(file)[WHEEL] == reason
        assert yanks.load(file)[OTHER] == "dQ is wrong"
    assert kept > 50


def test_the_command_says_what_is_wrong(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yanks.mark, "__defaults__", (file,))
    assert cli.main(["yank", WHEEL, "--reason", "a\nb"]) == DataError.exit_code
    assert capsys.readouterr().err.startswith("error: the reason 'a\\nb' holds characters")


@pytest.mark.parametrize("content", [b"\xff", b"[wheels]\na = 1\n", b"wheels = 1\n", b"[wheels\n", b"[other]\n"])
def test_a_file_of_another_form_is_an_error_of_ours(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "yanked.toml"
    path.write_bytes(content)
    with pytest.raises(DataError):
        yanks.load(path)
