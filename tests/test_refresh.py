from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from rocm_wheels.errors import DataError, MissingTool
from rocm_wheels.matrix import refresh, versions
from rocm_wheels.paths import ROOT

DIGEST = "sha256:" + "ab" * 32


def texts() -> dict[str, str]:
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in refresh.PINNED}


def test_every_pin_of_a_package_gets_the_same_new_version() -> None:
    asked: list[tuple[str, str]] = []

    def releases(package: str, pinned: str) -> list[str]:
        asked.append((package, pinned))
        return ["9.9.9", "1.0"] if package in ("triton", "tomli", "msgpack") else ["1.0"]

    before = texts()
    fresh, changes = refresh.refreshed(before, releases=releases, digest=lambda *_: DIGEST)
    assert len(asked) == len(set(asked))
    pins = {pin for text in fresh.values() for pin in re.findall(r'"(triton==[^"]+)"', text)}
    assert pins == {"triton==9.9.9"}
    assert 'triton = "9.9.9"' in fresh["rocm_wheels/versions.toml"]
    assert "tomli==9.9.9; python_version" in fresh["pyproject.toml"]
    assert "msgpack==9.9.9" in fresh["wheel_tests/requirements.txt"].splitlines()
    assert "triton 3.7.1 -> 9.9.9" in changes
    data = versions.loads(fresh["rocm_wheels/versions.toml"])
    assert data.compilers["triton"] == "9.9.9"
    assert {str(rocm.image).partition("@")[2] for rocm in data.rocm.values() if rocm.image} == {DIGEST}


def test_nothing_newer_changes_nothing() -> None:
    """An older Python, or an index that lags behind, only sees older releases: no pin goes back to them."""
    pinned, changes = refresh.refreshed(texts(), releases=lambda *_: ["0.0.1"], digest=lambda *_: DIGEST)
    assert not [change for change in changes if "sha256" not in change]
    again, changes = refresh.refreshed(pinned, releases=lambda *_: [], digest=lambda *_: DIGEST)
    assert again == pinned
    assert changes == []


def test_a_package_with_two_versions_keeps_both() -> None:
    before = {"pyproject.toml": 'old = ["a==1.0", "b==4.57.6"]\nnew = ["a==1.0", "b==5.9.0"]\n'}
    there = {"a": ["1.0", "2.0"], "b": ["4.9.0", "4.57.6", "4.58.0", "5.9.0", "5.10.0", "6.0.0"]}
    fresh, changes = refresh.refreshed(before, releases=lambda name, _: there[name], digest=lambda *_: DIGEST)
    assert fresh == {"pyproject.toml": 'old = ["a==2.0", "b==4.58.0"]\nnew = ["a==2.0", "b==5.10.0"]\n'}
    assert changes == ["a 1.0 -> 2.0", "b 4.57.6 -> 4.58.0", "b 5.9.0 -> 5.10.0"]


def test_a_failure_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = texts()

    def fails(repository: str, tag: str) -> str:
        raise DataError(f"docker gave no digest of {repository}:{tag}")

    monkeypatch.setattr(refresh, "releases_of", lambda *_: ["9.9.9"])
    monkeypatch.setattr(refresh, "image_digest", fails)
    with pytest.raises(DataError, match="docker gave no digest of rocm/pytorch:rocm6"):
        refresh.run()
    assert texts() == before


def test_a_dry_run_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = texts()
    monkeypatch.setattr(refresh, "releases_of", lambda *_: ["9.9.9"])
    monkeypatch.setattr(refresh, "image_digest", lambda *_: DIGEST)
    assert f"rocm/pytorch:rocm6.1_ubuntu22.04_py3.10_pytorch_2.1.2 without a digest -> {DIGEST}" in refresh.run(
        dry_run=True
    )
    assert texts() == before


# What buildx prints for an image; until 2026 it ignores `--format "{{.Manifest.Digest}}"`.
INSPECTED = (
    """Name:      docker.io/rocm/pytorch:tag
MediaType: application/vnd.oci.image.index.v1+json
Digest:    %s

Manifests:
  Name:      docker.io/rocm/pytorch:tag@sha256:"""
    + 64 * "1"
)


@pytest.mark.parametrize(
    ("said", "status", "good"), [(INSPECTED % DIGEST, 0, True), (INSPECTED % "sha256:12", 0, False), ("", 1, False)]
)
def test_the_digest_comes_from_docker(
    said: str, status: int, good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\n[ "$4" = "rocm/pytorch:tag" ] && echo "{said}"\nexit {status}\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if good:
        assert refresh.image_digest("rocm/pytorch", "tag") == DIGEST
    else:
        with pytest.raises(DataError, match="docker gave no digest of rocm/pytorch:tag"):
            refresh.image_digest("rocm/pytorch", "tag")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingTool, match="no docker on PATH"):
        refresh.image_digest("rocm/pytorch", "tag")


def test_the_releases_come_from_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Python 3.10, for which triton 3.9 has none, but where the pin has none itself, as numpy 2.4.6."""
    calls: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if "nothing" in command:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution")
        oldest = "--python-version=3.10" in command
        versions = '["3.8.0", "3.7.1"]' if oldest else '["3.9.0", "3.8.0", "3.7.1"]'
        return subprocess.CompletedProcess(command, 0, f'{{"name": "triton", "versions": {versions}}}', "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert refresh.releases_of("triton", "3.7.1") == ["3.8.0", "3.7.1"]
    assert calls[0][1:5] == ["-m", "pip", "index", "versions"]
    assert calls[0][-4:] == ["triton", "--uploaded-prior-to", "P7D", "--python-version=3.10"], "a cooldown for releases"
    assert refresh.releases_of("triton", "3.9.0") == ["3.9.0", "3.8.0", "3.7.1"]
    with pytest.raises(DataError, match="pip knows no version of nothing: ERROR: No matching"):
        refresh.releases_of("nothing", "1.0")
