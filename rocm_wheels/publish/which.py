"""Prints the line that installs flash_attn on this machine, or says why there is none.

Standard library only. The site of the wheels serves a copy that is one file, with its address and `advice` inside
(RUN has the commands). The line goes to stdout, all else to stderr. Exit code 0 with a line, 1 without one, 2 for a
wrong option.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import platform
import re
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rocm_wheels.package_modules import single_file

advice = single_file("diagnosis.advice")
SITE = ""  # the address of the site that serves this copy
FORMAT = 2  # of the site's metadata.json
TIMEOUT_SECONDS = 20
# System -> the commands that run the copy of a site. In PowerShell `curl` is another command, and a pipe encodes what
# it carries again.
RUN = {
    "linux": ("curl -sSf {site}which.py | python3 -",),
    "windows": ("curl.exe -sSfO {site}which.py", "python which.py"),
}
# The command that the page to choose a wheel on asks its visitors to run.
PASTE_COMMAND = (
    'python -c "import platform, sysconfig, torch; c = torch.cuda; print('
    "'system=' + platform.system(), 'python=' + platform.python_version() "
    "+ 't' * bool(sysconfig.get_config_var('Py_GIL_DISABLED')), 'torch=' + torch.__version__, "
    "'hip=%s' % torch.version.hip, "
    "'gpu=' + ','.join(c.get_device_properties(i).gcnArchName for i in range(c.device_count())))\""
)

if TYPE_CHECKING:  # A Python that is too old for the wheels gets a message instead of a TypeError.
    Wheel = dict[str, Any]


class Machine(NamedTuple):
    """Versions as their owners print them ("3.11.7", "2.5.1+rocm6.2", "6.2.41133"); "" for what is not installed."""

    python: str
    torch: str
    hip: str
    gpus: tuple[str, ...]


class NoWheel(Exception):  # noqa: N818 - it says what happened
    """The reason why there is no line to print."""


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # Python's path may have a character that the console's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    return run(_parser().parse_args(argv))


def run(options: argparse.Namespace) -> int:
    """Detects the machine, chooses a wheel and prints the line. Returns the exit code."""
    try:
        machine = _with_options(detect(), options)
        if platform.machine() not in ("x86_64", "AMD64"):
            raise NoWheel(f"The wheels are for x86_64, this is {platform.machine()}.")
        site = load(options.site)
        machine = machine._replace(gpus=tuple(target(site, gpu) for gpu in machine.gpus))
        _say(f"found    {describe(machine)}")
        for line in told(site, machine):
            _say(line)
        machine = machine._replace(gpus=advice.counting(site["advice"], machine.gpus, system()))
        wheel = choose(site, machine)
    except NoWheel as problem:
        _say(f"no wheel {problem}")
        return 1
    verdict = wheel["verdict"]
    ran = "nothing ran it" if verdict["ran_on"] == "nothing" else f"passed its tests on {verdict['ran_on']}"
    _say(f"wheel    {wheel['name']}")
    _say(f"tested   {ran} (GPU: {verdict['gpu']})")
    for gpu in machine.gpus:
        if gpu not in wheel["targets"]:
            _say(f"note     the wheel has no kernels for the {gpu} of this machine")
    print(pip_line(site, wheel))
    return 0


def told(site: dict[str, Any], machine: Machine) -> list[str]:
    """Lines with the variables and notes for the machine. Raises NoWheel, with the torch to install, if nothing can be
    installed yet.
    """
    answer = advice.advise(site["advice"], question(machine))
    if answer.state == advice.REFUSE:
        raise NoWheel(answer.reason)
    if answer.state == advice.TORCH:
        gone = f"torch    {pip()} uninstall -y torch torchvision torchaudio\n" if answer.remove else ""
        raise NoWheel(f"yet      {answer.reason}\n{gone}torch    {pip()} {answer.torch}\nthen     run this again")
    variables = [f"variable {name}={value}, set before Python starts" for name, value in answer.variables.items()]
    return [*variables, *(f"note     {note}" for note in answer.notes)]


def question(machine: Machine) -> Any:
    """The machine as `advice` takes it."""
    python = advice.minor(machine.python) + ("t" if machine.python.endswith("t") else "")
    return advice.Question(machine.gpus, system(), python, machine.torch, machine.hip)


def detect() -> Machine:
    """This machine as the running Python sees it, without importing torch."""
    torch, hip = _torch()
    free_threaded = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    return Machine(platform.python_version() + free_threaded, torch or "", hip or "", _gpus())


def describe(machine: Machine) -> str:
    """The machine as one line for users."""
    gpus = ", ".join(machine.gpus) or "no AMD GPU"
    return f"Python {machine.python}, torch {machine.torch or 'none'}, HIP of torch {machine.hip or 'none'}, {gpus}"


def system() -> str:
    """The system as the site's list names it."""
    return "windows" if sys.platform == "win32" else sys.platform


def pip() -> str:
    """How the pip of the running Python is started. On Windows a portable Python is not in PATH."""
    if system() != "windows":
        return "pip"
    return f'& "{sys.executable}" -m pip' if " " in sys.executable else f"{sys.executable} -m pip"


def target(site: dict[str, Any], name: str) -> str:
    """The GPU target of a name that a user types. Raises NoWheel for an unknown name."""
    known = advice.target(site["advice"], name)
    if not known:
        targets = ", ".join(site["advice"]["targets"])
        raise NoWheel(f"{name!r} is no GPU that is known here, only {targets} and their products.")
    return str(known)


def load(site: str) -> dict[str, Any]:
    """The site's metadata.json. Raises NoWheel without a site or without its answer."""
    if not site:
        raise NoWheel("No site of wheels is named.\nGive --site URL, or build a wheel: ./build_rocm.sh")
    url = urllib.parse.urljoin(site.rstrip("/") + "/", "metadata.json")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            content = json.loads(answer.read())
        if content["format"] != FORMAT:
            raise NoWheel(f"{url} has format {content['format']}.\nGet the which.py of that site.")
        return dict(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoWheel(f"{url} gave no list of wheels: {error}") from error


def choose(site: dict[str, Any], machine: Machine) -> Wheel:
    """The first wheel of the site's list that fits: newest flash-attn first, the universal wheel before others. Raises
    NoWheel, with the line that builds one, if there is none.
    """
    there = [wheel for wheel in site["wheels"] if fits(wheel, machine)]
    chosen = next((wheel for wheel in there if wheel["yanked"] is None), None)
    if chosen is None:
        withdrawn = "".join(f"withdrawn {wheel['name']}: {wheel['yanked']}\n" for wheel in there)
        line = build_line(site, machine)
        raise NoWheel(
            f"is published for this machine.\n{withdrawn}build    {line}  # in a clone of {site['repository']}"
        )
    return dict(chosen)


def fits(wheel: Wheel, machine: Machine) -> bool:
    """Whether a wheel is for this machine. The page has the same rule. The universal wheel is for every torch."""
    gpus = set(machine.gpus)
    versions = {"torch": machine.torch, "rocm": machine.hip, "python": machine.python}
    return (
        wheel["platform"] == system()
        and (not gpus or bool(gpus & set(wheel["targets"])))
        and (not wheel["torch"] or all(wheel[axis] == advice.minor(version) for axis, version in versions.items()))
    )


def build_line(site: dict[str, Any], machine: Machine) -> str:
    """The command that builds the newest universal wheel for the GPUs of a machine, on Linux or in WSL."""
    targets = f'PYTORCH_ROCM_ARCH="{";".join(machine.gpus)}" ' if machine.gpus else ""
    where = " --platform windows" if system() == "windows" else ""
    return f"{targets}./build_rocm.sh {site['flash_attn'][-1]}{where}"


def pip_line(site: dict[str, Any], wheel: Wheel) -> str:
    """pip's command. The exact version is only on that index; its dependencies come from pip's usual index."""
    return f'{pip()} install "flash_attn=={wheel["version"]}" --extra-index-url {site["url"]}{wheel["index"]}'


def standalone(site: str) -> str:
    """This file as the site at that address serves it: with the address, and with the module `advice` as a text."""
    source = Path(__file__).read_text(encoding="utf-8")
    text = Path(advice.__file__).read_text(encoding="utf-8")
    embedded = f"import types\n\nadvice: Any = types.ModuleType('advice')\nexec({text!r}, advice.__dict__)"
    for old, new in (
        ("from rocm_wheels.package_modules import single_file\n\n", ""),
        ('advice = single_file("diagnosis.advice")', embedded),
        ('SITE = "" ', f"SITE = {json.dumps(site)} "),
    ):
        if source.count(f"\n{old}") != 1:
            raise AssertionError(f"{__file__} has no line {old}")
        source = source.replace(f"\n{old}", f"\n{new}", 1)
    return source


def _torch() -> tuple[str | None, str | None]:
    """(version, HIP version) of the installed torch, read from its version.py."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return None, None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None, None
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    hip = re.search(r"^hip\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return version[1] if version else None, hip[1] if hip else None


def _gpus(nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> tuple[str, ...]:
    """gfx targets from the kernel driver, else from ROCm's own tool."""
    gpus = set()
    for properties in sorted(nodes.glob("*/properties")):
        try:
            versions = re.findall(r"^gfx_target_version (\d+)$", properties.read_text(), re.MULTILINE)
        except OSError:  # a container may see the device file of a GPU that it must not use
            continue
        for version in map(int, versions):
            major, rest = divmod(version, 10000)
            if version:
                gpus.add(f"gfx{major}{rest // 100:x}{rest % 100:x}")
    return tuple(sorted(gpus or _enumerated()))


def _enumerated() -> set[str]:
    for tool in ("rocm_agent_enumerator", "/opt/rocm/bin/rocm_agent_enumerator"):
        try:
            done = subprocess.run([tool], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return set(re.findall(r"^gfx(?!000$)[0-9a-f]+$", done.stdout.decode(), re.MULTILINE))
    return set()


def _with_options(machine: Machine, options: argparse.Namespace) -> Machine:
    """The machine with the values of command-line options in place of the detected ones."""
    torch, hip = options.torch or machine.torch, machine.hip
    if options.torch:
        built = re.search(r"\+rocm(\d+\.\d+)", options.torch)
        hip = built[1] if built else hip
    hip = options.rocm or hip
    if options.torch and not hip:
        raise NoWheel(f"can be chosen for --torch {options.torch} alone.\nGive --rocm too, such as --rocm 6.2.")
    return Machine(options.python or machine.python, torch, hip, tuple(options.gpu or machine.gpus))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _version(text: str) -> str:
    if not advice.minor(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as 2.5 or 6.2.4")
    return text


def add_options(parser: argparse.ArgumentParser) -> None:
    """Command-line options; each overrides one auto-detected value."""
    parser.add_argument(
        "--site", default=SITE, metavar="URL", help="where the wheels are listed" + (" (%(default)s)" if SITE else "")
    )
    parser.add_argument("--python", type=_version, metavar="3.11", help="instead of the running one")
    parser.add_argument("--torch", type=_version, metavar="2.5.1", help="instead of the installed one")
    parser.add_argument("--rocm", type=_version, metavar="6.2", help="instead of the one torch is built for")
    parser.add_argument(
        "--gpu", action="append", metavar="MI300X", help="or gfx942, instead of the ones here; may be repeated"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="which.py", description="Prints the line that installs flash_attn on this machine."
    )
    add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
