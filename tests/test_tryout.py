"""The check of the public index after a release: what it installs, and when it fails."""

from __future__ import annotations

import functools
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sites
import wheelhouse
from workflows import Runner, holds, load

from rocm_wheels import cli
from rocm_wheels.errors import DataError, VerifyFailed
from rocm_wheels.matrix import cells, versions
from rocm_wheels.matrix.plan import TORCH_INDEX
from rocm_wheels.publish import tryout
from rocm_wheels.publish.home import Home
from rocm_wheels.wheel import interpreters


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Home]:
    """An HTTP address that serves `tmp_path`/www."""
    (tmp_path / "www").mkdir()
    handler = functools.partial(_Quiet, directory=str(tmp_path / "www"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield Home(url=f"http://127.0.0.1:{server.server_address[1]}/", repository="https://github.com/owner/name")
        server.shutdown()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that the check runs; torch is 2.9 before and after."""
    commands: list[str] = []

    def call(command: list[str]) -> str:
        commands.append(" ".join(command))
        return "2.9.0+cpu 2.8.3+rocm\n" if "flash_attn')" in command[-1] else "2.9.0+cpu\n"

    monkeypatch.setattr(tryout, "_call", call)
    monkeypatch.setattr(interpreters, "find", lambda version: Path(f"/usr/bin/python{version}"))
    return commands


def publish(directory: Path, home: Home) -> None:
    dist = directory / "dist"
    for version in ("2.6.3", "2.8.3"):
        wheelhouse.write(dist, cells.universal(versions.load(), version))
    wheelhouse.write(dist, wheelhouse.cell("2.8.3 3.12 2.5.1 6.2"))
    sites.build(dist, directory / "www", home)


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_the_newest_universal_wheel_is_installed_next_to_torch(
    served: Home, tmp_path: Path, ran: list[str], installer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path, served)
    arguments = ["--installer", installer, "--python", "oldest", "--repo", "owner/name", "--url", served.url]
    assert cli.main(["tryout", *arguments]) == 0
    said = f"flash_attn 2.8.3+rocm, torch 2.9.0+cpu, Python 3.10, {installer}: installed, selftest passed\n"
    assert capsys.readouterr().out == said
    install = "pip install --no-cache-dir" if installer == "pip" else "pip install --no-cache --python"
    assert ran[0].startswith("/usr/bin/python3.10 -m venv")
    assert install in ran[1]
    assert ran[1].endswith(f"torch --index-url {TORCH_INDEX}/cpu")
    assert install in ran[3]
    assert ran[3].endswith(f"flash_attn==2.8.3+rocm --extra-index-url {served.url}simple/")
    assert "-m flash_attn.selftest --cpu" in ran[5]


def test_a_replaced_torch_fails_the_tryout(
    served: Home, tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, served)
    call = tryout._call
    monkeypatch.setattr(tryout, "_call", lambda command: call(command).replace("2.9.0+cpu 2.8.3", "2.9.0+cu126 2.8.3"))
    with pytest.raises(VerifyFailed, match=r"pip replaced torch 2.9.0\+cpu by 2.9.0\+cu126"):
        tryout.run(served.url, installer="pip", python="3.12")
    assert not any("selftest" in command for command in ran)


def test_a_missing_index_fails_the_tryout_after_the_first_release(
    served: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = tmp_path / "published.json"
    monkeypatch.setattr(tryout, "PUBLISHED", published)
    published.write_text("[]")
    assert tryout.run(served.url, installer="pip", python="newest") == f"{served.url}: nothing is published yet"
    published.write_text('["flash_attn-2.8.3+rocm-cp310-abi3-manylinux_2_17_x86_64.whl"]')
    with pytest.raises(DataError, match="cannot be read: status 404"):
        tryout.run(served.url, installer="pip", python="newest")
    (tmp_path / "www/metadata.json").write_text(json.dumps({"wheels": []}))
    with pytest.raises(DataError, match="offers no universal wheel"):
        tryout.run(served.url, installer="pip", python="newest")


def test_a_command_that_fails_is_quoted() -> None:
    with pytest.raises(VerifyFailed, match="ended with 3:\nno such package"):
        tryout._call([sys.executable, "-c", "print('no such package'); raise SystemExit(3)"])


@pytest.mark.parametrize("there", [False, True])
def test_a_failure_opens_one_issue(tmp_path: Path, there: bool) -> None:
    job = load("installs.yml")["jobs"]["report"]
    assert holds(job["if"], {"needs": {"install": {"result": "failure"}}, "status": "failure"})
    assert not holds(job["if"], {"needs": {"install": {"result": "success"}}, "status": "success"})
    gh = f'#!/bin/sh\n[ "$2" != list ] || {{ {"echo 7" if there else "true"}; exit; }}\necho "$@"\n'
    (tmp_path / "gh").write_text(gh)
    (tmp_path / "gh").chmod(0o755)
    github = {"token": "t", "server_url": "https://github.com", "repository": "owner/name", "run_id": "5"}
    runner = Runner(
        workspace=tmp_path,
        storage=tmp_path / "storage",
        caches=tmp_path / "caches",
        github={},
        environment={"PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_REPOSITORY": "owner/name"},
    )
    done = runner._steps("x", job, {"env": {}, "github": github, "inputs": {}})
    assert done.result == "success"
    opened = "issue create --repo owner/name --title The public index cannot be installed from"
    assert (opened in done.log) is not there
    assert ("actions/runs/5" in done.log) is not there


def test_the_program_runs_in_the_environment_that_the_workflow_sets_up() -> None:
    """With the packages of the group `build`: the module imports no package of another group."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('jinja2', 'requests', 'markupsafe')))"
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}\nimport rocm_wheels.publish.tryout"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
