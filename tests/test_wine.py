"""The package and the launcher for Windows, run under Wine on the fake driver. docs/windows.md says what that shows.

What repeats a check with another Python or another torch is `long`.

`FLASH_ATTN_WINE_TORCH=1 pytest tests/test_wine.py` also installs PyTorch for Windows, and runs the selftest and more.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import fake_parts
import pytest
import tools
import torch
import wine
from flash_attn.diagnosis.selftest.worker import steps
from launcher_cases import CASES

from rocm_wheels.matrix import versions
from rocm_wheels.matrix.machine import Machine
from rocm_wheels.matrix.plan import make_universal_plan
from rocm_wheels.paths import FLASH_ATTN_SRC
from rocm_wheels.wheel import assemble, launcher, one_file, windows

SUPPORT = Path(__file__).parent / "support"
_STORE_LAUNCHES, _STORE_READER = SUPPORT / "store_launches.py", FLASH_ATTN_SRC / "flash_attn/core/store.py"
TORCH, VERSION = "2.9.1", "2.8.3"
# What torch requires on Windows, by name: pip would take the requirements for this machine's system.
REQUIRED = ["einops", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing-extensions"]
_C10 = """__declspec(dllimport) int hipGetDeviceCount(int *);
__declspec(dllexport) int torch_devices(int *count) { return hipGetDeviceCount(count); }
"""


@dataclass(frozen=True)
class Built:
    """The launcher in `modules`, a driver, another driver with the torch library that imports it, and a third driver of
    the same name."""

    modules: Path
    hip: Path
    other: Path
    torch: Path
    system32: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    if programs := wine.missing():
        tools.missing(f"{programs} missing on this machine: apt-get install wine wine64 maven")
    root = tmp_path_factory.mktemp("wine")
    shutil.rmtree(wine.BYTECODE, ignore_errors=True)
    launcher.build_for_windows(root / "modules", version=VERSION, cache=wine.CACHE)
    # A path with a space, a letter outside of ASCII, and more than 260 characters.
    folder = root / "J\N{LATIN SMALL LETTER O WITH DIAERESIS}rg's torch" / ("long" * 60)
    runtime = (SUPPORT / "ucrtbase.def",)
    hip = wine.compile_library(root / "hip" / "amdhip64_6.dll", "fake_driver.c", folder=SUPPORT, imports=runtime)
    other = wine.compile_library(folder / "amdhip64_7.dll", "fake_driver.c", folder=SUPPORT, imports=runtime)
    (root / "c10.c").write_text(_C10 + wine.ENTRY)
    (root / "amdhip64_7.def").write_text("LIBRARY amdhip64_7.dll\nEXPORTS\n  hipGetDeviceCount\n")
    torch = wine.compile_library(folder / "c10_hip.dll", "c10.c", folder=root, imports=(root / "amdhip64_7.def",))
    system32 = root / "system32" / other.name
    system32.parent.mkdir()
    system32.write_bytes(other.read_bytes() + b"another release")
    return Built(modules=root / "modules", hip=hip, other=other, torch=torch, system32=system32)


def test_the_cases_of_the_launcher(built: Built) -> None:
    done = wine.run(wine.windows(SUPPORT / "launcher_cases.py"), "hip", *map(wine.windows, (built.modules, built.hip)))
    assert done.stdout.splitlines() == [name for name, (_, platforms) in CASES.items() if "hip" in platforms]
    assert done.returncode == 0


_VERSION = """
import ctypes, sys
version, name = ctypes.WinDLL("version"), sys.argv[1]
size = version.GetFileVersionInfoSizeW(name, None)
content = ctypes.create_string_buffer(size)
assert version.GetFileVersionInfoW(name, 0, size, content)
text, length = ctypes.c_wchar_p(), ctypes.c_uint()
for key in sys.argv[2:]:
    block = "\\\\StringFileInfo\\\\040904b0\\\\" + key
    assert version.VerQueryValueW(content, block, ctypes.byref(text), ctypes.byref(length)), key
    print(text.value)
"""


def test_windows_reads_the_version_of_the_launcher(built: Built) -> None:
    texts = {"FileVersion": VERSION, "ProductVersion": VERSION, **launcher.RESOURCE}
    done = wine.run("-c", _VERSION, wine.windows(built.modules / launcher.WINDOWS_FILE_NAME), *texts)
    assert done.stdout.splitlines() == [*texts.values()], done.stderr


@pytest.fixture(scope="module")
def on_linux(kernel_store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The launches of every kernel of the store, as Linux makes them."""
    root = tmp_path_factory.mktemp("linux")
    here = root / "libamdhip64.so.6"
    options = ["-std=c11", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
    compiler = [sys.executable, "-m", "ziglang", "cc", *options, "fake_driver.c", "-o", str(here)]
    subprocess.run(compiler, cwd=SUPPORT, check=True)
    launcher.build(root / "modules", cache=wine.CACHE)
    arguments = (_STORE_LAUNCHES, _STORE_READER, root / "modules", here, kernel_store)
    native = [sys.executable, *map(str, arguments)]
    return subprocess.run(native, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize(
    "python", [pytest.param(each, marks=pytest.mark.long if each != wine.PYTHON else ()) for each in wine.PYTHONS]
)
def test_a_store_is_launched_as_on_linux(python: str, built: Built, on_linux: list[str], kernel_store: Path) -> None:
    """One file of the launcher serves every Python."""
    arguments = (_STORE_LAUNCHES, _STORE_READER, built.modules, built.hip, kernel_store)
    done = wine.run(*map(wine.windows, arguments), python=python)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == on_linux
    assert sum("hipModuleLaunchKernel" in line for line in done.stdout.splitlines()) > 10


def test_the_hip_runtime_is_torchs(built: Built) -> None:
    code = """
import ctypes, sys, _launcher
def bind():
    try:
        return _launcher.bind("hip")
    except _launcher.DriverError as error:
        return str(error)
one, other, torch = sys.argv[1:]
print(bind())
ctypes.CDLL(one)
ctypes.CDLL("\\\\\\\\?\\\\" + other)
print(bind())
ctypes.CDLL("\\\\\\\\?\\\\" + torch)
print(bind())
print(_launcher.devices())
"""
    paths = [wine.windows(path) for path in (built.hip, built.other, built.torch)]
    done = wine.run("-c", code, *paths, path=(built.modules,))
    none, two, bound, devices = done.stdout.splitlines()
    assert none == "no HIP runtime is loaded in this process: torch is not imported, or is not a build for ROCm"
    assert two.startswith("two HIP runtimes are loaded in this process")
    assert paths[0] in two
    assert paths[1] in two
    assert two.endswith(
        "c10_hip.dll, which names torch's own, is not loaded: torch is not imported, or is not a build for ROCm"
    )
    assert bound.removeprefix("\\\\?\\") == paths[1]
    assert len(paths[1]) > 260
    assert devices == "2"


@pytest.fixture(scope="module")
def installed(built: Built, kernel_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for Windows, unpacked."""
    root = tmp_path_factory.mktemp("installed")
    plan = make_universal_plan(
        versions.load(), flash_attn="2.8.3", env={"PYTORCH_ROCM_ARCH": "gfx1030"}, platform="windows",
        machine=Machine(cores=1, available_mib=1024),
    )  # fmt: skip
    library = built.modules / launcher.WINDOWS_FILE_NAME
    raw = assemble.assemble(plan, {"gfx1030": kernel_store}, library, root / "raw")
    with zipfile.ZipFile(windows.repair(raw, root / "dist")) as archive:
        archive.extractall(root / "site")
    return root / "site"


@dataclass(frozen=True, kw_only=True)
class MachineOfDoctor:
    """A torch as its version.py describes it, its GPUs, which of the drivers it loads, and what the doctor says."""

    version: str
    hip: str | None = None
    cuda: str | None = None
    gpus: tuple[tuple[str, str, int], ...] = ()
    loads: tuple[str, ...] = ()
    says: tuple[str, ...]
    exit_code: int = 1

    def write(self, directory: Path, built: Built) -> None:
        """Writes the torch into a directory. Without a version, the directory stays empty."""
        directory.mkdir(parents=True)
        if not self.version:
            return
        (directory / "torch").mkdir()
        (directory / "torch/__init__.py").write_bytes((SUPPORT / "torch_stand_in.py").read_bytes())
        own = directory / "_rocm_sdk_core" / "bin"
        own.mkdir(parents=True)
        shutil.copyfile(built.other, own / built.other.name)
        facts = {
            "__version__": self.version, "debug": False, "cuda": self.cuda, "git_version": "0" * 40, "hip": self.hip,
            "rocm": None, "xpu": None, "GPUS": self.gpus,
            "LIBRARIES": ["\\\\?\\" + wine.windows(getattr(built, name)) for name in self.loads],
        }  # fmt: skip
        lines = [f"{name} = {value!r}\n" for name, value in facts.items()]
        (directory / "torch/version.py").write_text("".join(lines))


_RX_6800 = ("AMD Radeon RX 6800 XT", "gfx1030", 16368)
_INSIDE = ("AMD Radeon(TM) Graphics", "gfx1036", 512)
_AMD_TORCH = "torchaudio --index-url https://repo.amd.com/rocm/whl-multi-arch/`"
MACHINES = {
    "none": MachineOfDoctor(
        version="", says=("torch           none that loads", "No torch: torch is not installed", _AMD_TORCH)
    ),
    "cuda": MachineOfDoctor(
        version="2.12.0", cuda="13.0", says=("torch 2.12.0 (CUDA 13.0) is not", "uninstall -y torch", _AMD_TORCH)
    ),
    "cpu": MachineOfDoctor(version="2.12.0+cpu", says=("torch 2.12.0+cpu is not", "uninstall -y torch", _AMD_TORCH)),
    "one-runtime": MachineOfDoctor(
        version="2.12.0+rocm7.14.0", hip="7.14.60850", gpus=(_RX_6800,), loads=("torch",), exit_code=0,
        says=("device          AMD Radeon RX 6800 XT, gfx1030, 16368 MiB", "amdhip64_7.dll", "nothing is wrong"),
    ),
    "two-runtimes": MachineOfDoctor(
        version="2.12.0+rocm7.14.0", hip="7.14.60850", gpus=(_RX_6800,), loads=("hip", "torch"), exit_code=0,
        says=("amdhip64_6.dll", "amdhip64_7.dll", "nothing is wrong"),
    ),
    "other-gpu": MachineOfDoctor(
        version="2.12.0+rocm7.14.0", hip="7.14.60850", gpus=(("RX 7800 XT", "gfx1101", 16368),), loads=("torch",),
        says=(
            "a GPU here is a gfx1101, the wheel is for gfx1030", "-m pip install triton-windows`",
            "PYTORCH_ROCM_ARCH=gfx1101 ./build_rocm.sh 2.8.3 --platform windows",
        ),
    ),
    "vega": MachineOfDoctor(
        version="2.12.0+rocm7.14.0", hip="7.14.60850", gpus=(("AMD Radeon VII", "gfx906", 16368),), loads=("torch",),
        says=("a GPU here is a gfx906, the wheel is for gfx1030", "no wheel has kernels for it"),
    ),
    "card-and-processor": MachineOfDoctor(
        version="2.12.0+rocm7.14.0", hip="7.14.60850", gpus=(_INSIDE, _RX_6800), loads=("torch",),
        says=("GPU 0 is AMD Radeon(TM) Graphics, gfx1036", '`$env:HIP_VISIBLE_DEVICES = "1"` (PowerShell)'),
    ),
    "windows-runtime": MachineOfDoctor(
        version="2.12.0+rocm7.14.0", hip="7.14.60850", gpus=(_RX_6800,), loads=("system32", "torch"),
        says=("torch uses ", "amdhip64_7.dll, which differs from its own ", "_rocm_sdk_core"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        ("none", "two-runtimes", "other-gpu", "card-and-processor", "windows-runtime"),
        pytest.param(("cuda", "cpu", "one-runtime", "vega"), marks=pytest.mark.long),
    ],
)
def test_the_doctor(names: tuple[str, ...], built: Built, installed: Path, tmp_path: Path) -> None:
    for name in names:
        MACHINES[name].write(tmp_path / name, built)
    script = SUPPORT / "doctor_machines.py"
    done = wine.run(*map(wine.windows, (script, *(tmp_path / name for name in names))), path=(installed,))
    outputs = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    assert outputs.keys() == {*names}, done.stderr
    for name in names:
        machine = MACHINES[name]
        *lines, exit_code = outputs[name].splitlines()
        text = "\n".join(lines)
        for words in machine.says:
            assert words in text, f"{name}: {text}"
        assert int(exit_code) == machine.exit_code, text
        assert "targets         gfx1030" in text
        assert wine.windows(installed / "flash_attn") in text
        assert not re.search(r"Traceback|lacks|kfd|\b(sudo|export|unset)\b", text), text
        assert ("differs" in text) == (name == "windows-runtime"), text
    for output in filter(None, map(outputs.get, ("one-runtime", "two-runtimes"))):
        (library,) = (line for line in output.splitlines() if line.startswith("library"))
        assert library.endswith("amdhip64_7.dll")  # torch's


_ADAPTERS = r"""
import sys, types, winreg
package = types.ModuleType("flash_attn")  # without its __init__, which needs torch
package.__path__ = [sys.argv[1]]
sys.modules["flash_attn"] = package
from flash_attn.core.platform import PLATFORM, windows

def put(number, maker, version, name):
    with winreg.CreateKey(winreg.HKEY_LOCAL_MACHINE, windows._ADAPTERS + "\\" + number) as key:
        for field, text in (("ProviderName", maker), ("DriverVersion", version), ("DriverDesc", name)):
            winreg.SetValueEx(key, field, 0, winreg.REG_SZ, text)

AMD = "Advanced Micro Devices, Inc."
ADDED = ("9000", "NVIDIA", "32.0.15", "NVIDIA GeForce RTX 3060"), ("9001", AMD, "32.0.21", "AMD Radeon(TM) Graphics")
for adapter in ADDED + (("9002", AMD, "32.0.21", "AMD Radeon RX 7800 XT"),):
    put(*adapter)
    print(PLATFORM.gpu_driver())
windows._attached = lambda: {"9001"}  # the card was taken out
print(PLATFORM.gpu_driver())
for number in ("9000", "9001", "9002"):
    winreg.DeleteKey(winreg.HKEY_LOCAL_MACHINE, windows._ADAPTERS + "\\" + number)
"""


def test_the_driver_line_is_that_of_the_card_that_is_there() -> None:
    """Keys of display adapters stay in the registry when a card is taken out."""
    done = wine.run("-c", _ADAPTERS, wine.windows(FLASH_ATTN_SRC / "flash_attn"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "32.0.15 (NVIDIA GeForce RTX 3060)",
        "32.0.21 (AMD Radeon(TM) Graphics)",
        "32.0.21 (AMD Radeon RX 7800 XT)",
        "32.0.21 (AMD Radeon(TM) Graphics)",
    ]


def test_the_messages_of_windows(
    built: Built, installed: Path, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    """Every message of the doctor, and those of calls, the launcher and the selftest, as they are on Windows. The file
    was read: each is true there."""
    machine = replace(MACHINES["one-runtime"], gpus=(), loads=())
    machine.write(tmp_path / "torch", built)
    runtimes = (built.hip, built.system32)
    paths = (SUPPORT / "windows_messages.py", tmp_path / "torch", *runtimes)
    made_up = FLASH_ATTN_SRC / "tests"
    done = wine.run(*map(wine.windows, paths), path=(installed, made_up))
    assert done.returncode == 0, done.stderr
    golden("messages_on_windows.txt", done.stdout)


_PORTABLE = """
import multiprocessing, sys, sysconfig

def bound(path):
    import ctypes
    from flash_attn.core.build_info import VERSION
    import flash_attn._launcher as launcher
    ctypes.CDLL(path)
    return VERSION, launcher.bind("hip") == path, sys.flags.no_user_site

if __name__ == "__main__":
    print(sys.executable)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.apply(bound, sys.argv[1:]))
"""


@pytest.mark.long
def test_a_portable_python_as_comfyui_has_it(built: Built, installed: Path, tmp_path: Path) -> None:
    """A Python with a file ._pth reads neither variables nor the user's packages. Another process is spawned."""
    embedded = tmp_path / "ComfyUI windows" / "python_embeded"
    shutil.copytree(wine.directory_of(wine.PYTHON), embedded, copy_function=os.link)
    packages = embedded / "Lib" / "site-packages"
    shutil.copytree(installed, packages)
    (embedded / "python312._pth").write_text("lib\nDLLs\nLib\\site-packages\n..\nimport site\n")
    MACHINES["cpu"].write(tmp_path / "torch", built)
    shutil.copytree(tmp_path / "torch", packages, dirs_exist_ok=True)
    (embedded.parent / "portable.py").write_text(_PORTABLE)
    script = wine.windows(embedded.parent / "portable.py")
    done = wine.run("-m", "flash_attn.doctor", portable=embedded)
    assert "torch 2.12.0+cpu is not" in done.stdout, done.stderr
    assert f'`& "{wine.windows(embedded)}\\python.exe" -m pip uninstall -y torch' in done.stdout
    assert "type them without the &" in done.stdout
    done = wine.run(script, wine.windows(built.hip), portable=embedded)
    assert done.stdout.splitlines() == [wine.windows(embedded / "python.exe"), "2.8.3 True 1"], done.stderr
    shutil.rmtree(packages / "flash_attn")  # the one file brings its own
    one_file.write("gfx1201", "2.8.3", fake_parts.store(tmp_path, "gfx1201"), embedded.parent / "firstlight.py")
    done = wine.run(wine.windows(embedded.parent / "firstlight.py"), portable=embedded)
    sees = f'torch sees no GPU: `& "{wine.windows(embedded)}\\python.exe" -m flash_attn.doctor` says why'
    assert sees in done.stderr, done.stderr
    assert done.returncode == 2


def test_the_stand_in_of_torch_has_the_names_of_torch() -> None:
    names = set(re.findall(r"^(\w+)(?:: .*)? = ", (Path(torch.__path__[0]) / "version.py").read_text(), re.MULTILINE))
    assert names == {"__all__", "__version__", "debug", "cuda", "git_version", "hip", "rocm", "xpu"}


_CALLS = """
import ctypes, os, sys
import torch, flash_attn
from flash_attn.core.platform import PLATFORM
assert PLATFORM.libraries() == []
ctypes.CDLL(sys.argv[1])
assert PLATFORM.libraries() == [sys.argv[1]], PLATFORM.libraries()
assert PLATFORM.available_mib() > 100
assert PLATFORM.cache_directory(os.environ).parts[-3:] == ("AppData", "Local", "flash_attn")
torch.manual_seed(0)
inputs = [torch.randn(2, 60, 4, 64, requires_grad=True) for _ in range(3)]
exact = [x.detach().clone().requires_grad_() for x in inputs]
dout = torch.randn(2, 60, 4, 64)
out = flash_attn.flash_attn_func(*inputs, causal=True)
heads_first = [x.transpose(1, 2) for x in exact]
wanted = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
for x in (out, wanted):
    x.backward(dout)
pairs = [(out, wanted), *((x.grad, y.grad) for x, y in zip(inputs, exact))]
errors = [float((got - right).abs().max().detach()) for got, right in pairs]
assert max(errors) < 1e-5, errors
print("ended", flash_attn.backend_info()["targets"])
"""


needs_torch = pytest.mark.skipif(
    not os.environ.get("FLASH_ATTN_WINE_TORCH"), reason="PyTorch for Windows takes 550 MB: set FLASH_ATTN_WINE_TORCH=1"
)


@pytest.fixture(scope="module")
def packages() -> Path:
    """PyTorch for Windows, for CPUs."""
    directory = wine.HOME / f"torch-{TORCH}"
    if not directory.is_dir():
        options = ["--platform", "win_amd64", "--python-version", "3.12", "--only-binary", ":all:"]
        pip = [sys.executable, "-m", "pip", "install", "-q", *options, "--no-deps", "--target", str(directory)]
        subprocess.run([*pip, f"torch=={TORCH}", *REQUIRED], check=True)
    return directory


@needs_torch
def test_calls_on_the_cpu(built: Built, installed: Path, packages: Path) -> None:
    done = wine.run("-W", "ignore", "-c", _CALLS, wine.windows(built.hip), path=(installed, packages), seconds=300)
    assert done.stdout.splitlines()[-1] == "ended ['gfx1030']", done.stdout + done.stderr


@needs_torch
def test_the_selftest_on_the_cpu(installed: Path, packages: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ("-W", "ignore", "-m", "flash_attn.selftest", "--cpu", "--json", wine.windows(report))
    done = wine.run(*words, path=(installed, packages), seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(report.read_text())
    assert (result["ok"], result["trouble"], result["machine"]["torch"]) == (True, "", f"{TORCH}+cpu")
    assert len(result["checks"]) == len(steps(on_cpu=True, repeats=2)) - len(result["speed"])
    assert all(line["sdpa_forward_ms"] > 0 for line in result["speed"])


@needs_torch
def test_the_node_for_comfyui(installed: Path, packages: Path) -> None:
    """On the stand-in of ComfyUI. The cases import flash_attn from the sources."""
    words = ("-W", "ignore", wine.windows(SUPPORT / "comfy_cases.py"), wine.windows(SUPPORT / "comfy_stand_in"))
    done = wine.run(*words, path=(installed, packages), seconds=300)
    assert len(done.stdout.split()) >= 11, done.stdout + done.stderr


_INTERFACES = """
import torch, flash_attn, flash_attn.cute, flash_attn_interface, sageattention
q, k, v = (torch.randn(2, 64, 4, 64) for _ in range(3))
heads_first = [x.transpose(1, 2) for x in (q, k, v)]
wanted = torch.nn.functional.scaled_dot_product_attention(*heads_first)
def error(out):
    return float((out.float() - wanted).abs().max())
for module in (flash_attn, flash_attn_interface, flash_attn.cute):
    out = module.flash_attn_func(q, k, v)
    print(module.__name__, error((out[0] if isinstance(out, tuple) else out).transpose(1, 2)) < 1e-5)
print("sageattention", error(sageattention.sageattn(*(x.half() for x in heads_first))) < 5e-2)
def attend(q, k, v):
    return flash_attn.flash_attn_func(q * 2, k, v)
compiled = torch.compile(attend, backend="aot_eager")
print("aot_eager", torch.equal(compiled(q, k, v), attend(q, k, v)))
torch._dynamo.reset()
try:
    torch.compile(attend)(q, k, v)
except Exception as failure:
    print("inductor", "Compiler: cl is not found" in str(failure))
"""


@needs_torch
def test_the_other_wheels_and_torch_compile(installed: Path, packages: Path, tmp_path: Path) -> None:
    """flash-attn-3, flash-attn-4 and sageattention are of Python modules alone. Inductor needs cl.exe for a CPU."""
    data = versions.load()
    plan = make_universal_plan(data, flash_attn="2.8.3", env={}, machine=Machine(cores=1, available_mib=1024))
    shutil.copytree(installed, tmp_path / "site")
    for name in ("flash_attn_3", "flash_attn_4", "sageattention"):
        with zipfile.ZipFile(assemble.assemble_interface(data.interfaces[name], plan, tmp_path)) as archive:
            archive.extractall(tmp_path / "site")
    done = wine.run("-W", "ignore", "-c", _INTERFACES, path=(tmp_path / "site", packages), seconds=300)
    names = ("flash_attn", "flash_attn_interface", "flash_attn.cute", "sageattention", "aot_eager", "inductor")
    assert done.stdout.splitlines() == [f"{name} True" for name in names], done.stdout + done.stderr
