"""Kills publishing and the index at random points, against a GitHub with every kind of fault, and runs them again.

As a program it repeats this and counts: python tests/support/kills.py --count 100
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import fake_github  # noqa: E402
import fake_parts  # noqa: E402
import wheelhouse  # noqa: E402
from fake_github import REPOSITORY, TOKEN, Hub  # noqa: E402
from publishing import arguments, environment, expected, publish, state  # noqa: E402

from rocm_wheels.publish import assets, github  # noqa: E402

MOMENTS = ("before", "mid", "after", "answered")
BACKOFF, TIMEOUT, ATTEMPTS = 0.01, (5.0, 0.25), 12  # waits short enough for a test
LAGS = (0.0, 0.01, 0.025)  # seconds that listings lag behind; a run waits 3 * BACKOFF where the lag matters
CLOCKS = (-7200.0, 0.0, 7200.0)
# The command that a user starts, with these waits.
PROGRAM = f"""
import sys
from rocm_wheels import cli
from rocm_wheels.publish import github
github.BACKOFF_SECONDS, github.TIMEOUT_SECONDS, github.ATTEMPTS = {BACKOFF}, {TIMEOUT}, {ATTEMPTS}
sys.exit(cli.main(sys.argv[1:]))
"""


class Killer:
    """Kills the client with SIGKILL at one moment of one request."""

    def __init__(self, number: int, moment: str) -> None:
        self.at = (number, moment)
        self.known = threading.Event()
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, number: int, moment: str) -> None:
        if (number, moment) == self.at:
            self.known.wait(30)
            assert self.process is not None
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(30)


def make_dist(directory: Path) -> Path:
    """Writes three wheels, their test reports, and a kernel store that one of the wheels holds."""
    store = fake_parts.store(directory, "gfx942")
    for text, backend in (
        ("2.8.3 3.11 2.5.1 6.2", "triton"),
        ("2.8.3 3.12 2.5.1 6.2", "ck"),
        ("2.6.3 3.10 2.6.0 6.1", "ck"),
    ):
        stores = [store] if text.startswith("2.6.3") else []
        wheelhouse.write(directory, wheelhouse.cell(text, backend), stores=stores)
    store.rename(directory / "kernels-triton-gfx942.zip")
    return directory


@functools.cache
def undisturbed(dist: Path) -> tuple[str, dict[str, bytes]]:
    """The notes and the site of runs without faults."""
    with fake_github.serve(Hub()) as hub, tempfile.TemporaryDirectory() as directory:
        publish(hub, dist)
        assert _index(hub, Path(directory) / "site").returncode == 0
        return str(state(hub)["body"]), _site(hub, Path(directory) / "site")


def check_once(hub: Hub, dist: Path) -> None:
    """Checks that the result equals the result of a run without faults, and that no wheel was stored twice."""
    result = state(hub)
    assert result["assets"] == expected(dist)
    assert result["draft"] is False
    assert result["body"] == undisturbed(dist)[0]
    twice = {name for name, count in hub.stored.items() if count > 1}
    assert twice <= {assets.SUMS}, twice
    assert result["tag"] in hub.tags


def kill_publish(dist: Path, seed: int) -> Counter[str]:
    """Runs publish once with a kill at a random point, and once to the end. Returns the count of the faults on the
    way.
    """
    chance = random.Random(fake_github.seed("kill", seed))
    killer = Killer(chance.randint(1, 30), chance.choice(MOMENTS))
    hub = _hub(chance, seed, killer)
    with fake_github.serve(hub):
        killed = _killed(hub, arguments(dist), killer)
        publish(hub, dist)
        check_once(hub, dist)
    return _counted(hub, "publish", killed)


def kill_index(dist: Path, seed: int) -> Counter[str]:
    """As `kill_publish`, for the index of a public release."""
    chance = random.Random(fake_github.seed("index", seed))
    with fake_github.serve(Hub()) as hub, tempfile.TemporaryDirectory() as directory:
        publish(hub, dist)
        before = state(hub)
        site = Path(directory) / "site"
        hub.requests, hub.stored = 0, Counter()
        killer = Killer(chance.randint(1, 6), chance.choice(MOMENTS))
        other = _hub(chance, seed, killer)
        hub.random, hub.rate, hub.clock, hub.on_request = other.random, other.rate, other.clock, killer
        killed = _killed(hub, ["index", "--out", str(site)], killer)
        done = _index(hub, site)
        assert done.returncode == 0, done.stdout
        assert _site(hub, site) == undisturbed(dist)[1]
        assert state(hub) == before, "the index changes no release"
        assert sorted(path.name for path in site.iterdir() if path.name.startswith(".")) == [".flash_attn_site"]
    return _counted(hub, "index", killed)


def _hub(chance: random.Random, seed: int, killer: Callable[[int, str], None]) -> Hub:
    return Hub(
        seed=seed,
        rate=0.15,
        on_request=killer,
        lag=chance.choice(LAGS),
        clock=chance.choice(CLOCKS),
        digests=chance.random() < 0.7,
    )


def _killed(hub: Hub, words: list[str], killer: Killer) -> bool:
    """Whether the program was killed; a program that sends fewer requests ends normally."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        env={**os.environ, **environment(hub)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        killer.process = process
        killer.known.set()
        printed = process.communicate(timeout=120)[0]
    assert process.returncode in (-signal.SIGKILL, 0), printed
    assert TOKEN not in printed
    return process.returncode != 0


def _index(hub: Hub, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "index", "--out", str(site)],
        env={**os.environ, **environment(hub)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _site(hub: Hub, site: Path) -> dict[str, bytes]:
    """The files of a site without the address of the hub, which differs in each run."""
    return {
        path.relative_to(site).as_posix(): path.read_bytes().replace(hub.url.encode(), b"HUB")
        for path in sorted(site.rglob("*"))
        if path.is_file()
    }


def _counted(hub: Hub, what: str, killed: bool) -> Counter[str]:
    settings = {"listings behind": hub.lag > 0, "clock off by two hours": hub.clock != 0, "no digests": not hub.digests}
    counted = Counter({f"{what}: {'killed' if killed else 'ended before its kill'}": 1})
    counted.update(name for name, on in settings.items() if on)
    return counted + hub.faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many of each, publish and index (100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    count = parser.parse_args()
    github.BACKOFF_SECONDS, github.TIMEOUT_SECONDS, github.ATTEMPTS = BACKOFF, TIMEOUT, ATTEMPTS
    seeds = range(count.first, count.first + count.count)
    failed: list[str] = []
    total: Counter[str] = Counter()

    def one(job: tuple[Callable[[Path, int], Counter[str]], int]) -> None:
        kill, seed = job
        try:
            total.update(kill(dist, seed))
        except Exception as error:
            failed.append(f"{kill.__name__} {seed}: {type(error).__name__}: {str(error)[:300]}")

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(2) as pool:
        dist = make_dist(Path(directory))
        undisturbed(dist)
        list(pool.map(one, [(kill, seed) for seed in seeds for kill in (kill_publish, kill_index)]))
    for name, number in sorted(total.items()):
        print(f"{number:5}  {name}")
    print("\n".join([*failed, f"{len(failed)} ended otherwise than an undisturbed run, of repository {REPOSITORY}"]))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
