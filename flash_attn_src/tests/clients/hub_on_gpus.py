"""Has transformers load a repository for the package `kernels` by its name on the Hub, on a stand-in of each GPU.

    python hub_on_gpus.py OWNER/NAME=DIRECTORY gfx1030 gfx1100 gfx1201

Prints a line for each GPU: what was loaded and the sum of one attention, or why `kernels` refused. torch names the GPU
while the repository is loaded; the attention runs on the CPU.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import modeling_flash_attention_utils as dispatch


def load(name: str, gpu: str) -> str:
    """The line of a GPU."""
    on_gpu = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(gcnArchName=gpu),
    }
    dispatch._loaded_implementation = None  # load again
    with mock.patch.multiple(torch.cuda, **on_gpu):
        try:
            (function, *_), _ = dispatch.lazy_import_flash_attention(name)
        except ValueError as refused:
            return f"refused: {refused.__cause__ or refused}"
    return f"{function.__module__} {function(*torch.ones(3, 1, 4, 2, 8)).sum().item():g}"


def main() -> None:
    os.environ["LOCAL_KERNELS"], *gpus = sys.argv[1:]
    torch.version.cuda, torch.version.hip = None, "7.2.26015"
    for gpu in gpus:
        print(f"{gpu}: {load(os.environ['LOCAL_KERNELS'].partition('=')[0], gpu)}")


if __name__ == "__main__":
    main()
