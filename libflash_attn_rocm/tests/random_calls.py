"""Random calls of attention: each is a call of Python's backend and structs of the C header over the same tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from flash_attn.attention.backends import triton as backend
from flash_attn.attention.backends.triton.kernels import find_one
from flash_attn.call.block_mask import BlockMask
from flash_attn.call.calls import AttentionCall, CacheCall, GradientCall
from flash_attn.call.mask import Mask
from flash_attn.call.options import Options
from flash_attn.core.protocol import launch
from flash_attn.kernels.value_dims import served_pair

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What the host takes for a second launch, in us: with it some calls are split and others are not.
HOST_COST = 20.0
FP8, FP8_NUMBER = torch.float8_e4m3fnuz, 4
INT = {"dtype": torch.int32}


@dataclass
class Drawn:
    """A random call. kind: forward, backward, cache, fp8 or int8. struct: the fields of the C call. call: Python's.
    learned: the options whose gradients a backward computes."""

    kind: str
    tensors: dict[str, torch.Tensor]
    call: AttentionCall | CacheCall
    struct: dict[str, Any]
    appends: dict[str, Any] | None = None
    learned: tuple[str, ...] = ()
    results: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self, before_backward: Callable[[], None]) -> None:
        """Lets Python's backend launch it, and completes the struct by the addresses of the results."""
        if isinstance(self.call, CacheCall):
            out, lse = backend.kvcache(self.call)
        elif self.kind == "fp8":
            out, lse, *_ = backend.fp8_forward(self.call)
        elif self.kind == "int8":
            out, lse = backend.int8_forward(self.call, self.tensors.get("k_mean"))
        else:
            result = backend.forward(self.call)
            out, lse = result.out, result.softmax_lse
        self.results = {"out": out, "lse": lse}
        learned: dict[str, torch.Tensor] = {}
        if self.kind == "backward":
            call = self.call
            assert isinstance(call, AttentionCall)
            gradients = {f"d{name}": torch.empty_like(self.tensors[name]) for name in "qkv"}
            gradients["dout"] = torch.empty_like(out)
            learned = {f"d{name}": torch.empty_like(self.tensors[name]) for name in self.learned}
            before_backward()
            written = (*(gradients[f"d{x}"] for x in "qkv"), learned.get("dbias"))
            delta = backend.backward(GradientCall(call, gradients["dout"], out, lse, *written))
            if "dsinks" in learned:
                self.launch_sinks(lse, delta, learned["dsinks"])
            self.struct |= {name: tensor.data_ptr() for name, tensor in learned.items()}
            self.results |= gradients
        self.struct["lse"] = lse.data_ptr()
        for name, tensor in self.results.items():
            if name != "lse":
                self.struct[name] = operand(tensor)
        self.results |= learned

    def launch_sinks(self, lse: torch.Tensor, delta: torch.Tensor, dsinks: torch.Tensor) -> None:
        """The kernel of the sinks' gradient, which is PyTorch's in Python."""
        (heads, rows), batch = lse.shape[-2:], lse.shape[0] if lse.dim() == 3 else 1
        numbers = {
            "stride_lb": heads * rows if lse.dim() == 3 else 0,
            "stride_lh": rows,
            "batch": batch,
            "seqlen_q": rows,
        }
        tensors = {"lse": lse, "delta": delta, "sinks": self.tensors["sinks"], "dsinks": dsinks}
        launch(find_one("bwd-dsinks", lse.get_device(), dsinks.dtype, 1), (heads, 1, 1), {**tensors, **numbers})


def operand(tensor: torch.Tensor) -> dict[str, int]:
    """The fields of a `flash_attn_rocm_tensor`."""
    batch, row, head = tensor.stride()[:3] if tensor.dim() == 4 else (0, *tensor.stride()[:2])
    return {"data": tensor.data_ptr(), "batch_stride": batch, "row_stride": row, "head_stride": head}


def draw(seed: int) -> Drawn:
    """The call of a seed."""
    rng = random.Random(seed)
    kind = rng.choices(("forward", "backward", "cache", "fp8"), (4, 2, 4, 1))[0]
    drawing = _Drawing(rng, kind)
    return {"cache": drawing.cache, "fp8": drawing.fp8}.get(kind, drawing.whole)()


def draw_int8(seed: int) -> Drawn:
    """The call with queries and keys in INT8 of a seed."""
    return _Drawing(random.Random(seed), "int8").int8()


class _Drawing:
    """A call as it is drawn."""

    def __init__(self, rng: random.Random, kind: str) -> None:
        self.rng, self.kind = rng, kind
        self.heads_k = rng.choice((1, 2, 4))
        self.heads = self.heads_k * rng.choice((1, 1, 2, 4, 8))
        self.dtype = rng.choice(DTYPES)
        self.head_dim = rng.choice((8, 32, 64, 72, 96, 128, 128, 192, 256, 512, 512))
        self.head_dim_v = self.head_dim
        self.batch = rng.choice((1, 2, 3, 4, 4, 17))
        self.tensors: dict[str, torch.Tensor] = {}
        self.options: dict[str, Any] = {"host_cost": HOST_COST}
        self.call: dict[str, Any] = {}
        self.more: dict[str, Any] = {}  # fields of the struct beside tensors and shape
        self.scores: dict[str, Any] = {"softmax_scale": rng.choice((0.125, 0.5, -0.25))}

    def maybe(self, probability: float = 0.3) -> bool:
        return self.rng.random() < probability

    def tensor(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        self.tensors[name] = torch.empty(shape, dtype=dtype)
        return self.tensors[name]

    def heads_of(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of heads, in some calls between the heads of another one."""
        *rows, heads, head_dim = shape
        more = self.rng.choice((0, 0, 0, 2))
        self.tensors[name] = torch.empty((*rows, heads + more, head_dim), dtype=dtype)[..., :heads, :]
        return self.tensors[name]

    def index(self, name: str, *values: int) -> torch.Tensor:
        self.tensors[name] = torch.tensor(values, **INT)
        return self.tensors[name]

    def scores_(self, *, sinks: bool = True) -> None:
        """Softcap, ALiBi and sinks."""
        if self.maybe(0.2):
            self.scores["softcap"] = self.options["softcap"] = 30.0
        if self.maybe(0.2):
            shape = self.rng.choice(((self.heads,), (self.batch, self.heads)))
            slopes = self.tensor("alibi_slopes", *shape, dtype=torch.float32)
            self.scores["alibi_slopes"] = slopes
            self.options["alibi_slopes"] = slopes.data_ptr()
            if len(shape) == 2:
                self.options["alibi_batch_stride"] = self.heads
        if sinks and self.maybe(0.25):
            wide = self.maybe(0.5) or (self.dtype is torch.float16 and self.kind == "cache")
            numbers = self.tensor("sinks", self.heads, dtype=torch.float32 if wide else self.dtype)
            self.scores["s_aux"] = numbers
            self.options |= {"sinks": numbers.data_ptr(), "sinks_stored": 3 if wide else 0}

    def mask(self) -> dict[str, Any]:
        """The fields of the shape for a mask."""
        causal = self.maybe(0.5)
        left = self.rng.choice((-1, -1, 100, 2000))
        right = -1 if causal else self.rng.choice((-1, -1, 0 if left >= 0 else 7, 40))
        self.scores |= {"causal": causal, "window_size": (left, right)}
        return {"causal": int(causal), "window_left": left, "window_right": right}

    def shape(self, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
        return {
            "dtype": DTYPES.index(self.dtype), "batch": self.batch, "heads": self.heads, "heads_k": self.heads_k,
            "head_dim": self.head_dim, "head_dim_v": self.head_dim_v, "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k, "softmax_scale": self.scores["softmax_scale"], **self.mask(),
        }  # fmt: skip

    def lengths(self, most: int) -> list[int]:
        return [self.rng.randint(1, most) for _ in range(self.batch)]

    def starts(self, name: str, lengths: list[int]) -> torch.Tensor:
        return self.index(name, 0, *accumulate(lengths))

    def whole(self) -> Drawn:
        """A forward or a backward of whole sequences: dense, packed, or over pages."""
        rng, backward = self.rng, self.kind == "backward"
        layout = rng.choice(("dense", "dense", "packed", "paged"))
        if backward and layout == "paged":
            layout = "packed"
        few = self.maybe(0.4) and not backward
        most_q, most_k = (rng.choice((1, 2, 8)), rng.choice((600, 3000, 20000))) if few else (300, 700)
        if backward and self.maybe(0.3):  # dk and dv in parts
            most_q, self.heads = 1500, 8 * self.heads_k
        if self.maybe(0.2) and self.dtype is not torch.float32:
            self.head_dim, self.head_dim_v = rng.choice(((128, 64), (192, 128)))
        if layout != "dense":
            lengths_q, lengths_k = self.lengths(most_q), self.lengths(most_k)
            seqlen_q, seqlen_k, total_q, total_k = max(lengths_q), max(lengths_k), sum(lengths_q), sum(lengths_k)
            starts_q, starts_k = self.starts("cu_seqlens_q", lengths_q), self.starts("cu_seqlens_k", lengths_k)
            self.call |= {
                "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k
            }  # fmt: skip
            rows_q, rows_k = (total_q,), (total_k,)
        else:
            seqlen_q, seqlen_k = rng.randint(1, most_q), rng.randint(most_k // 2, most_k)
            rows_q, rows_k = (self.batch, seqlen_q), (self.batch, seqlen_k)
        if layout == "paged":
            page = rng.choice((16, 48, 64, 256))
            columns = -(-seqlen_k // page)
            rows_k = (self.batch * columns, page)
            table = self.index("block_table", *range(self.batch * columns)).view(self.batch, columns)
            self.call["block_table"] = table
            self.more |= {
                "block_table": table.data_ptr(), "block_table_stride": columns, "block_table_columns": columns,
                "page_size": page,
            }  # fmt: skip
        q = self.heads_of("q", *rows_q, self.heads, self.head_dim, dtype=self.dtype)
        k = self.heads_of("k", *rows_k, self.heads_k, self.head_dim, dtype=self.dtype)
        v = self.heads_of("v", *rows_k, self.heads_k, self.head_dim_v, dtype=self.dtype)
        bias = layout == "dense" and self.head_dim == self.head_dim_v and self.maybe(0.2)
        # Python computes the lengths of packed keys on the GPU to split them. C splits where the caller has lengths.
        if not backward and not bias and (layout == "paged" or (few and layout == "packed") or self.maybe(0.3)):
            used = self.index("seqlens_k", *self.lengths(seqlen_k))
            self.call["seqused_k"], self.more["seqlens_k"] = used, used.data_ptr()
            if self.maybe(0.3):
                pad = self.index("leftpad_k", *[0] * self.batch)
                self.call["leftpad_k"], self.options["leftpad_k"] = pad, pad.data_ptr()
        same_width = self.head_dim == self.head_dim_v
        masked = layout == "dense" and not bias and same_width and self.head_dim <= 256 and self.maybe(0.3)
        if bias:
            self.bias(seqlen_q, seqlen_k)
        else:
            if masked and not self.more:
                self.mask_in_memory(seqlen_q, seqlen_k)
            self.scores_()
            self.dropout()
        shape = self.shape(seqlen_q, seqlen_k)
        if layout != "dense":
            shape |= {
                "cu_seqlens_q": starts_q.data_ptr(), "cu_seqlens_k": starts_k.data_ptr(), "total_q": total_q,
                "total_k": total_k,
            }  # fmt: skip
        call = AttentionCall(q, k, v, Options(**self.scores), **self.call)
        return self.drawn(call, shape, q, k, v)

    def fp8(self) -> Drawn:
        """A forward of whole sequences in FP8: of tensors that are stored in it, or that are cast."""
        rng, heads = self.rng, {"q": self.heads, "k": self.heads_k, "v": self.heads_k}
        self.head_dim = self.head_dim_v = rng.choice((16, 64, 80, 128, 256))
        small = self.dtype is not torch.float32 and self.maybe(0.4)
        stored = dict.fromkeys("kv", small) | {"q": small and self.dtype is torch.bfloat16 and self.maybe(0.5)}
        seqlen_q, seqlen_k = rng.randint(1, 500), rng.randint(1, 500)
        packed: dict[str, int] = {}
        rows = {"q": (self.batch, seqlen_q), **dict.fromkeys("kv", (self.batch, seqlen_k))}
        if self.maybe(0.4):
            lengths_q, lengths_k = self.lengths(300), self.lengths(500)
            seqlen_q, seqlen_k, total_q, total_k = max(lengths_q), max(lengths_k), sum(lengths_q), sum(lengths_k)
            each = (("cu_seqlens_q", lengths_q), ("cu_seqlens_k", lengths_k))
            starts = {name: self.starts(name, lengths) for name, lengths in each}
            self.call |= {**starts, "max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
            packed = {"total_q": total_q, "total_k": total_k, **{name: x.data_ptr() for name, x in starts.items()}}
            rows = {"q": (total_q,), **dict.fromkeys("kv", (total_k,))}
        q, k, v = (
            self.heads_of(x, *rows[x], heads[x], self.head_dim, dtype=FP8 if stored[x] else self.dtype) for x in "qkv"
        )
        descales: list[torch.Tensor | None] = []
        for x in "qkv":
            given = stored[x] or self.maybe(0.3)
            descales.append(self.tensor(f"{x}_descale", self.batch, heads[x], dtype=torch.float32) if given else None)
            if given:
                self.options[f"{x}_descale"] = self.tensors[f"{x}_descale"].data_ptr()
        self.scores_(sinks=False)
        self.dropout()
        self.options["compute"] = 2
        shape = self.shape(seqlen_q, seqlen_k) | packed
        call = AttentionCall(q, k, v, Options(**self.scores), descales=tuple(descales), **self.call)
        drawn = self.drawn(call, shape, q, k, v)
        for x in "qkv":
            drawn.struct[x]["stored"] = FP8_NUMBER if stored[x] else 0
        return drawn

    def int8(self) -> Drawn:
        """A forward of dense sequences with queries and keys in INT8."""
        rng = self.rng
        self.dtype, self.head_dim = rng.choice(DTYPES[:2]), rng.choice((16, 48, 64, 128))
        self.head_dim_v, self.scores["softmax_scale"] = self.head_dim, 0.125
        seqlen_q, seqlen_k = rng.randint(1, 500), rng.randint(1, 500)
        q = self.heads_of("q", self.batch, seqlen_q, self.heads, self.head_dim, dtype=self.dtype)
        k, v = (self.heads_of(x, self.batch, seqlen_k, self.heads_k, self.head_dim, dtype=self.dtype) for x in "kv")
        self.options["compute"] = 1
        if self.maybe(0.5):
            mean = self.tensor("k_mean", self.batch, self.heads_k, self.head_dim, dtype=torch.float32)
            self.options["k_mean"] = mean.data_ptr()
        shape = self.shape(seqlen_q, seqlen_k)
        return self.drawn(AttentionCall(q, k, v, Options(**self.scores)), shape, q, k, v)

    def dropout(self) -> None:
        if self.maybe(0.2):
            state = self.tensor("rng_state", 2, dtype=torch.int64)
            self.scores |= {"dropout_p": 0.25, "rng_state": state}
            self.options |= {"dropout": 0.25, "rng_state": state.data_ptr()}

    def bias(self, seqlen_q: int, seqlen_k: int) -> None:
        wide = self.maybe(0.5)
        planes = self.rng.choice((1, self.batch)), self.rng.choice((1, self.heads))
        dtype = torch.float32 if wide else self.dtype
        is_table = self.maybe(0.3)  # of distances
        plane = (seqlen_q + seqlen_k - 1,) if is_table else (seqlen_q, seqlen_k)
        bias = self.tensor("bias", *planes, *plane, dtype=dtype)
        self.scores["attn_bias"] = bias
        first = bias[..., seqlen_q - 1 :] if is_table else bias
        self.tensors["first of bias"] = first
        elements = math.prod(plane)
        self.options |= {
            "bias": first.data_ptr(), "bias_stored": 3 if wide else 0,
            "bias_batch_stride": planes[1] * elements if planes[0] > 1 else 0,
            "bias_head_stride": elements if planes[1] > 1 else 0, "bias_row_stride": -1 if is_table else seqlen_k,
        }  # fmt: skip

    def mask_in_memory(self, seqlen_q: int, seqlen_k: int) -> None:
        """Blocks, ranges, ids and hidden queries, at least one of them."""
        rng, parts = self.rng, self.rng.choice(("b", "r", "i", "h", "br", "bi", "ri", "bh", "ih", "brih"))
        blocks = ranges = ids_q = ids_k = hidden = None

        def planes() -> tuple[int, int]:
            return rng.choice((1, self.batch)), rng.choice((1, self.heads))

        def strides(name: str, x: torch.Tensor) -> dict[str, int]:
            of_batch = x.stride(0) if x.shape[0] > 1 else 0
            return {f"{name}_batch_stride": of_batch, f"{name}_head_stride": x.stride(1) if x.shape[1] > 1 else 0}

        if "b" in parts:
            size = rng.choice(((64, 64), (128, 64), (128, 192)))
            seen = self.tensor("blocks", *planes(), -(-seqlen_q // size[0]), -(-seqlen_k // size[1]), dtype=torch.bool)
            blocks = BlockMask(seen, size)
            self.options |= {"mask_blocks": seen.data_ptr(), "mask_block_q": size[0], "mask_block_k": size[1]}
            self.options |= strides("mask_blocks", seen)
        if "r" in parts:
            ranges = self.tensor("ranges", *planes(), seqlen_q, 2, 2, dtype=torch.int32)
            self.options |= {"mask_ranges": ranges.data_ptr(), **strides("mask_ranges", ranges)}
        if "i" in parts:
            ids_q, ids_k = (
                self.tensor(f"ids_{name}", rng.choice((1, self.batch)), length, dtype=torch.int32)
                for name, length in (("q", seqlen_q), ("k", seqlen_k))
            )
            for name, ids in (("q", ids_q), ("k", ids_k)):
                self.options[f"mask_ids_{name}"] = ids.data_ptr()
                self.options[f"mask_ids_{name}_batch_stride"] = ids.stride(0) if ids.shape[0] > 1 else 0
        if "h" in parts:
            hidden = self.tensor("hidden", *planes(), seqlen_k, 2, 2, dtype=torch.int32)
            self.options |= {"mask_hidden": hidden.data_ptr(), **strides("mask_hidden", hidden)}
        self.scores["mask"] = Mask(blocks, ranges, ids_q, ids_k, hidden)

    def cache(self) -> Drawn:
        """A call over a cache of keys and values, by kernels of a cache: few queries, chunks, a number of splits."""
        rng = self.rng
        seqlen_q = rng.choice((1, 1, 2, 5, 5))
        fp8 = self.dtype is not torch.float32 and self.maybe(0.3)
        q_dtype = FP8 if fp8 and self.dtype is torch.bfloat16 and self.maybe(0.5) else self.dtype
        latent = not fp8 and self.maybe(0.15)
        if fp8:
            self.head_dim = self.head_dim_v = rng.choice((64, 128, 256))
        elif latent:
            self.head_dim, self.head_dim_v, self.options["second_query"] = rng.choice((32, 64)), 512, 1
        elif self.maybe(0.3):
            self.head_dim_v = rng.choice((64, 128, 256))
        room = rng.choice((700, 5000, 30000))
        if self.maybe(0.2):
            self.scores["attention_chunk"] = self.options["attention_chunk"] = 256
        # Python may let another kernel serve a call that has no splits, but neither FP8 nor chunks.
        splits = rng.choice((0, 0, 1, 2, 3, 7) if fp8 or latent or "attention_chunk" in self.scores else (2, 3, 7))
        if splits:
            self.call["num_splits"] = self.options["num_splits"] = splits
        lines = self.batch
        layout = rng.choice(("dense", "lines", "paged"))
        packed: dict[str, int] = {}
        if layout == "paged" and self.maybe(0.4):
            lengths_q = self.lengths(seqlen_q)
            seqlen_q = max(lengths_q)
            starts = self.starts("cu_seqlens_q", lengths_q)
            self.call |= {"cu_seqlens_q": starts, "max_seqlen_q": seqlen_q}
            packed = {"total_q": sum(lengths_q), "cu_seqlens_q": starts.data_ptr(), "cu_seqlens_k": starts.data_ptr()}
            rows_q: tuple[int, ...] = (packed["total_q"],)
        else:
            rows_q = (self.batch, seqlen_q)
        second = self.head_dim_v if latent else 0
        rows = self.heads_of("q", *rows_q, self.heads, second + self.head_dim, dtype=q_dtype)
        q = rows[..., second:]
        if latent:
            self.call["qv"] = rows[..., :second]
        if layout == "paged":
            page = rng.choice((16, 48, 256))
            columns = room // page
            room = columns * page
            rows_k = (self.batch * columns, page)
            table = self.index("block_table", *range(self.batch * columns)).view(self.batch, columns)
            self.call["block_table"] = table
            self.more |= {
                "block_table": table.data_ptr(), "block_table_stride": columns, "block_table_columns": columns,
                "page_size": page,
            }  # fmt: skip
        else:
            if layout == "lines":
                lines += 2
                where = self.index("cache_lines", *rng.sample(range(lines), self.batch))
                self.call["cache_batch_idx"], self.options["cache_lines"] = where, where.data_ptr()
            rows_k = (lines, room)
        dtype = FP8 if fp8 else self.dtype
        k = self.tensor("k", *rows_k, self.heads_k, self.head_dim, dtype=dtype)
        v = self.tensor("v", *rows_k, self.heads_k, self.head_dim_v, dtype=dtype)
        used = self.index("seqlens_k", *self.lengths(room - 16))
        self.call["cache_seqlens"], self.more["seqlens_k"] = used, used.data_ptr()
        if self.maybe(0.3):
            pad = self.index("leftpad_k", *[0] * self.batch)
            self.call["cache_leftpad"], self.options["leftpad_k"] = pad, pad.data_ptr()
        if fp8:
            scales = tuple(self.tensor(f"{x}_descale", self.batch, self.heads_k, dtype=torch.float32) for x in "qkv")
            self.call["descales"] = scales
            self.options |= {f"{x}_descale": scale.data_ptr() for x, scale in zip("qkv", scales, strict=True)}
        appends = None
        if not fp8 and not latent and self.maybe(0.4):
            appends = self.append(q, seqlen_q, room, k, v)
        else:
            self.call["max_seqlen_k"] = room
        self.scores_()
        shape = self.shape(seqlen_q, room) | packed
        call = CacheCall(q, k, v, Options(**self.scores), **self.call)
        drawn = self.drawn(call, shape, rows, k, v)
        for name, dtype in (("q", q_dtype), ("k", k.dtype), ("v", v.dtype)):
            drawn.struct[name]["stored"] = FP8_NUMBER if dtype is FP8 else 0
        if appends is not None:
            appends["shape"] = shape
            for name in ("k", "v"):
                appends[name] = drawn.struct[name]
            drawn.appends = appends
        return drawn

    def append(self, q: torch.Tensor, seqlen_q: int, room: int, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
        """New rows, with rotary embedding or without. Returns the C call but for its shape and its cache."""
        rng = self.rng
        added, starts = rng.choice((1, seqlen_q, 7)), None
        rows: tuple[int, ...] = (self.batch, added)
        if self.maybe(0.3):
            lengths = self.lengths(7)
            starts, added, rows = self.starts("starts_new", lengths), sum(lengths), (sum(lengths),)
            self.call["cu_seqlens_k_new"], self.options["appended_starts"] = starts, starts.data_ptr()
        self.call["max_seqlen_k"] = room - added
        self.options["appended"] = added
        new = {
            f"{name}_new": self.tensor(f"{name}_new", *rows, self.heads_k, cache.shape[-1], dtype=self.dtype)
            for name, cache in (("k", k), ("v", v))
        }
        self.call |= {"k": new["k_new"], "v": new["v_new"]}
        fields: dict[str, Any] = {name: operand(tensor) for name, tensor in new.items()}
        fields |= {"seqlen_new": added, "starts_new": 0 if starts is None else starts.data_ptr()}
        if self.maybe(0.5):
            half = min(rng.choice((16, self.head_dim // 2)), self.head_dim // 2)
            cos, sin = (self.tensor(name, room + 8, half, dtype=self.dtype) for name in ("cos", "sin"))
            interleaved = self.maybe(0.5)
            self.call |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
            fields |= {
                "q": operand(q), "q_turned": operand(torch.empty_like(q)), "rotary_cos": cos.data_ptr(),
                "rotary_sin": sin.data_ptr(), "rotary_half": half, "rotary_places": room + 8,
                "rotary_interleaved": int(interleaved),
            }  # fmt: skip
            if self.maybe(0.3):
                first = self.index("rotary_offsets", *[1] * self.batch)
                self.call["rotary_seqlens"], fields["rotary_offsets"] = first, first.data_ptr()
        return fields

    def drawn(
        self, call: AttentionCall | CacheCall, shape: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Drawn:
        struct = {"shape": shape, "q": operand(q), "k": operand(k), "v": operand(v), **self.more}
        struct["options"] = self.options
        learned = [name for name in ("sinks", "bias") if name in self.tensors and self.kind == "backward"]
        return Drawn(self.kind, self.tensors, call, struct, learned=tuple(x for x in learned if self.maybe(0.7)))


def is_padded(drawn: Drawn) -> bool:
    """Whether Python pads the head dims first, which the C library leaves to its caller."""
    pair = drawn.call.q.shape[-1], drawn.struct["shape"]["head_dim_v"]
    return drawn.kind != "cache" and served_pair(*pair) != pair
