"""Attention of one rectangular block of sequences, tile by tile, in plain PyTorch.

All sequences of a call have the same two lengths. Memory beyond the inputs and outputs is bounded by
`MAX_TILE_ELEMENTS` plus, in the backward, dk and dv in the accumulation type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from flash_attn.attention.backends.torch import scores as modifiers
from flash_attn.call.options import Options, replace

QUERY_TILE = 128
KEY_TILE = 256
MAX_TILE_ELEMENTS = 1 << 23  # scores held at once: 32 MiB in fp32

_MASK64 = (1 << 64) - 1
# Weights may be wrong by this much because softmax_lse is rounded.
_LOST = 2.0**-15


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for every other type."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _tile_seed(*words: int) -> int:
    """One well mixed 63-bit seed for the coordinates of a tile (the finaliser of SplitMix64)."""
    state = 0
    for word in words:
        state = (state + (word & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state >> 1


def _spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def _key_spans(q0: int, q1: int, shift: int, seqlen_k: int, window: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The key tiles that some query of q0..q1 sees; tiles start at multiples of KEY_TILE."""
    left, right = window
    first = max(0, q0 + shift - left) if left >= 0 else 0
    last = min(seqlen_k, q1 + shift + right) if right >= 0 else seqlen_k
    for k0 in range(first // KEY_TILE * KEY_TILE, last, KEY_TILE):
        yield k0, min(k0 + KEY_TILE, seqlen_k)


def _grouped(x: torch.Tensor, heads_k: int) -> torch.Tensor:
    """(b, s, h, d) as a view (b, heads_k, h / heads_k, s, d)."""
    return x.unflatten(2, (heads_k, x.shape[2] // heads_k)).permute(0, 2, 3, 1, 4)


class Inputs(NamedTuple):
    """q (b, sq, h, d), k and v (b, sk, hk, d), options as `scores.by_head` gives them.

    seed: the two numbers from which dropout draws.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: Options
    seed: tuple[int, int] = (0, 0)


class Given(NamedTuple):
    """The inputs of a backward in addition to those of the forward: dout and out (b, sq, h, d), lse (b, h, sq)."""

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Gradients(NamedTuple):
    """The results that a backward writes: dq, dk, dv, laid out as q, k, v, and softmax_d (b, h, sq) = rowsum(dout *
    out).

    dbias, laid out as the bias, is filled if it is not None.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    softmax_d: torch.Tensor
    dbias: torch.Tensor | None = None


class _Block:
    """One chunk of the batch in (b, heads_k, group, s, d) layout, and the scores of its tiles."""

    def __init__(self, inputs: Inputs, coordinates: tuple[int, int]) -> None:
        q, k, v, options, self.seed = inputs
        heads_k = k.shape[2]
        self.q = _grouped(q, heads_k)
        self.k = k.transpose(1, 2)
        self.v = v.transpose(1, 2)
        self.batch, _, self.group, self.seqlen_q, _ = self.q.shape
        self.heads_k = heads_k
        self.seqlen_k = k.shape[1]
        self.shift = self.seqlen_k - self.seqlen_q
        self.dtype = accumulation_dtype(q.dtype)
        self.options = modifiers.by_group(options, heads_k)
        self.sinks = None if self.options.s_aux is None else self.options.s_aux.to(self.dtype)
        self.window = modifiers.window_of(options)
        self.coordinates = coordinates
        self.generator = torch.Generator(device=q.device) if options.dropout_p > 0.0 else None

    def query_spans(self) -> Iterator[tuple[int, int]]:
        return _spans(0, self.seqlen_q, QUERY_TILE)

    def key_spans(self, q0: int, q1: int) -> Iterator[tuple[int, int]]:
        if self.options.mask is None:
            yield from _key_spans(q0, q1, self.shift, self.seqlen_k, self.window)
            return
        for k0, k1 in _spans(0, self.seqlen_k, KEY_TILE):
            hidden = modifiers.hidden_by(self.options, *self.places(q0, q1, k0, k1), self.seen(q0, q1, k0, k1))
            if hidden is None or not hidden.all():
                yield k0, k1

    def places(self, q0: int, q1: int, k0: int, k1: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The key on the diagonal of each row, (rows, 1), and the numbers of the keys."""
        rows = torch.arange(q0 + self.shift, q1 + self.shift, device=self.q.device)[:, None]
        return rows, torch.arange(k0, k1, device=self.q.device)

    def seen(self, q0: int, q1: int, k0: int, k1: int) -> modifiers.Seen | None:
        mask = self.options.mask
        return None if mask is None else modifiers.seen_by(mask, slice(q0, q1), slice(k0, k1), self.heads_k)

    def rows(self, x: torch.Tensor, q0: int, q1: int) -> torch.Tensor:
        """Query rows of a (b, heads_k, group, s, d) tensor as (b, heads_k, group * rows, d)."""
        return x[:, :, :, q0:q1].to(self.dtype).flatten(2, 3)

    def ungroup(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (self.group, x.shape[2] // self.group))

    def scores(
        self, queries: torch.Tensor, keys: torch.Tensor, q0: int, q1: int, k0: int, k1: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(b, heads_k, group, rows, keys) scores, masked with -inf, and their derivative: see `scores.modified`."""
        scores = self.ungroup(queries @ keys.transpose(-1, -2)) * self.options.scale
        options = modifiers.of_tile(self.options, slice(q0, q1), slice(k0, k1), self.seqlen_q)
        left, right = self.window
        first, last = q0 + self.shift, q1 - 1 + self.shift
        if (left < 0 or k0 >= last - left) and (right < 0 or k1 - 1 <= first + right):
            options = replace(options, causal=False, window_size=(-1, -1))  # it hides nothing here
        return modifiers.modified(scores, options, *self.places(q0, q1, k0, k1), self.seen(q0, q1, k0, k1))

    def kept(self, q0: int, q1: int, k0: int, k1: int) -> torch.Tensor:
        """Dropout mask of a tile; a function of the seed and the tile's place, not of the order."""
        assert self.generator is not None
        self.generator.manual_seed(_tile_seed(*self.seed, *self.coordinates, q0, k0))
        shape = (self.batch, self.heads_k, self.group, q1 - q0, k1 - k0)
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float32, device=self.q.device)
        return drawn >= self.options.dropout_p


def _blocks(inputs: Inputs, sequence: int) -> Iterator[tuple[slice, _Block]]:
    """Chunks of the batch small enough for MAX_TILE_ELEMENTS."""
    q, k, v, options, seed = inputs
    per_sequence = q.shape[2] * min(QUERY_TILE, q.shape[1]) * min(KEY_TILE, k.shape[1])
    step = max(1, MAX_TILE_ELEMENTS // max(1, per_sequence))
    for b0, b1 in _spans(0, q.shape[0], step):
        chunk = slice(b0, b1)
        part = Inputs(q[chunk], k[chunk], v[chunk], modifiers.of_sequences(options, chunk), seed)
        yield chunk, _Block(part, (sequence, b0))


def forward(
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dmask: torch.Tensor | None = None,
    sequence: int = 0,
) -> None:
    """Fills out (b, sq, h, d), lse (b, h, sq) and, if given, dmask (b, h, sq, sk).

    A row without keys gets out 0, lse +inf or its sink. dmask gets the probabilities, negative where dropped.
    `sequence` tells dropout masks apart.
    """
    options = inputs.options
    for chunk, block in _blocks(inputs, sequence):
        block_out = _grouped(out[chunk], block.heads_k)
        block_lse = lse[chunk].unflatten(1, (block.heads_k, block.group))
        for q0, q1 in block.query_spans():
            queries = block.rows(block.q, q0, q1)
            shape = (block.batch, block.heads_k, block.group, q1 - q0, 1)
            maximum = queries.new_full(shape, -torch.inf)
            total = queries.new_zeros(shape)
            summed = queries.new_zeros((*shape[:-1], inputs.v.shape[-1]))
            for k0, k1 in block.key_spans(q0, q1):
                keys, values = (x[:, :, k0:k1].to(block.dtype) for x in (block.k, block.v))
                scores, _ = block.scores(queries, keys, q0, q1, k0, k1)
                if not values.isfinite().all():  # 0 * NaN is NaN: values that no row of the tile sees become zeros
                    values = values.masked_fill((scores == -torch.inf).all(3).all(2)[..., None], 0.0)
                new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
                # A row that has seen only -inf keeps weights of 0 instead of exp(-inf + inf).
                origin = new_maximum.masked_fill(new_maximum == -torch.inf, 0.0)
                weights = torch.exp(scores - origin)
                correction = torch.exp(maximum - origin)
                total = total * correction + weights.sum(-1, keepdim=True)
                if options.dropout_p > 0.0:
                    weights = weights * block.kept(q0, q1, k0, k1)
                summed = summed * correction + block.ungroup(weights.flatten(2, 3) @ values)
                maximum = new_maximum
            if block.sinks is not None:  # scores without values
                new_maximum = torch.maximum(maximum, block.sinks)
                origin = new_maximum.masked_fill(new_maximum == -torch.inf, 0.0)
                correction = torch.exp(maximum - origin)
                total = total * correction + torch.exp(block.sinks - origin)
                summed = summed * correction
                maximum = new_maximum
            empty = total == 0.0
            factor = torch.where(empty, 1.0, 1.0 / total) / (1.0 - options.dropout_p)
            block_out[:, :, :, q0:q1] = (summed * factor).to(out.dtype)
            row_lse = torch.where(empty, torch.inf, maximum + torch.log(total))
            block_lse[:, :, :, q0:q1] = row_lse.squeeze(-1)
            if dmask is not None:
                _fill_dmask(block, dmask[chunk], queries, row_lse, q0, q1)


def _fill_dmask(
    block: _Block, dmask: torch.Tensor, queries: torch.Tensor, row_lse: torch.Tensor, q0: int, q1: int
) -> None:
    grouped = dmask.unflatten(1, (block.heads_k, block.group))
    tiny = torch.finfo(dmask.dtype).tiny
    for k0, k1 in block.key_spans(q0, q1):
        scores, _ = block.scores(queries, block.k[:, :, k0:k1].to(block.dtype), q0, q1, k0, k1)
        probabilities = torch.exp(scores - row_lse)
        # The sign must survive rounding to zero in the mask's type.
        signed = torch.where(block.kept(q0, q1, k0, k1), probabilities, -probabilities.clamp_min(tiny))
        signed = signed.masked_fill(scores == -torch.inf, 0.0)
        grouped[:, :, :, q0:q1, k0:k1] = signed.to(dmask.dtype)


def _lost_by_rounding(
    block: _Block, queries: torch.Tensor, row_lse: torch.Tensor, q0: int, q1: int
) -> torch.Tensor | float:
    """The correction for rounding of lse: log of the sum of a row's weights exp(score - lse), sink included; 0.0 if
    every lse is small.

    If a bias of -1e9 or of the lowest number hides all keys of a row, lse rounds to that number, because the logarithm
    of the number of keys is less than its last bit.
    """
    large = row_lse.isfinite() & (row_lse.abs() * torch.finfo(block.dtype).eps > _LOST)
    if not large.any():
        return 0.0
    total = torch.zeros_like(row_lse) if block.sinks is None else torch.exp(block.sinks - row_lse)
    for k0, k1 in block.key_spans(q0, q1):
        scores, _ = block.scores(queries, block.k[:, :, k0:k1].to(block.dtype), q0, q1, k0, k1)
        total = total + torch.exp(scores - row_lse).sum(-1, keepdim=True)
    return torch.where(large, total.log(), 0.0)


def backward(inputs: Inputs, given: Given, written: Gradients, sequence: int = 0) -> None:
    """Fills the gradients of one block of sequences."""
    options = inputs.options
    dout, out, lse = given
    dq, dk, dv, softmax_d, dbias = written
    exact = None if dbias is None else torch.zeros(dbias.shape, dtype=accumulation_dtype(dq.dtype), device=dq.device)
    keep_scale = 1.0 / (1.0 - options.dropout_p)
    for chunk, block in _blocks(inputs, sequence):
        block_dq = _grouped(dq[chunk], block.heads_k)
        block_dout = _grouped(dout[chunk], block.heads_k)
        block_out = _grouped(out[chunk], block.heads_k)
        block_lse = lse[chunk].unflatten(1, (block.heads_k, block.group))
        block_d = softmax_d[chunk].unflatten(1, (block.heads_k, block.group))
        block_dbias = None
        if exact is not None:
            block_dbias = modifiers.grouped(exact if exact.shape[0] == 1 else exact[chunk], block.heads_k)
        dkeys = torch.zeros(block.k.shape, dtype=block.dtype, device=dk.device)
        dvalues = torch.zeros(block.v.shape, dtype=block.dtype, device=dv.device)
        for q0, q1 in block.query_spans():
            queries, douts = block.rows(block.q, q0, q1), block.rows(block_dout, q0, q1)
            delta = block.ungroup((douts * block.rows(block_out, q0, q1)).sum(-1, keepdim=True))
            block_d[:, :, :, q0:q1] = delta.squeeze(-1)
            row_lse = block_lse[:, :, :, q0:q1, None].to(block.dtype)
            lost = _lost_by_rounding(block, queries, row_lse, q0, q1)
            dqueries = torch.zeros_like(queries)
            for k0, k1 in block.key_spans(q0, q1):
                keys, values = (x[:, :, k0:k1].to(block.dtype) for x in (block.k, block.v))
                scores, derivative = block.scores(queries, keys, q0, q1, k0, k1)
                weights = torch.exp(scores - row_lse - lost)
                dweights = block.ungroup(douts @ values.transpose(-1, -2))
                used = weights
                if options.dropout_p > 0.0:
                    kept = block.kept(q0, q1, k0, k1)
                    used, dweights = weights * kept * keep_scale, dweights * kept * keep_scale
                dvalues[:, :, k0:k1] += used.flatten(2, 3).transpose(-1, -2) @ douts
                dscores = weights * (dweights - delta)
                if block_dbias is not None:
                    modifiers.add_to_bias(block_dbias, dscores, slice(q0, q1), slice(k0, k1), block.seqlen_q)
                if derivative is not None:
                    dscores = dscores * derivative
                dscores = dscores.flatten(2, 3) * options.scale
                dqueries += dscores @ keys
                dkeys[:, :, k0:k1] += dscores.transpose(-1, -2) @ queries
            block_dq[:, :, :, q0:q1] = block.ungroup(dqueries).to(dq.dtype)
        dk[chunk] = dkeys.transpose(1, 2).to(dk.dtype)
        dv[chunk] = dvalues.transpose(1, 2).to(dv.dtype)
    if dbias is not None and exact is not None:
        dbias.copy_(exact)
