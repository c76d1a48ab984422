"""The calls that the selftest makes and the shapes that it times. This module needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1  # of the report
# Largest error relative to the largest value of the fp32 reference: forward, backward. 2^-8 is half a unit in the last
# place of bf16, 2^-11 of fp16; a few roundings add up.
LIMITS = {"fp32": (1e-5, 2e-5), "fp16": (2e-3, 4e-3), "bf16": (1.2e-2, 2.4e-2)}
FP8_LIMITS = (0.12, 0.12)  # three bits of mantissa
# With dout of 1e-5, dS and dQ are subnormal in fp16. PyTorch in fp16 then has an error of 0.03. A GPU that flushes
# subnormals loses at least 80 %.
SMALL_DOUT_LIMITS = (LIMITS["fp16"][0], 0.1)
# Beside a sink 12 above the scores the weights are subnormal in fp16. A GPU that flushes them returns zeros.
SINK_LIMITS = (1e-2, 2e-2)
REPEATS, CPU_REPEATS = 1000, 3
GROUPS = ("head dims", "masks", "varlen", "decoding", "FP8", "dropout", "determinism", "layers")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: `check` is the function of checks.py that makes it, `options` are its keywords.

    `limits` are the largest errors allowed, forward and backward. `on_cpu` marks the cases of a machine without a GPU.
    """

    group: str
    name: str
    check: str
    dtype: str = "bf16"
    limits: tuple[float, float]
    options: Mapping[str, Any] = field(default_factory=dict)
    on_cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A shape to time, bf16. With `cache` there is one query per sequence and seqlen keys in a cache."""

    batch: int
    heads: int
    heads_k: int
    seqlen: int
    head_dim: int
    causal: bool = False
    cache: bool = False

    @property
    def name(self) -> str:
        mask = "cache" if self.cache else "causal" if self.causal else "full"
        heads = f"{self.heads}" if self.heads == self.heads_k else f"{self.heads}/{self.heads_k}"
        return f"{self.batch} {heads} {self.seqlen} {self.head_dim} {mask}"

    @property
    def flops(self) -> float:
        """Of the forward; a backward has 2.5 times as many (Dao, FlashAttention-2, 2023, section 4.1)."""
        queries = 1 if self.cache else self.seqlen
        full = 4.0 * self.batch * self.heads * queries * self.seqlen * self.head_dim
        return full / 2 if self.causal else full


SPEEDS = (
    Shape(batch=4, heads=16, heads_k=16, seqlen=4096, head_dim=128),
    Shape(batch=4, heads=16, heads_k=16, seqlen=4096, head_dim=128, causal=True),
    Shape(batch=4, heads=32, heads_k=32, seqlen=4096, head_dim=64, causal=True),
    Shape(batch=4, heads=32, heads_k=8, seqlen=4096, head_dim=128, causal=True),
    Shape(batch=1, heads=16, heads_k=16, seqlen=16384, head_dim=128, causal=True),
    Shape(batch=16, heads=32, heads_k=8, seqlen=8192, head_dim=128, cache=True),
)
# For a machine without a GPU: it tests the program, not the speed.
CPU_SPEEDS = (Shape(batch=1, heads=2, heads_k=2, seqlen=256, head_dim=64, causal=True),)


def cases(repeats: int = REPEATS) -> tuple[Case, ...]:
    """All calls, in the order in which they run. repeats: how often the forward runs whose bits must not change."""
    return (*_head_dims(), *_masks(), *_errata(), *_varlen(), *_decoding(), *_others(repeats))


def _case(
    group: str,
    check: str,
    name: str,
    dtype: str = "bf16",
    on_cpu: bool = False,
    limits: tuple[float, float] | None = None,
    **options: Any,
) -> Case:
    return Case(
        group=group,
        check=check,
        name=f"{name} {dtype}",
        dtype=dtype,
        limits=limits or LIMITS[dtype],
        options=options,
        on_cpu=on_cpu,
    )


def _head_dims() -> Iterator[Case]:
    for dtype in LIMITS:
        for dim in (32, 40, 64, 96, 111, 128, 192, 256):
            name, on_cpu = f"causal dim {dim}", dim in (40, 64)
            yield _case("head dims", "attention", name, dtype, on_cpu, head_dim=dim, causal=True)
    for dtype in ("fp16", "bf16"):
        for dim in (320, 512):
            name, on_cpu = f"causal dim {dim}", (dtype, dim) == ("bf16", 512)
            yield _case("head dims", "attention", name, dtype, on_cpu, head_dim=dim, causal=True)
        for dim, of_v in ((192, 128), (128, 64)):
            name, on_cpu = f"causal dim {dim}, values of {of_v}", dtype == "bf16"
            yield _case("head dims", "attention", name, dtype, on_cpu, head_dim=dim, value_dim=of_v, causal=True)


def _masks() -> Iterator[Case]:
    options: dict[str, dict[str, Any]] = {
        "full": {},
        "causal, fewer queries than keys": {"causal": True, "seqlen_q": 113, "seqlen_k": 333},
        "causal, fewer keys than queries": {"causal": True, "seqlen_q": 333, "seqlen_k": 113},
        "window 70, 20": {"window_size": (70, 20)},
        "causal window 64": {"causal": True, "window_size": (64, 0)},
        "softcap 20": {"softcap": 20.0},
        "ALiBi": {"causal": True, "added": "alibi"},
        "sinks": {"causal": True, "sinks": 0.0},
        "sinks, causal window 64": {"causal": True, "sinks": 0.0, "window_size": (64, 0)},
        "bias": {"added": "bias"},
        "GQA 8:2": {"causal": True, "heads": 8, "heads_k": 2},
        "MQA": {"causal": True, "heads": 8, "heads_k": 1},
        "1500 tokens": {"causal": True, "batch": 1, "seqlen_q": 1500, "seqlen_k": 1500},
    }
    for name, arguments in options.items():
        for dim in (64, 128):
            yield _case("masks", "attention", f"{name}, dim {dim}", on_cpu=dim == 64, head_dim=dim, **arguments)
    yield _case("masks", "attention", "full, dim 128", "fp16", head_dim=128)


def _errata() -> Iterator[Case]:
    """Calls whose results tell known errata of GPUs: docs/notes/hardware.md."""
    for dim in (64, 128):
        yield _case(
            "masks", "attention", f"dout of 1e-5, dim {dim}", "fp16", dim == 64, SMALL_DOUT_LIMITS,
            head_dim=dim, causal=True, dout_scale=1e-5,
        )  # fmt: skip
        for dtype in ("fp16", "bf16"):
            yield _case("masks", "dominated", f"one dominating key, dim {dim}", dtype, dim == 64, head_dim=dim)
        yield _case(
            "masks", "attention", f"dominating sinks, dim {dim}", "fp16", dim == 64, SINK_LIMITS,
            head_dim=dim, causal=True, sinks=12.0,
        )  # fmt: skip


def _varlen() -> Iterator[Case]:
    for dim in (64, 128):
        for causal in (False, True):
            name = f"packed{', causal' * causal}, dim {dim}"
            yield _case("varlen", "packed", name, on_cpu=dim == 64, head_dim=dim, causal=causal)
    yield _case("varlen", "packed", "packed, causal, dim 128", "fp16", head_dim=128, causal=True)
    yield _case("varlen", "packed", "packed, window 40, dim 64", head_dim=64, causal=True, window_size=(40, 0))


def _decoding() -> Iterator[Case]:
    for dim in (64, 128):
        calls: dict[str, dict[str, Any]] = {
            "cache": {},
            "cache, 70 queries": {"seqlen_q": 70},
            "cache, pages of 256": {"page_size": 256},
            "cache, append": {"new": 3},
            "cache, append, pages of 256": {"new": 3, "page_size": 256},
            "cache, append, rotary": {"new": 3, "rotary": True},
            "cache, GQA 8:1": {"heads": 8, "heads_k": 1},
            "cache, sinks": {"sinks": True},
        }
        for name, options in calls.items():
            yield _case("decoding", "cache", f"{name}, dim {dim}", on_cpu=dim == 64, head_dim=dim, **options)
    yield _case("decoding", "cache", "cache of 9000 keys, dim 128", head_dim=128, seqlen_k=9000, heads=8, heads_k=2)
    yield _case("decoding", "cache", "cache, dim 512", head_dim=512)
    yield _case("decoding", "latent", "latent attention over pages", on_cpu=True)
    yield _case("decoding", "latent", "latent attention over pages, 70 queries", seqlen_q=70)
    yield _case("decoding", "attention", "one query without a cache, dim 128", head_dim=128, seqlen_q=1, seqlen_k=3000)


def _others(repeats: int) -> Iterator[Case]:
    for dim in (64, 128):
        yield _case("FP8", "fp8", f"causal, dim {dim}", limits=FP8_LIMITS, on_cpu=dim == 64, head_dim=dim)
        yield _case("dropout", "dropout", f"rate, backward, seed, dim {dim}", on_cpu=dim == 64, head_dim=dim)
        yield _case("determinism", "repeats", f"equal bits in two runs, dim {dim}", on_cpu=dim == 64, head_dim=dim)
    name = f"equal bits in {repeats} runs, causal dim 80"
    yield _case("determinism", "steady", name, "fp32", on_cpu=True, head_dim=80, times=repeats)
    yield _case("determinism", "captured", "a captured graph gives the same")
    for dtype in ("bf16", "fp32"):
        yield _case("layers", "rotary", "rotary embedding", dtype, on_cpu=True)
        yield _case("layers", "rms_norm", "RMS norm with residual", dtype, on_cpu=True)
        yield _case("layers", "layer_norm", "layer norm", dtype, on_cpu=True)
    yield _case("layers", "cross_entropy", "cross entropy", "fp32", on_cpu=True)
