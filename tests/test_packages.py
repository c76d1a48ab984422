from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from wheelhouse import CELL

from rocm_wheels.errors import MissingTool

ROOT = Path(__file__).parents[1]
STDLIB_ONLY = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from rocm_wheels.cli import main
code = main()
tops = {name.partition(".")[0] for name in sys.modules}
print(sorted(tops - set(sys.stdlib_module_names) - {"__main__", "rocm_wheels"}), file=sys.stderr)
sys.exit(code)
"""


def test_plan_and_build_need_none_of_the_packages_for_releases(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
import sys
for name in ("requests", "jinja2", "markupsafe", "packaging"):
    sys.modules[name] = None
from rocm_wheels.cli import main
assert main(["check", "2.8.3", "3.11", "2.5.1", "6.2"]) == 0
assert main(["which", "--site", ""]) == 1
sys.exit(main(["publish", "--tag", "v1.0.0"]))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == MissingTool.exit_code
    assert (
        "\nRun ./build_rocm.sh --setup release, then this with build/env-release/bin/python." in capfd.readouterr().err
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no TOML reader of its own")
def test_plan_needs_the_standard_library_only(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", STDLIB_ONLY, str(ROOT), "check", *CELL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    # flash_attn: a bare package around the parser of environment variables, not the package that imports torch.
    assert (done.returncode, done.stderr) == (0, "['flash_attn']\n")
    assert done.stdout.startswith('[{"cell": {')


@pytest.mark.parametrize(
    ("verb", "group"),
    [
        (["inspect", "some.whl"], "build"),
        (["compile", "--target", "gfx942"], "build"),
        (["build", *CELL], "build"),
        (["plan", *CELL], ""),
        (["index", "--dir", "dist", "--out", "site", "--repo", "o/n"], "release"),
    ],
)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no TOML reader of its own")
def test_a_python_without_the_packages_gets_the_command(verb: list[str], group: str, tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-I", "-c", STDLIB_ONLY, str(ROOT), *verb]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == (5 if group else 0)
    assert "Traceback" not in done.stderr
    remedy = {
        "build": "--setup, then this with build/env/",
        "release": "--setup release, then this with build/env-release/",
    }
    assert not group or f"\nRun ./build_rocm.sh {remedy[group]}bin/python.\n" in done.stderr
