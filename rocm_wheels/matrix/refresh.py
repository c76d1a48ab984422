"""Updates pins: packages of the dependency groups with their lock files, packages of the clients that tests run, and
digests of the container images.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

from packaging.version import Version

from rocm_wheels.errors import DataError, MissingTool
from rocm_wheels.matrix import locks
from rocm_wheels.paths import ROOT

# A version that several files contain is updated in all of them.
PINNED = (
    "pyproject.toml",
    "flash_attn_src/pyproject.toml",
    "wheel_tests/requirements.txt",
    "rocm_wheels/versions.toml",
    *(f"flash_attn_src/tests/clients/{name}.txt" for name in ("kernels", "transformers-4", "transformers-5")),
)
_PIN = re.compile(r'(?m)(?:^|(?<="))(?P<name>[A-Za-z][\w.-]*)(?P<extras>\[[\w,-]+\])?==(?P<version>[\w.]+)(?=[";]|$)')
_IMAGE = re.compile(r'(?m)^image = "(?P<repository>[^:"]+):(?P<tag>[^@"]+)(?:@(?P<digest>sha256:[0-9a-f]{64}))?"')

_COMPILERS = re.compile(r"(?m)^\[compilers\]\n(?:[\w-]+ = .*\n)+")
_COMPILER = re.compile(r'(?m)^(?P<name>[\w-]+) = "(?P<version>[\w.]+)"')


def run(*, dry_run: bool = False) -> list[str]:
    """Rewrites the files and returns a line for each change. Raises DataError, before anything is written, if one
    fails.
    """
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in PINNED}
    fresh, changes = refreshed(texts, releases=releases_of, digest=image_digest)
    if not dry_run:
        for name, text in fresh.items():
            (ROOT / name).write_text(text, encoding="utf-8")
        changes += locks.write(today=datetime.datetime.now(datetime.timezone.utc).date())
    return changes


def refreshed(
    texts: dict[str, str], *, releases: Callable[[str, str], list[str]], digest: Callable[[str, str], str]
) -> tuple[dict[str, str], list[str]]:
    """The texts with new pins, and a line for each change.

    releases: returns the versions of a package. digest: returns the digest of an image. No pin becomes older. A package
    with several pinned versions, such as transformers 4 and 5, keeps them: each becomes the newest of its major
    version.
    """
    changes: dict[str, None] = {}
    known: dict[tuple[str, str], list[Version]] = {}
    pinned: dict[str, set[str]] = {}
    for text in texts.values():
        for match in _pins(text):
            pinned.setdefault(match["name"], set()).add(match["version"])

    def version(name: str, old: str) -> str:
        if (name, old) not in known:
            known[name, old] = [Version(release) for release in releases(name, old)]
        several, now = len(pinned[name]) > 1, Version(old)
        newer = [each for each in known[name, old] if each > now and (each.major == now.major or not several)]
        if newer:
            changes[f"{name} {old} -> {max(newer)}"] = None
        return str(max(newer)) if newer else old

    def pin(match: re.Match[str]) -> str:
        name, extras = match["name"], match["extras"] or ""
        return f"{name}{extras}=={version(name, match['version'])}"

    def image(match: re.Match[str]) -> str:
        name = f"{match['repository']}:{match['tag']}"
        now = digest(match["repository"], match["tag"])
        if now != match["digest"]:
            changes[f"{name} {match['digest'] or 'without a digest'} -> {now}"] = None
        return f'image = "{name}@{now}"'

    def compilers(block: re.Match[str]) -> str:
        def line(match: re.Match[str]) -> str:
            return f'{match["name"]} = "{version(match["name"], match["version"])}"'

        return _COMPILER.sub(line, block[0])

    fresh = {name: _COMPILERS.sub(compilers, _IMAGE.sub(image, _PIN.sub(pin, text))) for name, text in texts.items()}
    return fresh, list(changes)


def releases_of(package: str, pinned: str) -> list[str]:
    """The releases of a package that are older than the cooldown, as pip sees them for the oldest Python, or for this
    one where the oldest cannot have the pinned release."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--json", "--disable-pip-version-check", package]
    command += ["--uploaded-prior-to", f"P{locks.COOLDOWN_DAYS}D"]
    releases: list[str] = []
    for python in ([f"--python-version={locks.OLDEST}"], []):
        done = subprocess.run([*command, *python], capture_output=True, text=True, check=False)
        releases = json.loads(done.stdout)["versions"] if done.returncode == 0 else []
        if pinned in releases:
            break
    if not releases:
        raise DataError(f"pip knows no version of {package}: {done.stderr.strip()}", remedy="Try again later.")
    return releases


def image_digest(repository: str, tag: str) -> str:
    """The digest of a tag in its registry, as docker reports it."""
    command = ["docker", "buildx", "imagetools", "inspect", f"{repository}:{tag}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MissingTool("there is no docker on PATH to ask for the digests of images", remedy="Install it.") from None
    digest = re.search(r"(?m)^Digest: +(sha256:[0-9a-f]{64})$", done.stdout)
    if done.returncode != 0 or digest is None:
        raise DataError(
            f"docker gave no digest of {repository}:{tag}: {(done.stderr or done.stdout).strip()}",
            remedy="Install docker's buildx where that is missing, or try again later.",
        )
    return digest[1]


def _pins(text: str) -> Iterator[re.Match[str]]:
    yield from _PIN.finditer(text)
    for block in _COMPILERS.finditer(text):
        yield from _COMPILER.finditer(block[0])
