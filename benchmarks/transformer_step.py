"""Training steps of a small Transformer with one attention backend, in a process of its own.

benchmark_fa2_vs_fa3_mlp_transformer.py starts it with the configuration and the backend as JSON, and then writes the
number of steps to run on each line of stdin; answers are lines of JSON on stdout. {"why": ...} is the last one where
the backend cannot run.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

# FA2 and FA3 are upstream's words: Composable Kernel and Triton. Read when flash_attn is imported.
VARIABLE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
SELECTED_BY = {"fa2": "FALSE", "fa3": "TRUE"}
if __name__ == "__main__":
    selected = SELECTED_BY.get(json.loads(sys.argv[1])["backend"])
    if selected is not None:
        os.environ[VARIABLE] = selected

import torch  # noqa: E402
from measuring import each_milliseconds, synchronize  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual."""

    def __init__(self, config: dict[str, Any], attention: Attention) -> None:
        super().__init__()
        width, hidden = config["d_model"], config["mlp_ratio"] * config["d_model"]
        self.heads, self.causal, self.attention = config["heads"], config["causal"], attention
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v, self.causal).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Tokens (batch, seqlen) to the loss of predicting each next one."""

    def __init__(self, config: dict[str, Any], attention: Attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config["vocab"], config["d_model"])
        self.places = nn.Parameter(0.02 * torch.randn(config["seqlen"], config["d_model"]))
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config["layers"]))
        self.norm, self.head = nn.LayerNorm(config["d_model"]), nn.Linear(config["d_model"], config["vocab"])

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def flash_attention(backend: str, device: torch.device) -> tuple[Attention, str]:
    """flash_attn_func and the module path of what computes. RuntimeError where it is not the backend asked for."""
    import flash_attn
    from flash_attn import flash_attn_interface

    backends = getattr(getattr(flash_attn, "attention", None), "backends", None)  # not in other builds of flash_attn
    if backends is not None and (problem := backends.problem()):
        raise RuntimeError(problem)
    if device.type == "cpu":
        symbol = "flash_attn.attention.backends.torch"
    else:
        names = ("flash_attn_gpu", "flash_attn_cuda")
        extension = next(getattr(flash_attn_interface, name) for name in names if hasattr(flash_attn_interface, name))
        symbol = extension.__name__
        if ("triton" in symbol) != (backend == "fa3"):
            raise RuntimeError(f"{VARIABLE}={SELECTED_BY[backend]} leaves {symbol} in use")

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return flash_attn.flash_attn_func(q, k, v, causal=causal)

    return attention, symbol


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """PyTorch's, with the kernel that it chooses, in flash-attn's layout."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)


class Training:
    """One model, its optimizer and its data: equal for every backend, from the seed."""

    def __init__(self, config: dict[str, Any], backend: str) -> None:
        self.device = torch.device(config["device"])
        self.dtype = getattr(torch, config["dtype"])
        attention, self.symbol = sdpa, "torch.nn.functional.scaled_dot_product_attention"
        if backend != "sdpa":
            attention, self.symbol = flash_attention(backend, self.device)
        torch.manual_seed(config["seed"])
        with self.device:
            self.model = Transformer(config, attention)
            drawn = torch.randint(config["vocab"], (config["batch"], config["seqlen"] + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config["lr"], fused=self.device.type == "cuda")
        self.tokens, self.wanted = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        self.loss = torch.zeros((), device=self.device)

    def step(self) -> None:
        """Forward, backward, optimizer."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            self.loss = self.model(self.tokens, self.wanted)
        self.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, steps: int) -> dict[str, Any]:
        times = each_milliseconds(self.step, steps, self.device)
        return {"step_ms": times, "loss": float(self.loss.detach()), "peak_memory_bytes": self.peak_memory()}

    def peak_memory(self) -> int:
        """Of tensors on the GPU; of the whole process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    # Answers alone go to the stdout that this process was given: whatever else is printed goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    task = json.loads(sys.argv[1])
    try:
        training = Training(task["config"], task["backend"])
        training.step()
        synchronize(training.device)
        parameters = sum(each.numel() for each in training.model.parameters())
        answer({"symbol": training.symbol, "parameters": parameters, "torch": torch.__version__})
        for line in sys.stdin:
            answer(training.run(int(line)))
    except (ImportError, RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        answer({"why": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"})
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
