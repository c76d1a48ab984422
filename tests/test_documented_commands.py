"""Types the commands of README and docs, in their order, in a fresh clone with few kernels.

tests/documented_commands.toml says what becomes of each command. The clone has the kernels of fewer_kernels.py, and
builds for gfx1030, whose kernels `kernel_cache` has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import documented
import fewer_kernels
import pytest

from amdgpu_simulator import __main__ as simulator
from rocm_wheels import cli as rocm_wheels_cli
from rocm_wheels import packages, tables
from rocm_wheels.paths import ROOT

FILE = Path(__file__).parent / "documented_commands.toml"
TABLE: dict[str, Any] = dict(tables.parse(FILE.read_text(encoding="utf-8"), FILE.name))
REASONS = TABLE.pop("reasons")
MODULE_ENDS = (".py", "/__init__.py", "/__main__.py")
PREAMBLE = """
set -o pipefail
check() { [[ $2 == 0 ]] || { echo "@@ failed $1: $2"; exit 1; }; }
# For the lines that install torch: the torch of the tests, in the active environment.
add_torch() { echo "$TORCH" >"$(echo "$VIRTUAL_ENV"/lib/python3*/site-packages)/torch.pth"; }
"""


@dataclass(frozen=True)
class Row:
    """A command of a page: what becomes of it, and what is typed, "" for nothing."""

    page: str
    kind: str
    command: str
    typed: str


def rows(page: str) -> list[Row]:
    result = []
    for kind, command, *typed in TABLE[page]["commands"]:
        default = {"run": command, "plan": f"{command} --plan >plan.json"}.get(kind, "")
        result.append(Row(page, kind, command, typed[0] if typed else default))
    return result


ROWS = [row for page in TABLE for row in rows(page)]


@pytest.mark.parametrize("page", documented.PAGES)
def test_every_command_of_a_page_has_a_row(page: str) -> None:
    on_page = [command.text for command in documented.commands(page)]
    named = [row.command for row in ROWS if row.page == page]
    for command in on_page:
        assert command in named, f'{FILE.name}, ["{page}"]: add [KIND, {json.dumps(command)}]'
    assert named == on_page, "rows without a command, or in another order"


def test_every_row_has_a_page() -> None:
    assert set(TABLE) <= set(documented.PAGES)


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind not in ("run", "again")], ids=lambda row: row.command)
def test_no_command_is_excused_by_a_reason_that_is_not_its_own(row: Row) -> None:
    assert re.search(REASONS[row.kind]["shows"], row.command), REASONS[row.kind]["why"]


@pytest.mark.parametrize("row", [row for row in ROWS if not row.typed], ids=lambda row: row.command)
def test_a_command_that_is_not_typed_names_programs_and_options_that_exist(row: Row) -> None:
    command = row.command.replace("\\", "/")
    for verbs in re.findall(r"python\S* -m rocm_wheels ([^`|&]+)", command):
        _parses(rocm_wheels_cli._parser(), verbs)
    for options in re.findall(r"(?:^|/| )build_rocm\.sh ((?!--)[^`|&]+)", command):
        _parses(rocm_wheels_cli._parser(), f"build {options.replace('...', '2.8.3')}")
    for options in re.findall(r"python\S* -m amdgpu_simulator ([^`|&]+)", command):
        _parses(simulator._parser(), options)
    for module in re.findall(r"-m (flash_attn\.[\w.]+|amdgpu_simulator\.[\w.]+)", command):
        files = [
            ROOT / root / f"{module.replace('.', '/')}{end}" for root in ("", "flash_attn_src") for end in MODULE_ENDS
        ]
        assert any(file.is_file() for file in files), module
    for example in re.findall(r"--example (\w+)", command):
        assert (ROOT / f"candle-flash-rocm/examples/{example}.rs").is_file()
    for path in re.findall(r"(?<![\w/~.-])(?:\./)?((?!ComfyUI/)(?:[\w-]+/)+[\w*-]+\.(?:py|sh|yml))(?![\w/])", command):
        assert list(ROOT.glob(path)), path


def _parses(parser: argparse.ArgumentParser, options: str) -> None:
    """Whether a command line is complete and has no unknown option; a sentence may name a verb alone."""
    words = shlex.split(options.strip())
    if len(words) > 1:
        parser.parse_args([re.sub(r"^<.*>$", "x", word) for word in words])


def test_a_command_that_a_page_repeats_is_typed_or_excused_above() -> None:
    above: set[str] = set()
    for row in ROWS:
        assert (row.command in above) or row.kind != "again", row
        above.add(row.command)
    assert {row.kind for row in ROWS} >= {"run", *REASONS}, "a reason without a command"


def test_what_is_a_command() -> None:
    page = """
Text with `pip install x`, `pip`, `flash_attn`, `./build_rocm.sh --setup` and `python`.

    git status      # a comment
    PYTORCH_ROCM_ARCH="gfx90a;gfx942" ./build_rocm.sh \\
        2.8.3

1. A list:

       cd there

```python
pip = 1
```

```sh
ls -l
```
"""
    assert [command for _, command in documented.parse(page)] == [
        "pip install x", "./build_rocm.sh --setup", "git status",
        'PYTORCH_ROCM_ARCH="gfx90a;gfx942" ./build_rocm.sh 2.8.3', "cd there", "ls -l",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the repository that README's `git clone` names."""
    place = tmp_path_factory.mktemp("stranger")
    repository = place / "repository"
    fewer_kernels.copy(repository)
    fewer_kernels.narrow(repository)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "few kernels"]):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *command], cwd=repository, check=True)
    (place / "home").mkdir()
    return place


@pytest.fixture(scope="module")
def environment(place: Path, kernel_cache: Path) -> Mapping[str, str]:
    """Of a user who has Python and uv."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tools = place / "tools"
    tools.mkdir()
    for name, path in {"python": sys.executable, "python3": sys.executable, "uv": packages.uv()}.items():
        (tools / name).symlink_to(os.path.realpath(path) if name != "uv" else path)
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "TMPDIR") or "proxy" in name.lower()}
    kept |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_"))}
    return {
        **kept,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "HOME": str(place / "home"),
        "ROCM_WHEELS_CACHE": str(kernel_cache),
        "PYTORCH_ROCM_ARCH": "gfx1030",
        "MAX_JOBS": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "REPOSITORY": str(place / "repository"),
        "TEST_ENVIRONMENT": sys.prefix,
        "TORCH": sysconfig.get_path("purelib"),
        "PORT": str(port),
        "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache/pip")),
        "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache/uv")),
    }


@pytest.mark.long
@pytest.mark.parametrize("page", TABLE)
def test_the_commands_of_a_page_run(page: str, place: Path, environment: Mapping[str, str]) -> None:
    """Pages build on the clone, the environment and the wheels of README.md, the first of the table."""
    commands = [row for row in rows(page) if row.typed]
    clone = place / "flash-attn-rocm"
    if page != "README.md" and not clone.is_dir():
        pytest.skip("README.md's commands did not run")
    start = place if page == "README.md" else clone
    lines = [PREAMBLE] if page == "README.md" else [PREAMBLE, f". {place}/env/bin/activate"]
    for number, row in enumerate(commands):
        lines += [f"echo '@@ {number}'", row.typed, f"check {number} $?"]
    script, log = (place / f"{page.replace('/', '-')}.{kind}" for kind in ("sh", "log"))
    script.write_text("\n".join([*lines, "exit 0"]), encoding="utf-8")
    with log.open("w") as output:
        subprocess.run(
            ["bash", script], cwd=start, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    text = log.read_text(encoding="utf-8")
    failed = re.search(r"^@@ failed (\d+): (\d+)$", text, re.MULTILINE)
    assert failed is None, f"{commands[int(failed[1])].command!r} ended with {failed[2]}:\n{text[-3000:]}"
    assert len(re.findall(r"^@@ \d+$", text, re.MULTILINE)) == len(commands), text[-3000:]
