from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import fake_parts
import pytest
import wheelhouse
from fake_github import Hub
from publishing import publish, state

from rocm_wheels.errors import DataError, PublishFailed
from rocm_wheels.matrix.cells import Universal
from rocm_wheels.publish import assets

CELL = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
UNIVERSAL = Universal(flash_attn="2.8.3", python="3.10", backend="ck")


def test_a_wheel_comes_after_its_interface(tmp_path: Path) -> None:
    """A release that is killed at any upload never has a wheel without the files that belong to it."""
    wheel, fa3 = wheelhouse.write_with_fa3(tmp_path, CELL)
    order = [asset.name for asset in assets.collect(tmp_path)[1]]
    own = [f"{wheel.name}.metadata", f"{wheel.name}.verdict.json", wheel.name]
    assert order == [f"{fa3.name}.metadata", fa3.name, *own]


def test_kernel_stores_and_the_crate_go_along(tmp_path: Path) -> None:
    store, crate = fake_parts.store(tmp_path, "gfx942"), fake_parts.crate(tmp_path, wheelhouse.COMMIT)
    wheelhouse.write(tmp_path, CELL, stores=[store])
    names = [crate.name, store.name]
    result = {asset.name: asset for asset in assets.collect(tmp_path)[1]}
    assert [name for name in result if name in names] == names
    assert result[names[0]].content_type == "application/gzip"


def _unverified(path: Path) -> None:
    wheelhouse.write(path, CELL)
    next(path.glob("*.verdict.json")).unlink()


def _other_bytes(path: Path) -> None:
    with wheelhouse.write(path, CELL).open("ab") as file:
        file.write(b"more")


def _stray(path: Path) -> None:
    wheelhouse.write(path, CELL)
    (path / "notes.txt").write_text("x")


def _renamed(path: Path) -> None:
    wheelhouse.write(path, CELL)
    (path / "kernels of gfx942.zip").write_bytes(b"x")


def _too_large(path: Path) -> None:
    wheelhouse.write(path, CELL)
    (path / "kernels.zip").touch()


def _failed(path: Path) -> None:
    wheelhouse.write(path, CELL, ok=False)


def _unrepaired(path: Path) -> None:
    wheelhouse.write(path, CELL, platform="linux_x86_64")


def _for_nvidia(path: Path) -> None:
    wheelhouse.write(path, CELL, targets=("gfx942", "sm_90"), device=wheelhouse.H200)


def _edited_targets(path: Path) -> None:
    """A wheel for sm_90, whose test report was edited to name AMD GPUs."""
    wheel = wheelhouse.write(path, CELL, targets=("sm_90",))
    wheelhouse.write_verdict(wheel, targets=("gfx942",))


def _other_wheels_verdict(path: Path) -> None:
    wheel = wheelhouse.write(path, CELL)
    verdict = wheel.with_name(f"{wheel.name}.verdict.json")
    verdict.write_text(verdict.read_text().replace("cp311", "cp312"))


def _other_contents(path: Path) -> None:
    wheel = wheelhouse.write(path, CELL)
    verdict = wheel.with_name(f"{wheel.name}.verdict.json")
    content = json.loads(verdict.read_text())
    verdict.write_text(json.dumps({**content, "contents": "0" * 64}))


def _for_windows(path: Path) -> None:
    wheelhouse.write(path, CELL, platform="win_amd64")


def _without_a_launcher(path: Path) -> None:
    wheelhouse.write(path, UNIVERSAL, platform="win_amd64")


def _without_record(path: Path) -> None:
    """A wheel with a member that RECORD does not list, as if somebody had added it later."""
    wheel = wheelhouse.write(path, CELL)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("flash_attn/evil.py", "import os")
    wheelhouse.write_verdict(wheel)


def _other_metadata(path: Path) -> None:
    wheel = wheelhouse.write(path, CELL)
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content.replace(b"Name: flash_attn", b"Name: other"))
    wheelhouse.write_verdict(wheel)


def _link(path: Path) -> None:
    wheelhouse.write(path, CELL)
    (path / "kernels.zip").symlink_to("/etc/passwd")


def _bomb(path: Path) -> None:
    """A METADATA of a gigabyte in a wheel of a megabyte."""
    wheel = wheelhouse.write(path, CELL)
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content + bytes(1 << 26) if name.endswith("METADATA") else content)
    wheelhouse.write_verdict(wheel)


def _foreign(path: Path) -> None:
    (path / "einops-0.8.2-py3-none-any.whl").write_bytes(b"x")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path.rmdir(), "is not a directory\nGive --dist"),
        (lambda path: None, "holds no wheel\nBuild one"),  # noqa: ARG005
        (_unverified, "has no verdict"),
        (_other_bytes, "_x86_64.whl is about another file of that name\nBuild it again."),
        (_stray, "holds what is no part of a release: notes.txt"),
        (_renamed, "GitHub would rename 'kernels of gfx942.zip'"),
        (_too_large, "kernels.zip has 0 bytes, an asset has 1 to 2147483647"),
        (_failed, "did not pass its tests"),
        (_unrepaired, "is not repaired: it is for linux_x86_64"),
        (_for_windows, "is for one torch: for Windows there is the universal wheel alone"),
        (_without_a_launcher, "has the libraries none, not flash_attn/_launcher.pyd alone"),
        (_edited_targets, "is for sm_90: wheels for NVIDIA GPUs are never published"),
        (_other_wheels_verdict, "the file name in its verdict"),
        (_other_contents, "the contents in its verdict"),
        (_without_record, "is wrong: flash_attn/evil.py is not listed"),
        (_other_metadata, "is of other"),
        (_link, "holds what is no regular file: kernels.zip"),
        (_bomb, "METADATA has more than 1048576 bytes"),
        (_for_nvidia, "is for sm_90: wheels for NVIDIA GPUs are never published\nBuild it for AMD GPUs alone"),
        (_foreign, "has no verdict"),
    ],
)
def test_invalid_files_are_refused_before_anything_is_uploaded(
    hub: Hub, tmp_path: Path, prepare: Any, message: str
) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    prepare(dist)
    with pytest.raises((PublishFailed, DataError)) as caught:
        publish(hub, dist)
    assert message in str(caught.value)
    assert hub.requests == 0


def test_size_gate_is_two_gibibytes(dist: Path, tmp_path: Path) -> None:
    for path in dist.iterdir():
        (tmp_path / path.name).symlink_to(path)
    large = tmp_path / "large.zip"
    with large.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(PublishFailed, match=r"large\.zip has 2147483648 bytes, an asset has 1 to 2147483647"):
        assets._check_limits(
            [assets.Asset(name=large.name, size=large.stat().st_size, sha256="", content=large, final=False)]
        )


def test_a_release_that_would_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, hub: Hub, dist: Path) -> None:
    monkeypatch.setattr(assets, "MAX_ASSETS", 10)
    with pytest.raises(PublishFailed, match="11 assets do not fit: a release holds 10\nPublish them under two tags"):
        publish(hub, dist)
    assert hub.requests == 0


def test_files_already_in_the_release_count(
    monkeypatch: pytest.MonkeyPatch, hub: Hub, dist: Path, tmp_path: Path
) -> None:
    publish(hub, dist)
    before = state(hub)
    monkeypatch.setattr(assets, "MAX_ASSETS", 14)
    publish(hub, dist)  # nothing is added
    wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.14.0 7.2"))
    with pytest.raises(PublishFailed, match="15 assets do not fit: a release holds 14"):
        publish(hub, tmp_path)
    assert state(hub) == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gfx942.zip", None, "is in none of the wheels, so nothing says which build made it"),
        ("gfx942.zip", b"PK", "is no kernel store"),
        ("gfx90a.zip", None, "is for gfx942"),
        ("kernels-triton-gfx942.zip", None, "is in none of the wheels"),
        ("sm_90.zip", None, "kernels for NVIDIA GPUs are never published"),
        ("more.zip", None, "is no name of a kernel store"),
    ],
)
def test_a_zip_is_published_if_a_wheel_of_the_release_holds_it(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    own = fake_parts.store(tmp_path / "own", "gfx942")
    wheelhouse.write(tmp_path / "dist", CELL, stores=[own])
    other = fake_parts.store(tmp_path / "other", "gfx942", kernel_name="another")
    (tmp_path / "dist" / name).write_bytes(content if content is not None else other.read_bytes())
    with pytest.raises((PublishFailed, DataError), match=message) as error:
        assets.collect(tmp_path / "dist")
    assert error.value.remedy or "NVIDIA" in message


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, None),
        ({".cargo_vcs_info.json": None}, "names no commit"),
        ({".cargo_vcs_info.json": "[]"}, r"\.cargo_vcs_info\.json: it: list of 0 is no object"),
        ({".cargo_vcs_info.json": "{"}, "is not JSON"),
        ({".cargo_vcs_info.json": '{"git": {"sha1": "' + 40 * "d" + '"}}'}, f"was packed at commit {40 * 'd'}"),
        ({".cargo_vcs_info.json": json.dumps({"git": {"sha1": wheelhouse.COMMIT, "dirty": True}})}, "not committed"),
        ({"Cargo.toml": None}, "has 0 manifests"),
        ({"/etc/x": "x"}, "which is no file of the crate"),
        ({"../x": "x"}, "which is no file of the crate"),
    ],
)
def test_the_crate_must_be_built_from_the_commit(tmp_path: Path, files: dict[str, Any], message: str | None) -> None:
    wheelhouse.write(tmp_path, CELL)
    crate = fake_parts.crate(tmp_path, wheelhouse.COMMIT, **files)
    if message is None:
        assert crate.name in {asset.name for asset in assets.collect(tmp_path, commit=wheelhouse.COMMIT)[1]}
        crate = crate.rename(tmp_path / "other.crate")
        message = "is no name of the crate"
    with pytest.raises((PublishFailed, DataError), match=message):
        assets.collect(tmp_path, commit=wheelhouse.COMMIT)


def test_a_file_that_is_no_crate(tmp_path: Path) -> None:
    wheelhouse.write(tmp_path, CELL)
    for content in (b"x", gzip.compress(b"x" * 2000), gzip.compress(b"")[:-4]):
        (tmp_path / "candle-flash-rocm-0.1.0.crate").write_bytes(content)
        with pytest.raises(PublishFailed, match=r"is no crate|has 0 manifests"):
            assets.collect(tmp_path)
