"""Unpacks every kernel of a store and launches it on the fake driver: store_launches.py STORE.PY MODULES LIBRARY STORE

Prints what the driver received, which must be the same on every system. Standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from fake_driver import FakeDriver

# The largest value of each kind of argument, and an address beyond 32 bits.
VALUES: dict[str, Any] = {"P": 0x7FF6_1234_5678_9ABC, "i": 2**31 - 1, "I": -(2**63), "f": 1.5, "d": -0.1}


def main(reader: str, modules: str, library: str, archive: str) -> None:
    spec = importlib.util.spec_from_file_location("store", reader)
    assert spec is not None
    assert spec.loader is not None
    store = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(store)
    sys.path.insert(0, modules)
    launcher = importlib.import_module("_launcher")
    fake = FakeDriver(library)
    fake.reset()
    launcher.bind("hip")
    opened = store.Store(Path(archive))
    for name, image in opened.images():
        entry = opened.kernels[name]
        assert image[:4] == b"\x7fELF", name
        # The fake driver takes the letters of the arguments in the place of code.
        kernel = launcher.Kernel(
            entry["params"].encode(), entry["symbol"], entry["params"], entry["shared"], entry["threads"], name
        )
        kernel.launch(1, 2**40 + 7, 3, 2, 1, *[VALUES[letter] for letter in entry["params"] if letter != "0"])
        for line in fake.take_log():
            print(name, line)


if __name__ == "__main__":
    main(*sys.argv[1:])
