"""What pip and uv install after a bad wheel was yanked, withdrawn, or replaced by a backport, a new build or a post
release.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import wheelhouse
from installing import Site, call, empty, install, served
from sites import HOME
from uv import find_uv_bin

from rocm_wheels import cli
from rocm_wheels.errors import DataError
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import universal
from rocm_wheels.matrix.names import build_number
from rocm_wheels.publish import catalogue, index, notes, yanks
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.wheel import contents

INSTALLERS = ("pip", "uv")
REASON = "dQ is wrong with ALiBi on gfx90a"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "www").mkdir()
    with served(tmp_path / "www") as site:
        yield site


Publish = Callable[..., Catalogue]


@pytest.fixture
def publish(serve: Site) -> Publish:
    """Releases as GitHub lists them (tag -> build number of the universal wheel), and the site of them."""
    files = serve.root / "files"

    def publish(
        releases: Mapping[str, int], *, yanked: Sequence[int] = (), withdrawn: Sequence[int] = (), lost: int = -1
    ) -> Catalogue:
        listed: list[dict[str, Any]] = []
        for tag, build in releases.items():
            claim = universal(versions.load(), "2.8.3")
            wheel = wheelhouse.write(files, claim, build=build, payload=f"build = {build}\n")
            metadata = wheel.with_name(wheel.name + ".metadata")
            metadata.write_bytes(contents.read(wheel).metadata)
            beside = [metadata] if build == lost else [metadata, wheel.with_name(wheel.name + ".verdict.json")]
            listed.append({"tag_name": tag, "id": len(listed), "assets": [asset(path) for path in (wheel, *beside)]})
        names = {build_number(path.name): path.name for path in files.glob("*.whl")}
        result = catalogue.from_releases(
            listed,
            lambda one: (files / one["name"]).read_bytes(),
            {names[build]: REASON for build in yanked},
            {names[build]: REASON for build in withdrawn},
        )
        home = replace(HOME, url=serve.url)
        index.build(result, serve.root / "site", versions=versions.load(), home=home)
        return result

    def asset(path: Path) -> dict[str, Any]:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        url = f"{serve.url}files/{quote(path.name, safe='')}"
        size = path.stat().st_size
        return {
            "name": path.name,
            "state": "uploaded",
            "digest": f"sha256:{digest}",
            "size": size,
            "browser_download_url": url,
        }

    return publish


def installed_build(installer: str, directory: Path, site: Site, requirement: str) -> int | None:
    """The build number of the wheel that the installer selects, None if it finds none."""
    python = empty(directory)
    simple = f"{site.url}site/simple/"
    done = install(installer, python, directory, "--no-deps", "--index-url", simple, requirement)
    if done.returncode != 0:
        return None
    code = "import flash_attn; print(flash_attn.build)"
    return int(subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout)


# (what happened, releases, yanked builds, withdrawn builds, build by pip, build by uv), for an exact pin
CASES: list[tuple[str, dict[str, int], list[int], list[int], int | None, int | None]] = [
    ("a new build", {"v1.0.0": 0, "v1.1.0": 1}, [], [], 1, 1),
    ("a post release", {"v1.0.0": 0, "v1.1.0": 1, "v1.1.0.post1": 2}, [], [], 2, 2),
    ("a backport", {"v1.0.0": 0, "v1.1.0": 1, "v1.0.1": 2}, [], [], 1, 1),
    ("a backport beside a post release", {"v1.0.0": 0, "v1.1.0": 1, "v1.1.0.post1": 2, "v1.0.1": 3}, [], [], 2, 2),
    ("a yank", {"v1.0.0": 0, "v1.1.0": 1}, [1], [], 0, 1),
    ("a yank, then a new build", {"v1.0.0": 0, "v1.1.0": 1, "v1.2.0": 2}, [1], [], 2, 2),
    ("a withdrawal", {"v1.0.0": 0, "v1.1.0": 1}, [], [1], 0, 0),
    ("a withdrawal, then a new build", {"v1.0.0": 0, "v1.1.0": 1, "v1.2.0": 2}, [], [1], 2, 2),
    ("a withdrawal, then a post release", {"v1.1.0": 1, "v1.1.0.post1": 2}, [], [1], 2, 2),
    ("a withdrawal, then a backport", {"v1.0.0": 0, "v1.1.0": 1, "v1.0.1": 2}, [], [1], 2, 2),
    ("a withdrawal of all", {"v1.0.0": 0, "v1.1.0": 1}, [], [0, 1], None, None),
]


@pytest.mark.parametrize("installer", [pytest.param("pip", marks=pytest.mark.long), "uv"])
@pytest.mark.parametrize(
    ("releases", "yanked", "withdrawn", "pip", "uv"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_installers_skip_withdrawn_wheels(
    publish: Publish, serve: Site, tmp_path: Path, installer: str, releases: dict[str, int], yanked: list[int],
    withdrawn: list[int], pip: int | None, uv: int | None,
) -> None:  # fmt: skip
    publish(releases, yanked=yanked, withdrawn=withdrawn)
    taken = installed_build(installer, tmp_path, serve, "flash-attn==2.8.3+rocm")
    assert taken == (pip if installer == "pip" else uv)


def test_an_unverified_wheel_does_not_take_over(publish: Publish, serve: Site, tmp_path: Path) -> None:
    result = publish({"v1.0.0": 0, "v1.1.0": 1}, lost=1)
    assert [link.listed for link in result.unverified] == [False]
    assert installed_build("uv", tmp_path, serve, "flash-attn==2.8.3+rocm") == 0


def project(directory: Path, site: Site) -> Path:
    """A uv project with flash-attn from the index of the release."""
    directory.mkdir()
    (directory / "pyproject.toml").write_text(
        f"""
[project]
name = "user"
version = "1"
requires-python = ">=3.10"
dependencies = ["flash-attn==2.8.3"]
[tool.uv.sources]
flash-attn = {{ index = "rocm" }}
[[tool.uv.index]]
name = "rocm"
url = "{site.url}site/simple/"
explicit = true
[[tool.uv.dependency-metadata]]
name = "flash-attn"
requires-dist = []
"""
    )
    return directory


def test_a_lock_of_uv_moves_on_with_its_upgrade(publish: Publish, serve: Site, tmp_path: Path) -> None:
    """uv.lock holds the address of the file, which stays in its release: a lock installs the same wheel until it is
    upgraded.
    """
    publish({"v1.0.0": 0, "v1.1.0": 1})
    user = project(tmp_path / "user", serve)

    def uv(*arguments: str) -> str:
        command = [find_uv_bin(), "--project", str(user), *arguments]
        settings = {"UV_NO_CONFIG": "0", "UV_LINK_MODE": "copy", "NO_PROXY": "127.0.0.1", "PATH": "/usr/bin:/bin"}
        done = call(command, tmp_path / "cache", {**settings, "HOME": str(tmp_path)})
        assert done.returncode == 0, done.stderr
        return (user / "uv.lock").read_text()

    assert "rocm-1-cp310" in uv("lock")
    publish({"v1.0.0": 0, "v1.1.0": 1, "v1.2.0": 2}, withdrawn=[1])
    assert "rocm-1-cp310" in uv("lock"), "until it is upgraded"
    assert "rocm-2-cp310" in uv("lock", "--upgrade-package", "flash-attn")
    assert "rocm-1-cp310" not in uv("lock")
    uv("sync", "--locked")
    code = "import flash_attn; print(flash_attn.build)"
    done = subprocess.run([user / ".venv/bin/python", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"


def test_a_hash_pinned_requirement_of_a_withdrawn_wheel_fails(publish: Publish, serve: Site, tmp_path: Path) -> None:
    result = publish({"v1.0.0": 0, "v1.1.0": 1}, withdrawn=[1])
    (withdrawn,) = (wheel for wheel in result.wheels if wheel.build == 1)
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"flash-attn==2.8.3+rocm --hash=sha256:{withdrawn.sha256}\n")
    for installer in INSTALLERS:
        (tmp_path / installer).mkdir()
        python = empty(tmp_path / installer)
        simple = ["--no-deps", "--index-url", f"{serve.url}site/simple/"]
        assert (
            install(installer, python, tmp_path, *simple, "--require-hashes", "-r", str(requirements)).returncode != 0
        )


def test_the_reason_is_in_the_notes_and_on_the_page(publish: Publish, serve: Site) -> None:
    result = publish({"v1.0.0": 0}, withdrawn=[0])
    page = notes.render(result.wheels, tag="v1.0.0", index_url=HOME.url, new="", repository="owner/name")
    assert f"2.8.3 **withdrawn**: {REASON}" in page
    assert "2.8.3+rocm" in page, "the file stays in its release"
    assert f"<em>withdrawn: {REASON}</em>" in (serve.root / "site/index.html").read_text()
    assert ".whl" not in (serve.root / "site/simple/flash-attn/index.html").read_text()


def test_withdraw_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "yanked.toml"
    file.write_bytes(yanks.DATA_FILE.read_bytes())
    monkeypatch.setattr(yanks.withdraw, "__defaults__", (file,))
    wheels = [f"flash_attn-{version}+rocm-cp310-abi3-manylinux_2_17_x86_64.whl" for version in ("2.7.4", "2.8.3.post2")]
    assert cli.main(["withdraw", *wheels, "--reason", REASON]) == 0
    assert yanks.withdrawn(file) == dict.fromkeys(wheels, REASON)
    assert f"{wheels[1]}: withdrawn ({REASON}), once rocm_wheels/publish/yanked.toml" in capsys.readouterr().out
    yanks.mark(wheels[0], "slow", file)
    assert cli.main(["withdraw", wheels[0], "--undo"]) == 0
    assert yanks.load(file) == {wheels[0]: "slow"}
    assert yanks.withdrawn(file) == {wheels[1]: REASON}
    before = file.read_text()
    assert cli.main(["withdraw", wheels[0], "einops-0.8.2-py3-none-any.whl", "--reason", "x"]) == DataError.exit_code
    assert cli.main(["withdraw", *wheels, "--undo"]) == DataError.exit_code
    assert file.read_text() == before
