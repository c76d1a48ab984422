"""The libraries that use flash_attn, for real, on its wheel: environments made by uv with the pins of clients/*.txt.

Needs the package index. With a GPU, run the scripts of clients/ by hand instead: they use it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import fake_parts
import pytest

from rocm_wheels.matrix import versions
from rocm_wheels.matrix.machine import Machine
from rocm_wheels.matrix.plan import make_universal_plan
from rocm_wheels.wheel import assemble, hub

_TESTS = Path(__file__).resolve().parent
VERSIONS = ("2.6.3", "2.7.4", "2.8.3")
OF_EVERY_VERSION = [*(pytest.param(each, marks=pytest.mark.long) for each in VERSIONS[:-1]), VERSIONS[-1]]
INTERFACES = ("flash_attn_3", "flash_attn_4", "sageattention")
LABEL = "rocm62torch2.5triton"


def _run(*command: str | Path, **environment: str) -> str:
    """Runs a command. Returns its standard output. Fails with the end of its error output."""
    variables = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **environment,
    }
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


class Clients:
    """Wheels of every version, and environments with clients in them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.wheel = cache(self._wheel)
        self.interface = cache(self._interface)
        self.unpacked = cache(self._unpacked)
        self.environment = cache(self._environment)

    def _wheel(self, version: str) -> Path:
        return self._built(_TESTS.parent, version)

    def _interface(self, name: str) -> Path:
        """The wheel of flash-attn-3, flash-attn-4 or sageattention."""
        return self._built(_TESTS.parent / name, VERSIONS[-1])

    def _built(self, source: Path, version: str) -> Path:
        dist = self.directory / "dist" / source.name / version
        _run(
            *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"),
            *("--outdir", dist, source),
            FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE",
            FLASH_ATTN_VERSION=version,
            FLASH_ATTN_LOCAL_VERSION=LABEL,
        )
        (wheel,) = dist.glob("*.whl")
        return wheel

    def _unpacked(self, version: str) -> Path:
        target = self.directory / "unpacked" / version
        with zipfile.ZipFile(self.wheel(version)) as archive:
            archive.extractall(target)
        return target

    def _environment(self, group: str) -> Path:
        """The Python of an environment with pinned clients and the newest wheels; torch and the rest are this one's."""
        venv = self.directory / group
        _run(sys.executable, "-m", "uv", "venv", "--quiet", "--seed", "--python", sys.executable, venv)
        (site,) = (venv / "lib").glob("python3.*/site-packages")
        (site / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
        python = venv / "bin" / "python"
        # uv does not see the torch that the .pth file adds, so nothing may require it.
        overrides = self.directory / f"{group}-overrides.txt"
        overrides.write_text('torch ; python_version < "3"', encoding="utf-8")
        install = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python)
        _run(*install, "--overrides", overrides, "-r", _TESTS / "clients" / f"{group}.txt")
        _run(*install, "--no-deps", self.wheel(VERSIONS[-1]), *map(self.interface, INTERFACES))
        return python

    def run(self, group: str, script: str, *arguments: str, version: str = VERSIONS[-1], **environment: str) -> str:
        """A script of clients/ under one version of flash_attn."""
        python = self.environment(group)
        path = {} if version == VERSIONS[-1] else {"PYTHONPATH": str(self.unpacked(version))}
        return _run(python, _TESTS / "clients" / script, *arguments, **path, **environment)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Clients:
    return Clients(tmp_path_factory.mktemp("clients"))


@pytest.mark.parametrize(
    ("version", "implementation", "models"),
    [
        pytest.param(4, "flash_attention_2", 3, marks=pytest.mark.long),
        pytest.param(4, "flash_attention_3", 3, marks=pytest.mark.long),
        (5, "flash_attention_2", 7),
        pytest.param(5, "flash_attention_3", 3, marks=pytest.mark.long),
        pytest.param(5, "flash_attention_4", 3, marks=pytest.mark.long),
        pytest.param(5, "sdpa", 4, marks=pytest.mark.long),
        pytest.param(5, "flex_attention", 5, marks=pytest.mark.long),
    ],
)
def test_transformers(clients: Clients, version: int, implementation: str, models: int) -> None:
    said = clients.run(f"transformers-{version}", "with_transformers.py", implementation)
    assert f"{implementation}, cpu" in said
    assert said.count("12 tokens generated as by eager attention") == models


@pytest.mark.long
def test_transformers_by_the_package_kernels(clients: Clients, tmp_path: Path) -> None:
    """transformers sends models with sinks to a repository of this name. An installed flash_attn is not used."""
    hub.write(clients.wheel(VERSIONS[-1]), tmp_path)
    repository = f"kernels-community/aiter-flash-attn={tmp_path}"
    said = clients.run("kernels", "with_transformers.py", repository, "--hip", "6.4.43482-0f2d60242")
    assert "kernels: _flash_attn_rocm_" in said
    assert f" in {tmp_path}/build/torch-rocm/__init__.py\n" in said
    assert said.count("12 tokens generated as by eager attention") == 3
    code = f"""
import torch, kernels
from kernels._rust import Digest, DigestAlgorithm, Metadata
torch.version.cuda = None
loaded = kernels.get_local_kernel({tmp_path!r}, backend="cpu")
path = loaded.__path__[0]
Metadata.read_from_file(path + "/metadata.json").digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, path))
print(path, loaded.flash_attn_func(*torch.ones(3, 1, 4, 2, 8)).sum().item())
"""
    said = _run(clients.environment("kernels"), "-c", f"from pathlib import PosixPath\n{code}")
    assert said == f"{tmp_path}/build/torch-cpu 64.0\n"
    said = clients.run("kernels", "hub_functions.py", str(tmp_path))
    names = ("block-sparse", "decode", "flex")
    assert [f"{name}: equal to PyTorch's attention" in said for name in names] == [True] * 3, said
    assert "flex_attention: 1 calls served by flash_attn, 0 by PyTorch" in said


@pytest.mark.long
def test_transformers_by_the_package_kernels_on_every_family(clients: Clients, tmp_path: Path) -> None:
    """The repository of a universal wheel, whose stores are stand-ins."""
    machine = Machine(cores=1, available_mib=4096)
    plan = make_universal_plan(versions.load(), flash_attn=VERSIONS[-1], env={}, machine=machine)
    launcher = fake_parts.library(tmp_path / "launcher.so", "int PyInit__launcher(void) { return 1; }")
    stores = {target: fake_parts.store(tmp_path / "stores", target) for target in plan.targets}
    hub.write(assemble.assemble(plan, stores, launcher, tmp_path / "dist"), tmp_path / "hub")
    gpus = ("gfx942", "gfx1012", "gfx1030", "gfx1036", "gfx1100", "gfx1151", "gfx1201:sramecc-", "gfx906")
    repository = f"kernels-community/aiter-flash-attn={tmp_path}/hub"
    said = clients.run("kernels", "hub_on_gpus.py", repository, *gpus).splitlines()
    loaded = re.compile(r"(gfx\S+): _flash_attn_rocm_\w+\.flash_attn_interface 64")
    assert [bool(loaded.fullmatch(line)) for line in said] == [gpu != "gfx906" for gpu in gpus], said
    assert "refused: " in said[-1]
    assert "ROCm arch gfx906" in said[-1]


@pytest.mark.parametrize("version", OF_EVERY_VERSION)
def test_diffusers(clients: Clients, version: str) -> None:
    assert f"flash_attn {version}, cpu" in clients.run("transformers-5", "with_diffusers.py", version=version)


@pytest.mark.long
def test_sageattention_in_diffusers(clients: Clients) -> None:
    said = clients.run("transformers-5", "with_sageattention.py")
    assert said.count("backend ") == 6
    assert said.count("model: ") == 2


@pytest.mark.long
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "triton"])
def test_diffusers_pipelines(clients: Clients, kernels: bool) -> None:
    """Triton's interpreter runs the kernels where `kernels` is true."""
    said = clients.run(
        "transformers-5", "with_diffusers_pipelines.py", *["--kernels"] * kernels,
        TRITON_INTERPRET=str(int(kernels)),
    )  # fmt: skip
    assert said.count("SDPA: ") == 4
    assert said.count("flash: ") == said.count("flash_varlen: ") == 2


@pytest.mark.long
def test_training(clients: Clients) -> None:
    said = clients.run("transformers-5", "with_training.py")
    assert said.count("LoRA, ") == 2
    assert said.count("FSDP2, ") == 6


@pytest.mark.long
def test_diffusers_on_two_ranks(clients: Clients) -> None:
    said = clients.run("transformers-5", "with_diffusers_ranks.py")
    assert said.count("ring: equal to one call") == said.count("ulysses: equal to one call") == 2


@pytest.mark.long
def test_ring_flash_attn(clients: Clients) -> None:
    said = clients.run("transformers-4", "with_ring_flash_attn.py")
    assert said.count("equal to one call") == 6
    assert f"flash_attn {VERSIONS[-1]}: 2 processes" in said


@pytest.mark.long
def test_yunchang(clients: Clients) -> None:
    said = clients.run("transformers-4", "with_yunchang.py")
    assert said.count("equal to one call") == 52
    assert f"flash_attn {VERSIONS[-1]}: 2 processes" in said


@pytest.mark.parametrize("version", OF_EVERY_VERSION)
def test_import_probes(clients: Clients, version: str) -> None:
    said = clients.run("transformers-5", "probes.py", version=version)
    assert said.count("as it expects") >= 5


@pytest.mark.parametrize("version", OF_EVERY_VERSION)
def test_versions_parse(clients: Clients, version: str) -> None:
    """Plain in the package, labelled in the metadata."""
    code = "import flash_attn, importlib.metadata as m; print(flash_attn.__version__, m.version('flash_attn'))"
    said = _run(sys.executable, "-c", code, PYTHONPATH=str(clients.unpacked(version)))
    assert said.split() == [version, f"{version}+{LABEL}"]


@pytest.mark.parametrize(
    "group",
    [*(pytest.param(group, marks=pytest.mark.long) for group in ("kernels", "transformers-4")), "transformers-5"],
)
def test_requirements_hold(clients: Clients, group: str) -> None:
    assert "No broken requirements" in _run(clients.environment(group), "-m", "pip", "check")
