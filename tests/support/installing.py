"""pip and uv, a local HTTP site, and environments to install into."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from uv import find_uv_bin


@dataclass(frozen=True)
class Site:
    """An HTTP site. asked: the requested paths."""

    url: str
    root: Path
    asked: list[str]

    def simple(self, rocm: str, torch: str) -> str:
        return f"{self.url}rocm{rocm}/torch{torch}/simple/"


class _Handler(http.server.SimpleHTTPRequestHandler):
    asked: list[str]

    def log_message(self, *_: object) -> None:
        self.asked.append(unquote(self.path))


@contextmanager
def served(root: Path) -> Iterator[Site]:
    """Serves a directory over HTTP while the block runs."""
    asked: list[str] = []
    handler = functools.partial(type("Handler", (_Handler,), {"asked": asked}), directory=root)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield Site(url=f"http://127.0.0.1:{server.server_address[1]}/", root=root, asked=asked)
        server.shutdown()


def pure_wheel(directory: Path, name: str, version: str) -> Path:
    """Writes a tiny wheel. Returns its line in an index page."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    path = directory / f"{name}-{version}-py3-none-any.whl"
    rocm = re.search(r"\+rocm(\d+\.\d+)", version)
    hip = f"{rocm[1]}.41133-dd7f95766" if rocm else None
    files = {
        f"{name}/__init__.py": "",
        f"{name}/version.py": f"__version__ = '{version}'\nhip: Optional[str] = {hip!r}\ncuda = None\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    links = "".join(f'<a href="{each.name}">{each.name}</a>' for each in sorted(directory.glob("*.whl")))
    (directory / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return path


def clean_environment(cache: Path) -> dict[str, str]:
    """The environment without settings of this machine's user: no other index and no cached wheel."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_", "VIRTUAL_ENV"))}
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {
        **kept,
        **own,
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": str(cache),
        "NO_PROXY": "127.0.0.1",
        "UV_LINK_MODE": "copy",
    }


def call(
    command: list[str], cache: Path, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command without the user's settings, or with these settings."""
    own = clean_environment(cache) if settings is None else {**settings, "UV_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=60, check=False)


def pip(
    cache: Path, *arguments: str, python: str | Path = sys.executable, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return call([sys.executable, "-m", "pip", "--python", str(python), "install", *arguments], cache, settings)


def uv(cache: Path, *arguments: str, settings: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return call([find_uv_bin(), "pip", "install", *arguments], cache, settings)


def install(
    installer: str, python: Path, cache: Path, *arguments: str, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Installs with pip or uv into the environment of this Python."""
    if installer == "pip":
        return pip(cache, *arguments, python=python, settings=settings)
    return uv(cache, "--python", str(python), *arguments, settings=settings)


def empty(directory: Path) -> Path:
    """The Python of an empty environment."""
    made = call([find_uv_bin(), "venv", "--no-project", "--python", sys.executable, str(directory / "env")], directory)
    assert made.returncode == 0, made.stderr
    return directory / "env" / "bin" / "python"


def with_torch(directory: Path, torch: str) -> Path:
    """The Python of an environment with only this torch."""
    wheel = pure_wheel(directory / "torch", "torch", torch)
    python = empty(directory)
    assert uv(directory / "cache", "--python", str(python), "--no-index", str(wheel)).returncode == 0
    return python


def installed(python: Path) -> dict[str, str]:
    code = "import importlib.metadata as m; print({d.name.lower(): d.version for d in m.distributions()})"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    result: dict[str, str] = eval(done.stdout)
    return result
