"""The verbs that the workflows and cibuildwheel call: repair, verify, compile --backend, build's cache."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import IO

import pytest
from fake_parts import library, plan, store

from rocm_wheels import cli
from rocm_wheels.compile import kernels, units
from rocm_wheels.errors import CompileFailed, DataError, VerifyFailed
from rocm_wheels.matrix.plan import Plan
from rocm_wheels.wheel import assemble, build, contents, verdict, verify
from rocm_wheels.wheel.verdict import Stage, Verdict


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the parts of fake_parts, before its repair."""
    directory = tmp_path_factory.mktemp("built")
    launcher = library(directory / "launcher.so", "int x(void) { return 1; }")
    stores = {target: store(directory, target) for target in ("gfx90a", "gfx942")}
    return assemble.assemble(plan("gfx90a", "gfx942"), stores, launcher, directory / "dist")


def test_the_wheel_holds_its_bill_of_materials(built: Path) -> None:
    with zipfile.ZipFile(built) as archive:
        (bill,) = (name for name in archive.namelist() if "/sboms/" in name)
        result = json.loads(archive.read(bill))["metadata"]
        metadata = archive.read("flash_attn-2.8.3+rocm62torch2.5triton.dist-info/METADATA").decode()
        info = json.loads(archive.read("flash_attn/_build_info.json"))
    assert bill == "flash_attn-2.8.3+rocm62torch2.5triton.dist-info/sboms/flash_attn.cdx.json"
    assert f"License-Expression: {result['component']['licenses'][0]['expression']}\n" in metadata
    commits = [each["value"] for each in result["component"].get("properties", ()) if each["name"] == "commit"]
    assert commits == ([info["commit"]] if info["commit"] else [])
    assert result["timestamp"] == "1980-01-01T00:00:00Z"


def test_a_wheel_of_another_commit_and_time_has_the_same_contents(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SBOM and build info name the commit, so the bytes differ. It is not published again."""
    launcher = library(tmp_path / "launcher.so", "int x(void) { return 1; }")
    stores = {target: store(tmp_path, target) for target in ("gfx90a", "gfx942")}
    monkeypatch.setattr(assemble, "commit", lambda _: "d" * 40)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    other = assemble.assemble(plan("gfx90a", "gfx942"), stores, launcher, tmp_path / "dist")
    assert contents.file_sha256(other) != contents.file_sha256(built)
    assert contents.read(other).contents == contents.read(built).contents


def test_the_plan_of_a_finished_wheel(built: Path, tmp_path: Path) -> None:
    result = build.plan_of(built)
    assert result.cell == plan("gfx942").cell
    assert result.targets == ("gfx90a", "gfx942")
    with pytest.raises(DataError, match="is not one of these wheels"):
        build.plan_of(tmp_path / "numpy-2.0.0-cp311-cp311-linux_x86_64.whl")


def test_repair_prints_where_the_wheel_is(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["repair", str(built), "--output", str(tmp_path)]) == 0
    (repaired,) = tmp_path.glob("*.whl")
    assert capsys.readouterr().out == f"{repaired}\n"
    assert "manylinux_2_17_x86_64" in repaired.name
    with zipfile.ZipFile(repaired) as archive:
        (bill,) = (name for name in archive.namelist() if name.endswith("/sboms/flash_attn.cdx.json"))
        for part in json.loads(archive.read(bill))["components"]:
            if part["type"] == "file":
                assert part["hashes"][0]["content"] == hashlib.sha256(archive.read(part["name"])).hexdigest()


def test_verify_checks_the_path_of_the_verdict_first(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tempfile.TemporaryFile

    def only_the_cache(*, dir: Path) -> IO[bytes]:  # noqa: A002
        if dir != tmp_path:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", only_the_cache)
    monkeypatch.setattr(verify, "verify_all", None)
    assert cli.main(["verify", str(built), "--cache", str(tmp_path)]) == 10
    message = f"the directory of the wheel, for its verdict, {built.parent} cannot be written: Read-only file system"
    assert capsys.readouterr().err == f"error: {message}\nCopy the wheel to a directory that can.\n"


@pytest.mark.parametrize(
    ("status", "require", "passes"),
    [("passed", True, True), ("not run: no GPU", False, True), ("not run: no GPU", True, False)],
)
def test_verify_again(
    built: Path,
    status: str,
    require: bool,
    passes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans: list[Plan] = []

    def verified(
        wheels: list[tuple[Path, Plan, list[Path]]], work: Path, *, require_gpu: bool, every: bool, one_torch: bool
    ) -> list[Verdict]:
        ((path, planned, beside),) = wheels
        assert (path, beside, require_gpu, every, one_torch) == (built, [], require, False, False)
        assert work.is_dir()
        plans.append(planned)
        return [Verdict(
            wheel=path.name,
            sha256="0" * 64,
            size=1,
            contents="0" * 64,
            commit="",
            cell={},
            targets=planned.targets,
            torch_source="a test",
            python="3.11.9",
            platform="linux",
            stages={name: Stage(status=verdict.PASSED) for name in verdict.STAGES}
            | {verdict.GPU: Stage(status=status)},
            tests={},
            failures=(),
        )]  # fmt: skip

    monkeypatch.setattr(verify, "verify_all", verified)
    arguments = ["verify", str(built), "--cache", str(tmp_path / "cache"), *(["--require-gpu"] if require else [])]
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    assert plans[0].targets == ("gfx90a", "gfx942")
    if passes:
        assert code == 0
        assert "passed" in out
    else:
        assert code == VerifyFailed.exit_code
        assert f"{built.name} was not tested on a GPU: not run: no GPU\nGive the job its GPU" in err


def test_a_kernel_that_the_cache_lacks_is_not_compiled_but_named(tmp_path: Path) -> None:
    expected = units.find(["gfx942"])
    with pytest.raises(CompileFailed) as caught:
        kernels.require_cached(["gfx942"], cache=tmp_path)
    assert caught.value.message == (
        f"{len(expected)} kernels are not in the cache {tmp_path}: first {expected[0].name} for gfx942"
    )
    assert "leave --cached-kernels out" in caught.value.remedy


def test_kernels_of_an_unknown_backend(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["compile", "--target", "gfx942", "--cache", str(tmp_path), "--backend"]
    assert cli.main([*command, "cuda"]) == 2
    assert "backend 'cuda' is not known" in capsys.readouterr().err
