from __future__ import annotations

from pathlib import Path

import pytest

from rocm_wheels import cli
from rocm_wheels.artifacts import merge
from rocm_wheels.errors import DataError


def write(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def test_artifacts_come_into_one_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "from/one", ab__kernel="1", both="same")
    write(tmp_path / "from/two", ab__other="2", both="same")
    into = write(tmp_path / "into", both="same", older="0")
    assert cli.main(["merge", str(tmp_path / "from"), str(into)]) == 0
    assert {path.relative_to(into).as_posix(): path.read_text() for path in into.rglob("*") if path.is_file()} == {
        "ab/kernel": "1",
        "ab/other": "2",
        "both": "same",
        "older": "0",
    }
    assert capsys.readouterr().out == f"{into}: 3 files of 2 artifacts\n"


@pytest.mark.parametrize("where", ["another artifact", "the target"])
def test_a_file_is_never_replaced_by_another_content(tmp_path: Path, where: str) -> None:
    sources = [write(tmp_path / "one", wheel="here", fine="1")]
    if where == "the target":
        write(tmp_path / "into", wheel="othr")
    else:
        sources.append(write(tmp_path / "two", wheel="othr"))
    with pytest.raises(DataError, match="have one name and different contents"):
        merge(sources, tmp_path / "into")
    assert not (tmp_path / "into/fine").exists(), "nothing is moved before all is checked"


def test_a_link_is_refused(tmp_path: Path) -> None:
    (write(tmp_path / "one", a="1") / "link").symlink_to("/etc/hostname")
    with pytest.raises(DataError, match="link is no regular file"):
        merge([tmp_path / "one"], tmp_path / "into")
    with pytest.raises(DataError, match="is not a directory"):
        merge([tmp_path / "none"], tmp_path / "into")
    assert cli.main(["merge", str(tmp_path / "none"), str(tmp_path / "into")]) == 0, "no artifact came"


@pytest.mark.parametrize("which", ["an artifact", "the source", "the target", "in the target", "in a directory"])
def test_links_are_refused_wherever_they_are(tmp_path: Path, which: str) -> None:
    """Nothing is read and nothing is written through a link."""
    outside = write(tmp_path / "outside", ab__kernel="0")
    source, target = write(tmp_path / "from", one__ab__kernel="1"), tmp_path / "into"
    if which == "an artifact":
        (source / "two").symlink_to(outside)
    elif which == "the source":
        (tmp_path / "link").symlink_to(source)
        source = tmp_path / "link"
    elif which == "the target":
        target.symlink_to(outside)
    elif which == "in the target":
        target.mkdir()
        (target / "ab").symlink_to(outside / "ab")
    else:
        (source / "one/cd").symlink_to(outside)
    assert cli.main(["merge", str(source), str(target)]) == DataError("").exit_code
    assert (outside / "ab/kernel").read_text() == "0"
    assert (tmp_path / "from/one/ab/kernel").is_file(), "nothing is moved"


def test_a_file_next_to_the_artifacts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single artifact without a directory of its name leaves such a file."""
    write(tmp_path / "from", one__a="1", loose="2")
    assert cli.main(["merge", str(tmp_path / "from"), str(tmp_path / "into")]) != 0
    assert "files outside of an artifact's directory: loose" in capsys.readouterr().err
    assert not (tmp_path / "into").exists()


def test_artifacts_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "from", one__a="1")
    words = ["merge", str(tmp_path / "from"), str(tmp_path / "into"), "--count"]
    assert cli.main([*words, "2"]) != 0
    assert "holds 1 artifacts, 2 were built" in capsys.readouterr().err
    assert cli.main([*words, "1"]) == 0
    assert cli.main(["merge", str(tmp_path / "none"), str(tmp_path / "into"), "--count", "0"]) == 0


def test_a_file_and_a_directory_of_one_name_are_refused(tmp_path: Path) -> None:
    sources = [write(tmp_path / "one", ab="1"), write(tmp_path / "two", ab__c="2")]
    with pytest.raises(DataError, match=r"is a file, .* a directory"):
        merge(sources, tmp_path / "into")
    assert not (tmp_path / "into").exists()
    with pytest.raises(DataError, match="is no regular"):
        merge([sources[1]], write(tmp_path / "other", ab="1"))


@pytest.mark.parametrize("other", ["AB", "Deep__x", "deep__X"])
def test_paths_that_differ_only_by_case_are_refused(tmp_path: Path, other: str) -> None:
    """On Windows and macOS they are one file: the later one would replace the earlier one."""
    first = write(tmp_path / "one", ab="1", deep__x="2")
    second = write(tmp_path / "two", **{other: "3"})
    with pytest.raises(DataError, match="differ only by case"):
        merge([first, second], tmp_path / "into")
    with pytest.raises(DataError, match="differ only by case"):
        merge([second], first)
    assert not (tmp_path / "into").exists()
    assert merge([write(tmp_path / "three", deep__y="4")], first) == 1, "the same directory again"
