"""Programs in odd places: the package in a zip file, a torch built without distributed, a user without a name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import flash_attn
import pytest

PACKAGE = Path(flash_attn.__file__).parent


def _python(code: str, *before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PACKAGE.parent), **variables}
    return subprocess.run(
        [*before, sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/", check=False
    )


@pytest.mark.parametrize("compressed", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("with_build_info", [False, True])
def test_a_zip_file_is_refused_by_name(tmp_path: Path, compressed: int, with_build_info: bool) -> None:
    archive = tmp_path / "app.pyz"
    with zipfile.ZipFile(archive, "w", compressed) as out:
        for path in PACKAGE.rglob("*.py"):
            out.write(path, path.relative_to(PACKAGE.parent))
        if with_build_info:
            out.writestr("flash_attn/_build_info.json", "{}")
    for module in ("flash_attn", "flash_attn.doctor", "flash_attn.sdpa"):
        done = _python(f"import {module}", PYTHONPATH=str(archive))
        said = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1
        assert said.startswith(f"ImportError: flash_attn is in the file {archive}, and no system loads libraries")


_WITHOUT_DISTRIBUTED = """
import sys
class Remove:  # what torch built with USE_DISTRIBUTED=0 lacks; torch asks when it imports torch.distributed
    def find_spec(self, name, path, target=None):
        if name == "torch.distributed":
            of_c = sys.modules["torch._C"]
            for missing in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                if hasattr(of_c, missing):
                    delattr(of_c, missing)
        if name.startswith("torch._C._distributed"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Remove())
import torch
assert not torch.distributed.is_available()
"""
_USE = """
import torch, flash_attn, flash_attn.cute, flash_attn_interface, sageattention
from flash_attn.int8 import flash_attn_int8_func
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.modules.mha import MHA
q = torch.randn(1, 8, 2, 32).half()
flash_attn.flash_attn_func(*(q.float().requires_grad_(),) * 3).sum().backward()
flash_attn_int8_func(q, q, q)
sageattention.sageattn(q, q, q)
with flash_attn.use_for_sdpa():
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
MHA(32, 2)(torch.randn(1, 4, 32))
CrossEntropyLoss()(torch.randn(4, 8), torch.zeros(4).long())
print("served")
"""


def test_a_torch_without_distributed() -> None:
    done = _python(_WITHOUT_DISTRIBUTED + _USE)
    assert done.stdout == "served\n", done.stderr


def _unknown_user() -> list[str]:
    """The command that runs another as a user without a name, who may read what this user may."""
    command = ["unshare", "--user", "--map-user=54321", "--map-group=54321"]
    if (
        shutil.which(command[0]) is None
        or subprocess.run([*command, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this system makes no user namespaces")
    return command


def test_a_user_without_a_name_and_without_a_home() -> None:
    command = _unknown_user()
    done = _python(_USE, *command)
    assert done.stdout == "served\n", done.stderr
    text = "import sys; sys.argv = ['doctor']; from flash_attn.diagnosis.doctor import main; main([])"
    done = _python(text, *command)
    assert "user            54321, in no further group" in done.stdout, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
