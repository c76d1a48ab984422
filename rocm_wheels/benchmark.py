"""Benchmarks of a finished wheel in a clean environment, and their way into its verdict."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from rocm_wheels import build, catalogue, interpreters, verdict, verify
from rocm_wheels.errors import DataError, VerifyFailed

SCRIPTS = Path(__file__).resolve().parent.parent / "benchmarks"
# What runs, and how its results are written; defaults otherwise, so that anyone can run the same.
SUITE = (
    ("benchmark_fa2_vs_fa3_mlp_transformer.py", "--output-json"),
    ("benchmark_flash_attn.py", "--json"),
    ("attention.py", "--json"),
    ("launch_overhead.py", "--json"),
    ("cold_start.py", "--json"),
)
_SECONDS = 3600


def run(wheel: Path, *, cache: Path, output: Path) -> list[Path]:
    """Measures a wheel on this machine's GPU; the results, each a JSON file of `output`.

    VerifyFailed without torch for ROCm, or, after the others ran, with those that failed.
    """
    plan = build.plan_of(wheel)
    python = interpreters.find(plan.cell.python)
    cache.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    written, failed = [], []
    with tempfile.TemporaryDirectory(prefix="work-", dir=cache) as work:
        env = Path(work) / "env"
        interpreter = verify.environment(verify.torch_source(plan, require_gpu=True), python, env)
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


def attach(dist: Path, summary: Path) -> list[str]:
    """Puts what benchmarks/trend.py wrote into the verdict of the wheel of `dist` that was measured; its name.

    DataError if the file is something else; an empty list if that wheel is not there.
    """
    try:
        found = json.loads(summary.read_text(encoding="utf-8"))
        version, python = found["environment"]["flash_attn"], found["environment"]["python"]
        _ = found["comparisons"], found["missing"], found["regressions"], found["bound"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{summary} is not what benchmarks/trend.py writes: {error!r}") from error
    measured = [
        wheel.name
        for wheel in catalogue.from_directory(dist)
        if wheel.version == version and python.startswith(f"{wheel.python}.")
    ]
    for name in measured:
        verdict.attach(dist / (name + verdict.VERDICT), found)
    return measured
