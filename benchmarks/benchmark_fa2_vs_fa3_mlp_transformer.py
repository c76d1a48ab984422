"""Composable Kernel ("FA2" here) against Triton ("FA3" here) in a training step of a small Transformer, on a GPU.

    python benchmarks/benchmark_fa2_vs_fa3_mlp_transformer.py [--preset default] [--output-json results.json]

Neither is the FlashAttention of that number. FLASH_ATTENTION_TRITON_AMD_ENABLE=FALSE gives Composable Kernel, TRUE
gives Triton. Each has a process of its own, with the same seed, model and tokens. A step is forward, backward and
optimizer. Where one cannot run, this says why and measures the other against
PyTorch's SDPA. After the warm-up of both, they take turns: a round of steps each, in an order that alternates, so
that drift of the clocks hits both alike. Spread: quartiles over the steps, extremes over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import measuring
import torch

WORKER = Path(__file__).resolve().parent / "transformer_step.py"
TITLES = {"fa2": "FA2 (CK)", "fa3": "FA3 (Triton)", "sdpa": "SDPA"}
COMMON = {"batch": 4, "d_model": 1024, "heads": 16, "mlp_ratio": 4, "vocab": 32000, "dtype": "bfloat16"}
PRESETS: dict[str, dict[str, Any]] = {
    "mi300x": {**COMMON, "seqlen": 4096, "layers": 8, "warmup": 20, "timed": 80},
    "default": {**COMMON, "seqlen": 2048, "layers": 6, "warmup": 10, "timed": 50},
}
SIZES = {
    "batch": "sequences",
    "seqlen": "tokens of each",
    "d_model": "width of the model",
    "heads": "attention heads",
    "layers": "blocks of attention and MLP",
    "mlp_ratio": "width of the MLP in widths of the model",
    "vocab": "classes of tokens",
    "warmup": "steps before the timed ones",
    "timed": "steps that are timed",
}


class CannotRun(Exception):  # noqa: N818 - says what happened
    """A backend that does not run here; the message is the reason."""


class Worker:
    """The process of one backend."""

    def __init__(self, backend: str, config: dict[str, Any], log: Path) -> None:
        self.backend, self.log = backend, log
        with log.open("w", encoding="utf-8") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKER), json.dumps({"backend": backend, "config": config})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        try:
            self.about = self._answer()
        except CannotRun:
            self.stop()
            raise

    def run(self, steps: int) -> dict[str, Any]:
        """Raises CannotRun if the process gives up or dies."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise CannotRun(f"its process ended with {code}{': ' + last[0] if last else ''}")
        answer: dict[str, Any] = json.loads(line)
        if "why" in answer:
            raise CannotRun(answer["why"])
        return answer


def say(text: str) -> None:
    """Progress: stdout is the table."""
    print(text, file=sys.stderr, flush=True)


def warm(backend: str, config: dict[str, Any], logs: Path) -> Worker:
    """A worker that is ready to be timed. Raises CannotRun."""
    say(f"{TITLES[backend]}: starting, {config['warmup']} steps of warm-up")
    worker = Worker(backend, config, logs / f"{backend}.log")
    try:
        if config["warmup"]:
            worker.run(config["warmup"])
    except CannotRun:
        worker.stop()
        raise
    return worker


@contextlib.contextmanager
def pair(config: dict[str, Any]) -> Iterator[tuple[list[Worker], dict[str, str]]]:
    """FA2 and FA3, or SDPA and the one that runs; and why the other does not. SystemExit if neither runs."""
    workers: list[Worker] = []
    why: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fa2-vs-fa3-") as logs:
        try:
            for backend in ("fa2", "fa3", "sdpa"):
                if len(workers) == 2:
                    break
                if backend == "sdpa" and not workers:
                    raise SystemExit("error: neither backend of flash_attn runs here: nothing to measure")
                try:
                    workers.append(warm(backend, config, Path(logs)))
                except CannotRun as error:
                    why[backend] = str(error)
                    say(f"{TITLES[backend]} cannot run: {error}")
            if len(workers) < 2:
                raise SystemExit(f"error: nothing to compare {TITLES[workers[0].backend]} with")
            workers.sort(key=lambda worker: ("sdpa", "fa2", "fa3").index(worker.backend))  # the baseline first
            yield workers, why
        finally:
            for worker in workers:
                worker.stop()


def measure(workers: Sequence[Worker], config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Raw metrics of each backend: the times of every step, round by round, last loss, peak memory."""
    raw: dict[str, dict[str, Any]] = {
        worker.backend: {**worker.about, "step_ms": [], "loss": None, "peak_memory_bytes": 0} for worker in workers
    }
    rounds = config["repeats"]
    for number in range(rounds):
        steps = config["timed"] * (number + 1) // rounds - config["timed"] * number // rounds
        for worker in workers if number % 2 == 0 else reversed(workers):
            try:
                metrics = worker.run(steps)
            except CannotRun as error:
                raise SystemExit(f"error: {TITLES[worker.backend]} stopped in round {number + 1}: {error}") from None
            kept = raw[worker.backend]
            kept["step_ms"].append(metrics.pop("step_ms"))
            kept.update(metrics)
            say(
                f"round {number + 1} of {rounds}, {TITLES[worker.backend]}: "
                f"{statistics.median(kept['step_ms'][-1]):.2f} ms, loss {kept['loss']:.4f}"
            )
    return raw


def summarize(raw: dict[str, dict[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    """Medians, rates, spread; the second backend against the first."""
    summary: dict[str, Any] = {}
    for backend, metrics in raw.items():
        low, middle, high = measuring.quartiles([ms for each in metrics["step_ms"] for ms in each])
        summary[backend] = {
            "backend_symbol": metrics["symbol"],
            "median_step_ms": middle,
            "quartiles_step_ms": [low, high],
            "round_medians_ms": [statistics.median(each) for each in metrics["step_ms"]],
            "steps_per_s": 1e3 / middle,
            "tokens_per_s": config["batch"] * config["seqlen"] * 1e3 / middle,
            "peak_memory_mib": metrics["peak_memory_bytes"] / 2**20,
            "loss": metrics["loss"],
        }
    base, other = summary
    ratios = [a / b for a, b in zip(summary[base]["round_medians_ms"], summary[other]["round_medians_ms"], strict=True)]
    memory = [summary[backend]["peak_memory_mib"] for backend in (base, other)]
    summary["comparison"] = {
        "baseline": base,
        "contender": other,
        "speed_up": summary[base]["median_step_ms"] / summary[other]["median_step_ms"],
        "speed_up_rounds": [min(ratios), max(ratios)],
        "memory_delta_mib": memory[1] - memory[0],
        "memory_delta_percent": 100 * (memory[1] / memory[0] - 1),
        "loss_difference": summary[other]["loss"] - summary[base]["loss"],
    }
    return summary


def table(summary: dict[str, Any], why: dict[str, str]) -> str:
    compared = summary["comparison"]
    base, other = compared["baseline"], compared["contender"]
    columns = [summary[base], summary[other]]
    symbols = [each["backend_symbol"] for each in columns]
    rows = [
        ("", [TITLES[base], TITLES[other]]),
        ("median step ms", [f"{each['median_step_ms']:.2f}" for each in columns]),
        ("quartiles", ["{:.2f} to {:.2f}".format(*each["quartiles_step_ms"]) for each in columns]),
        (
            "medians of rounds",
            [f"{min(m):.2f} to {max(m):.2f}" for m in (each["round_medians_ms"] for each in columns)],
        ),
        ("steps/s", [f"{each['steps_per_s']:.3f}" for each in columns]),
        ("tokens/s", [f"{each['tokens_per_s']:.0f}" for each in columns]),
        ("peak memory MiB", [f"{each['peak_memory_mib']:.0f}" for each in columns]),
        ("loss", [f"{each['loss']:.4f}" for each in columns]),
    ]
    lines = [f"{title:<20}" + "".join(f"{cell:>24}" for cell in cells) for title, cells in rows]
    lines += [f"{TITLES[name]:<14} is {symbol}" for name, symbol in zip((base, other), symbols, strict=True)]
    low, high = compared["speed_up_rounds"]
    lines += [
        f"speed-up of {TITLES[other]} over {TITLES[base]}: {compared['speed_up']:.3f} (rounds {low:.3f} to {high:.3f})",
        f"memory {compared['memory_delta_mib']:+.0f} MiB ({compared['memory_delta_percent']:+.1f} %)",
        *(f"{TITLES[name]} cannot run: {reason}" for name, reason in why.items()),
    ]
    return "\n".join(lines)


def resolve(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every setting of the run: those of the preset, and options over them. SystemExit if they do not fit."""
    settings = {name: value for name, value in vars(arguments).items() if value is not None}
    settings.pop("output_json", None)
    config = {**PRESETS[arguments.preset], **settings}
    for name in SIZES:
        if config[name] < (0 if name == "warmup" else 1):
            raise SystemExit(f"error: --{name.replace('_', '-')} {config[name]} is too small")
    if config["d_model"] % config["heads"] or (head_dim := config["d_model"] // config["heads"]) > 256 or head_dim % 8:
        raise SystemExit(
            f"error: --d-model {config['d_model']} with --heads {config['heads']}: the head dim, their quotient, "
            "is to be a multiple of 8 up to 256"
        )
    if not 1 <= config["repeats"] <= config["timed"]:
        raise SystemExit(f"error: --repeats {config['repeats']} does not split {config['timed']} timed steps")
    config["device"] = str(measuring.chosen_device(config.get("device")))
    return config


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="mi300x", help="sizes to begin with (mi300x)")
    for name, text in SIZES.items():
        values = ", ".join(dict.fromkeys(str(preset[name]) for preset in PRESETS.values()))
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{text} ({values})")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="of activations (bfloat16)")
    parser.add_argument("--no-causal", dest="causal", action="store_false", help="every token sees all others")
    parser.add_argument("--repeats", type=int, default=4, metavar="N", help="rounds that the timed steps come in (4)")
    parser.add_argument("--lr", type=float, default=1e-4, metavar="X", help="learning rate (1e-4)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and tokens (0)")
    parser.add_argument("--device", metavar="NAME", help="cuda, or cpu to exercise this without a GPU (cuda)")
    parser.add_argument(
        "--output-json", type=measuring.writable, metavar="FILE", help="configuration, raw metrics, summary"
    )
    arguments = parser.parse_args(argv)
    config = resolve(arguments)
    device = torch.device(config["device"])
    machine = measuring.environment(device)
    print(f"{machine['device']} ({machine['target']}), torch {machine['torch']}, flash_attn {machine['flash_attn']}")
    print(", ".join(f"{name} {value}" for name, value in config.items()), flush=True)
    if device.type == "cpu":
        say("on a CPU flash_attn is pure PyTorch: these figures say nothing about FA2 or FA3")
    with pair(config) as (workers, why):
        raw = measure(workers, config)
    summary = summarize(raw, config)
    summary["cannot_run"] = why
    print(table(summary, why))
    if arguments.output_json is not None:
        ours = {name: metrics for name, metrics in raw.items() if name != "sdpa"}
        samples = {
            f"{name} step ms": [ms for each in metrics["step_ms"] for ms in each] for name, metrics in ours.items()
        }
        samples |= {f"{name} peak MiB": [summary[name]["peak_memory_mib"]] for name in ours}
        content = measuring.results("mlp_transformer", machine, config, metrics=raw, summary=summary, samples=samples)
        measuring.write(arguments.output_json, content)


if __name__ == "__main__":
    main()
