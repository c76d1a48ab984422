"""Benchmarks of a finished wheel in a clean environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rocm_wheels.errors import VerifyFailed
from rocm_wheels.matrix import versions
from rocm_wheels.paths import ROOT
from rocm_wheels.wheel import build, combinations, interpreters, verify
from rocm_wheels.wheel.workspace import work_directory

SCRIPTS = ROOT / "benchmarks"
# The benchmarks, with the option for the results file. All other options are the defaults: anyone can repeat them.
SUITE = (
    ("benchmark_fa2_vs_fa3_mlp_transformer.py", "--output-json"),
    ("benchmark_flash_attn.py", "--json"),
    ("attention.py", "--json"),
    ("launch_overhead.py", "--json"),
    ("cold_start.py", "--json"),
)
_SECONDS = 3600


def run(wheel: Path, *, cache: Path, output: Path) -> list[Path]:
    """Measures a wheel on this machine's GPU. Returns the results, each a JSON file in `output`.

    Raises VerifyFailed without ROCm's torch, and after all benchmarks if some of them failed.
    """
    plan = build.plan_of(wheel)
    (combination, *_) = combinations.of(plan, versions.load(), interpreters.found)
    python = interpreters.find(combination.python)
    build.check_writable(cache=cache, results=output)
    written, failed = [], []
    with work_directory(cache) as work:
        env = work / "env"
        interpreter = verify.environment(verify.torch_source(combination, require_gpu=True), python, env)
        verify.install(interpreter, [wheel], env)
        for script, flag in SUITE:
            result = output.resolve() / f"{Path(script).stem}.json"
            print(f"\n{script}", flush=True)
            command = [str(interpreter), str(SCRIPTS / script), flag, str(result)]
            try:
                subprocess.run(command, env=verify.clean_environment(), cwd=env, timeout=_SECONDS, check=True)
            except subprocess.SubprocessError as error:
                failed.append(f"{script}: {error}")
            else:
                written.append(result)
    if failed:
        raise VerifyFailed("\n".join(["benchmarks failed:", *failed]), remedy=f"The others are in {output}.")
    return written
