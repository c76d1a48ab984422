"""Prints the line that installs flash_attn on this machine, or says why there is none.

Standard library only, and one file: the site of the wheels serves a copy that knows its address (RUN has the commands).
The line goes to stdout, all else to stderr. Exit code 0 with a line, 1 without one, 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import platform
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

SITE = ""  # the address of the site that serves this copy
TIMEOUT_SECONDS = 20
BACKENDS = ("ck", "triton")  # the default first
AMD_INDEX = "https://repo.amd.com/rocm/whl-multi-arch/"  # of torch for Windows
OLDEST_TORCH = "2.5"  # the oldest torch that the universal wheel supports
# System -> the commands that run the copy of a site. In PowerShell `curl` is another command, and a pipe encodes what
# it carries again.
RUN = {
    "linux": ("curl -sSf {site}which.py | python -",),
    "windows": ("curl.exe -sSfO {site}which.py", "python which.py"),
}
# The line that installs ROCm's torch on Windows, after pip's own words.
WINDOWS_TORCH = f'install "torch[device-all]" "torchvision[device-all]" torchaudio --index-url {AMD_INDEX}'
# The command that the page to choose a wheel on asks its visitors to run.
PASTE_COMMAND = (
    'python -c "import platform, torch; c = torch.cuda; print('
    "'system=' + platform.system(), "
    "'python=' + platform.python_version(), 'torch=' + torch.__version__, 'hip=%s' % torch.version.hip, "
    "'gpu=' + ','.join(c.get_device_properties(i).gcnArchName for i in range(c.device_count())))\""
)

if TYPE_CHECKING:  # A Python that is too old for the wheels gets a message instead of a TypeError.
    Wheel = dict[str, Any]


class Machine(NamedTuple):
    """Versions as their owners print them ("3.11.7", "2.5.1+rocm6.2", "6.2.41133"); None: not installed."""

    python: str
    torch: str | None
    hip: str | None
    rocm: str | None
    gpus: tuple[str, ...]

    @property
    def wanted(self) -> dict[str, Any]:
        """The minor versions that a wheel is chosen by."""
        return {
            "python": minor(self.python),
            "torch": minor(self.torch or ""),
            "rocm": minor(self.hip or ""),
            "gpus": list(self.gpus),
        }


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
        check_platform()
        site = load(options.site)
        machine = machine._replace(gpus=tuple(target(site, gpu) for gpu in machine.gpus))
        _say(f"found    {describe(machine)}")
        check_torch(machine, site)
        site["wheels"] = [wheel for wheel in site["wheels"] if wheel["platform"] == system()]
        wheel, others = choose(site["wheels"], {**machine.wanted, "backend": options.backend})
        if wheel is None:
            raise NoWheel(explain(site, machine, options.backend, others))
    except NoWheel as problem:
        _say(f"no wheel {problem}")
        return 1
    verdict = wheel["verdict"]
    _say(f"wheel    {wheel['name']}")
    ran = "nothing ran it" if verdict["ran_on"] == "nothing" else f"passed its tests on {verdict['ran_on']}"
    _say(f"verdict  {ran} (GPU: {verdict['gpu']})")
    for gpu in machine.gpus:
        if gpu not in wheel["targets"]:
            _say(f"note     the wheel has no kernels for the {gpu} of this machine")
        elif gpu in site["targets"] and not fitting(site, {**machine.wanted, "gpus": [gpu]}):
            since = min(site["targets"][gpu].values(), key=numbers)
            _say(f"note     its kernels for {gpu} need torch for ROCm {since} or newer, and this torch is older")
    print(pip_line(site, wheel))
    return 0


def detect() -> Machine:
    """This machine as the running Python sees it, without importing torch."""
    torch, hip = _torch()
    return Machine(python=platform.python_version(), torch=torch, hip=hip, rocm=_rocm(), gpus=_gpus())


def describe(machine: Machine) -> str:
    """The machine as one line for users."""
    gpus = ", ".join(machine.gpus) or "no AMD GPU"
    torch, hip, rocm = (version or "none" for version in (machine.torch, machine.hip, machine.rocm))
    return f"Python {machine.python}, torch {torch}, HIP of torch {hip}, ROCm {rocm}, {gpus}"


def system() -> str:
    """The system as the site's list names it."""
    return "windows" if sys.platform == "win32" else sys.platform


def check_platform() -> None:
    """Raises NoWheel on a system for which there are no wheels."""
    if system() not in ("linux", "windows") or platform.machine() not in ("x86_64", "AMD64"):
        raise NoWheel(f"the wheels are for Linux and Windows on x86_64, this is {sys.platform} on {platform.machine()}")


def pip() -> str:
    """How the pip of the running Python is started. On Windows a portable Python is not in PATH."""
    if system() != "windows":
        return "pip"
    return f'& "{sys.executable}" -m pip' if " " in sys.executable else f"{sys.executable} -m pip"


def check_torch(machine: Machine, site: dict[str, Any]) -> None:
    """Raises NoWheel, with the line that installs ROCm's torch, if this Python has no ROCm torch."""
    if machine.hip is not None and machine.torch is not None:
        return
    what = f"torch {machine.torch} is not built for ROCm" if machine.torch else "torch is not installed"
    if system() == "windows":
        gone = f"{pip()} uninstall -y torch torchvision torchaudio\ntorch    " if machine.torch else ""
        line = f"{gone}{pip()} {WINDOWS_TORCH}"
    else:
        line = torch_line(site, minor(machine.torch or ""), minor(machine.rocm or ""))
    raise NoWheel(f"fits: {what} in this Python ({sys.executable})\ntorch    {line}\nthen     run this again")


def torch_line(site: dict[str, Any], torch: str, rocm: str) -> str:
    """The line that installs ROCm's torch: of that minor version, else the newest one for that ROCm, else the newest.

    It has the label of torch's version: without the label, pip keeps another build of the same version.
    """
    known = site["torch"]
    fit = [torch] if torch in known else [name for name in known if rocm in known[name]["rocm"]]
    release = known[max(fit or known, key=numbers)]
    directory = release["rocm"].get(rocm) or release["rocm"][max(release["rocm"], key=numbers)]
    return (
        f'pip install "torch=={release["full"]}+{directory}" --index-url https://download.pytorch.org/whl/{directory}'
    )


def target(site: dict[str, Any], name: str) -> str:
    """The GPU target of a name that a user types: gfx942:sramecc+:xnack-, MI300X, "RX 7900 XTX". Raises NoWheel for an
    unknown name.
    """
    plain = re.sub(r"amd|instinct|radeon|pro|[^a-z0-9]", "", name.split(":")[0].lower())
    if re.fullmatch(r"gfx[0-9a-f]{3,5}", plain):
        return plain
    products = site.get("products", {})
    found = products.get(plain) or products.get(f"rx{plain}") or products.get(f"mi{plain}")
    if found is None:
        raise NoWheel(
            f"fits: {name!r} is no GPU that is known here, only {', '.join(site['targets'])} and their products"
        )
    return str(found)


def load(site: str) -> dict[str, Any]:
    """The site's metadata.json. Raises NoWheel without a site or without its answer."""
    if not site:
        raise NoWheel("no site of wheels is named\nGive --site URL, or build a wheel: ./build_rocm.sh")
    url = urllib.parse.urljoin(site.rstrip("/") + "/", "metadata.json")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            content = json.loads(answer.read())
        if content["format"] != 1:
            raise NoWheel(f"{url} has format {content['format']}\nGet the which.py of that site.")
        return dict(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoWheel(f"{url} gave no list of wheels: {error}") from error


def choose(wheels: list[Wheel], wanted: dict[str, Any]) -> tuple[Wheel | None, list[Wheel]]:
    """The wheel for these versions, newest flash-attn first, or None; and the other wheels, nearest first.

    wanted: python, torch and rocm as minor versions, gpus (any of them is sufficient) and backend (or None).
    """
    there = [wheel for wheel in wheels if wheel["yanked"] is None]
    ordered = sorted(there, key=lambda wheel: (distance(wheel, wanted), _preference(wheel)))
    if ordered and distance(ordered[0], wanted)[:2] == (0, 0):
        return ordered[0], []
    return None, ordered


def distance(wheel: Wheel, wanted: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """Sort key for how far a wheel is from the wanted one: the GPU, the number of axes, then the steps in torch, ROCm
    and Python.
    """
    gpus, backend = wanted["gpus"], wanted.get("backend")
    steps = [_off(wheel, wanted, axis) for axis in ("torch", "rocm", "python")]
    other_gpu = bool(gpus) and not set(gpus) & set(wheel["targets"])
    other_backend = bool(backend) and backend != wheel["backend"]
    return (int(other_gpu), sum(step > 0 for step in steps) + other_backend, *steps)  # type: ignore[return-value]


def is_universal(wheel: Wheel) -> bool:
    """Whether it is the universal wheel, for every ROCm, every torch from OLDEST_TORCH on, and every Python from its
    own on.
    """
    return not wheel["torch"]


def _off(wheel: Wheel, wanted: dict[str, Any], axis: str) -> int:
    """Steps between the wheel's version and the wanted one, 0 if the wheel fits."""
    if not is_universal(wheel):
        return _steps(wheel[axis], wanted[axis])
    oldest = {"torch": OLDEST_TORCH, "rocm": "", "python": wheel["python"]}[axis]
    if not wanted[axis] or (oldest and numbers(wanted[axis]) < numbers(oldest)):
        return _steps(oldest or "1.0", wanted[axis])
    return 0


def explain(site: dict[str, Any], machine: Machine, backend: str | None, nearest: list[Wheel]) -> str:
    """The reason why there is no wheel, the nearest wheel, and a remedy."""
    wanted = machine.wanted
    cell = f"Python {wanted['python']}, torch {wanted['torch']}, ROCm {wanted['rocm']}"
    cell += "".join(f", {gpu}" for gpu in wanted["gpus"]) + (f", backend {backend}" if backend else "")
    lines = [f"is published for {cell}" if nearest else "is published yet"]
    wanted["backend"] = backend
    lines += [
        f"withdrawn {wheel['name']}: {wheel['yanked']}"
        for wheel in site["wheels"]
        if wheel["yanked"] is not None and distance(wheel, wanted)[:2] == (0, 0)
    ]
    if system() == "windows":
        why = unserved(site, wanted)
        lines.append(f"reason   {why}" if why else f"build    {windows_build_line(site, wanted)}  # on Linux or in WSL")
        return "\n".join(lines)
    if nearest:
        wheel = nearest[0]
        other_gpu, _, *off = distance(wheel, wanted)
        lines.append(f"nearest  {describe_wheel(wheel)}: {wheel['name']}")
        if not other_gpu and not off[2] and any(off) and not is_universal(wheel):
            line = torch_line(site, wheel["torch"], wheel["rocm"])
            lines.append(f"torch    {line}  # that wheel needs this torch; then run this again")
    why = impossible(site, wanted)
    if why:
        lines.append(f"reason   {why}")
    else:
        lines.append(f"build    {build_line(site, wanted)}  # in a clone of {site['repository']}")
    if not why or wanted["torch"] not in site["torch"]:
        fields = {
            **wanted,
            "gpu": ",".join(wanted["gpus"]),
            "backend": backend or default_backend(site, wanted["gpus"]),
        }
        lines.append(f"request  {request_url(site, fields)}")
    return "\n".join(lines)


def default_backend(site: dict[str, Any], gpus: Sequence[str]) -> str:
    """The default backend of a build: ck, unless it has kernels for none of these GPUs."""
    served = not gpus or any(BACKENDS[0] in site["targets"].get(gpu, {}) for gpu in gpus)
    return BACKENDS[0] if served else BACKENDS[-1]


def describe_wheel(wheel: Wheel) -> str:
    """The versions that a wheel supports, for users."""
    if is_universal(wheel):
        versions = f"Python {wheel['python']} and newer, torch {OLDEST_TORCH} and newer, every ROCm"
    else:
        versions = f"Python {wheel['python']}, torch {wheel['torch']}, ROCm {wheel['rocm']}"
    return f"{versions}, {wheel['backend']}, {', '.join(wheel['targets'])}"


def fitting(site: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The wanted GPUs that a wheel of these versions can have kernels for: of its backend, or of Triton, which every
    wheel has.

    Empty if the requested backend supports none of these GPUs.
    """
    backend, rocm = wanted.get("backend"), numbers(wanted["rocm"])
    since = {gpu: site["targets"].get(gpu, {}) for gpu in wanted["gpus"]}
    fit = [
        gpu
        for gpu, oldest in since.items()
        if any(name in oldest and numbers(oldest[name]) <= rocm for name in (backend or BACKENDS[0], "triton"))
    ]
    return fit if not backend or any(backend in since[gpu] for gpu in fit) else []


def impossible(site: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The reason why build_rocm.sh would refuse these versions, or "" if it builds them. The site's page has the same
    rule.
    """
    release, backend = site["torch"].get(wanted["torch"]), wanted.get("backend")
    if release is None:
        return f"torch {wanted['torch']} is not known here, only {', '.join(site['torch'])}."
    if wanted["rocm"] not in release["rocm"]:
        there = ", ".join(release["rocm"])
        return f"PyTorch's index has no torch {wanted['torch']} for ROCm {wanted['rocm']}, only for {there}."
    if wanted["python"] not in release["python"]:
        there = ", ".join(release["python"])
        return f"With torch {wanted['torch']} these wheels are for Python {there}, not for {wanted['python']}."
    if not wanted["gpus"] or fitting(site, wanted):
        return ""
    why = []
    for gpu in wanted["gpus"]:
        oldest = site["targets"].get(gpu)
        if oldest is None:
            why.append(f"{gpu} (none at all)")
        elif backend and backend not in oldest:
            why.append(f"{gpu} (none of {backend})")
        else:
            why.append(f"{gpu} (from ROCm {oldest.get(backend or BACKENDS[0], oldest['triton'])} on)")
    return f"There are no kernels for {', '.join(why)}."


def unserved(site: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The reason why no wheel for Windows can serve these GPUs or this backend, or "". The site's page has the same
    rule.
    """
    gpus, backend = wanted["gpus"], wanted.get("backend")
    if backend and backend != "triton":
        return f"A wheel for Windows has Triton kernels alone, none of {backend}."
    if gpus and not set(gpus) & set(site["windows"]):
        return f"AMD's torch for Windows does not serve {', '.join(gpus)}."
    return ""


def windows_build_line(site: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The command that builds the newest universal wheel for Windows, on Linux."""
    fit = [gpu for gpu in wanted["gpus"] if gpu in site["windows"]]
    targets = f'PYTORCH_ROCM_ARCH="{";".join(fit)}" ' if fit else ""
    return f"{targets}./build_rocm.sh {wanted.get('flash_attn') or site['flash_attn'][-1]} --platform windows"


def build_line(site: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The command that builds the newest flash-attn for these versions, which must be possible."""
    torch, fit, backend = site["torch"][wanted["torch"]]["full"], fitting(site, wanted), wanted.get("backend")
    line = f"./build_rocm.sh {site['flash_attn'][-1]} {wanted['python']} {torch} {wanted['rocm']}"
    targets = f'PYTORCH_ROCM_ARCH="{";".join(fit)}" ' if fit else ""
    return targets + line + (f" --backend {backend}" if backend else "")


def request_url(site: dict[str, Any], fields: dict[str, str]) -> str:
    """The issue form that requests a combination, with its fields filled in."""
    known = ("python", "torch", "rocm", "gpu", "backend")
    query = {"template": "request_wheel.yml", **{name: fields[name] for name in known if fields.get(name)}}
    return f"{site['repository']}/issues/new?{urllib.parse.urlencode(query)}"


def pip_line(site: dict[str, Any], wheel: Wheel) -> str:
    """pip's command. The exact version is only on that index; its dependencies come from pip's usual index."""
    return f'{pip()} install "flash_attn=={wheel["version"]}" --extra-index-url {site["url"]}{wheel["index"]}'


def standalone(site: str) -> str:
    """This file as the site at that address serves it."""
    source, place = Path(__file__).read_text(encoding="utf-8"), 'SITE = ""'
    if source.count(f"\n{place} ") != 1:
        raise AssertionError(f"{__file__} has no line {place}")
    return source.replace(f"\n{place} ", f"\nSITE = {json.dumps(site)} ", 1)


def minor(version: str) -> str:
    """The minor version: "2.5.1+rocm6.2" gives 2.5; "" if there is none."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else ""


def numbers(version: str) -> list[int]:
    """Sort key of a dotted version, or of a post release such as 2.8.3.post2."""
    return [int(part) for part in version.replace(".post", ".").split(".")]


def _steps(ours: str, theirs: str) -> int:
    """The distance of two minor versions; a major version counts as 100 minor ones."""
    if not theirs:
        return 1
    (major, minor_), (other_major, other_minor) = numbers(ours)[:2], numbers(theirs)[:2]
    return abs(100 * (major - other_major) + minor_ - other_minor)


def _preference(wheel: Wheel) -> tuple[list[int], list[int], bool, int]:
    """Sort key: the newest release, before its post releases, in the universal wheel."""
    release, post = numbers(wheel["flash_attn"])[:3], numbers(wheel["flash_attn"])[3:]
    return [-part for part in release], post, not is_universal(wheel), BACKENDS.index(wheel["backend"])


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


def _rocm() -> str | None:
    """The version of the ROCm installed on this machine."""
    root = Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
    try:
        return (root / ".info" / "version").read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _gpus(nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> tuple[str, ...]:
    """gfx targets from the kernel driver, else from ROCm's own tool."""
    found = set()
    for properties in sorted(nodes.glob("*/properties")):
        try:
            versions = re.findall(r"^gfx_target_version (\d+)$", properties.read_text(), re.MULTILINE)
        except OSError:  # a container may see the device file of a GPU that it must not use
            continue
        for version in map(int, versions):
            major, rest = divmod(version, 10000)
            if version:
                found.add(f"gfx{major}{rest // 100:x}{rest % 100:x}")
    return tuple(sorted(found or _enumerated()))


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
    given: dict[str, Any] = {}
    if options.python:
        given["python"] = options.python
    if options.torch:
        given["torch"] = options.torch
        built = re.search(r"\+rocm(\d+\.\d+)", options.torch)
        given["hip"] = built[1] if built else machine.hip
    if options.rocm:
        given["hip"] = options.rocm
    if options.torch and not given["hip"]:
        raise NoWheel(f"can be chosen for --torch {options.torch} alone\nGive --rocm too, such as --rocm 6.2.")
    if options.gpu:
        given["gpus"] = tuple(options.gpu)
    return machine._replace(**given)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _version(text: str) -> str:
    if not minor(text):
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
    parser.add_argument("--backend", choices=BACKENDS, help="only this one")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="which.py", description="Prints the line that installs flash_attn on this machine."
    )
    add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
