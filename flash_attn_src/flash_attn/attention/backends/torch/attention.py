"""Attention and its gradients in pure PyTorch, sequence by sequence; see flash_attn.attention.backends.torch."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.torch import scores, sequences, tiles
from flash_attn.call.calls import AttentionCall, ForwardResult, GradientCall, new_out
from flash_attn.call.options import TORCH, Options, draw_rng_state


def forward(call: AttentionCall) -> ForwardResult:
    """See `protocol.Backend.forward`."""
    TORCH.refuse(call, "leave it out")
    q, k, v, out = call.q, call.k, call.v, call.out
    with torch.no_grad(), in_own_types():
        rng_state = call.options.rng_state
        if call.options.dropout_p > 0.0 and rng_state is None:
            rng_state = draw_rng_state(q.device)
        if out is None:
            out = new_out(q, v)
        batch, heads = call.batch, q.shape[-2]
        dmask_dtype = q.dtype if call.return_softmax and call.options.dropout_p > 0.0 else None
        dmask = _zeros((batch, heads, call.longest_q, call.longest_k), dmask_dtype, q.device)
        options, seed = scores.by_head(call.options, batch, heads), _seed_of(call.options, rng_state)
        lse_dtype = tiles.accumulation_dtype(q.dtype)
        varlen = call.cu_seqlens_q is not None
        if not varlen and not call.is_inference:
            lse = torch.empty((batch, heads, q.shape[1]), dtype=lse_dtype, device=q.device)
            tiles.forward(tiles.Inputs(q, k, v, options, seed), out, lse, dmask)
            return ForwardResult(out, lse, dmask, rng_state)
        flat_q, flat_out = (x if varlen else x.reshape(-1, *x.shape[2:]) for x in (q, out))
        flat_out.zero_()
        lse = torch.full((heads, flat_q.shape[0]), torch.inf, dtype=lse_dtype, device=q.device)
        flat_k, flat_v = (x if x.dim() == 3 or call.block_table is not None else x.flatten(0, 1) for x in (k, v))
        for index, rows in enumerate(sequences.locate(call)):
            keys, values = (sequences.keys_of(x, rows, call.block_table, index) for x in (flat_k, flat_v))
            queries = slice(rows.q0, rows.q1)
            tiles.forward(
                tiles.Inputs(flat_q[None, queries], keys[None], values[None], _of_sequence(options, index), seed),
                flat_out[None, queries],
                lse[None, :, queries],
                None if dmask is None else dmask[index, None, :, : rows.q1 - rows.q0, : rows.k1 - rows.k0],
                index,
            )
        if not varlen:
            lse = lse.unflatten(1, (batch, q.shape[1])).transpose(0, 1).contiguous()
            if flat_out.data_ptr() != out.data_ptr():
                out.copy_(flat_out.view(out.shape))
        return ForwardResult(out, lse, dmask, rng_state)


def backward(gradients: GradientCall) -> torch.Tensor:
    """See `protocol.Backend.backward`. On a CPU it is always deterministic."""
    call = gradients.forward
    TORCH.refuse(call, "leave it out")
    with torch.no_grad(), in_own_types():
        if call.options.dropout_p > 0.0 and call.options.rng_state is None:
            raise ValueError("rng_state: got None, wanted the int64[2] of the forward, as dropout_p > 0")
        options = scores.by_head(call.options, call.batch, call.q.shape[-2])
        seed = _seed_of(call.options, call.options.rng_state)
        softmax_d = torch.zeros_like(gradients.softmax_lse)
        if call.cu_seqlens_q is None:
            outputs = tiles.Given(gradients.dout, gradients.out, gradients.softmax_lse)
            written = tiles.Gradients(gradients.dq, gradients.dk, gradients.dv, softmax_d, gradients.dbias)
            tiles.backward(tiles.Inputs(call.q, call.k, call.v, options, seed), outputs, written)
            return softmax_d
        for gradient in (gradients.dq, gradients.dk, gradients.dv):
            gradient.zero_()
        for index, rows in enumerate(sequences.locate(call)):
            queries, keys = slice(rows.q0, rows.q1), slice(rows.k0, rows.k1)
            inputs = tiles.Inputs(
                call.q[None, queries], call.k[None, keys], call.v[None, keys], _of_sequence(options, index), seed
            )
            outputs = tiles.Given(
                gradients.dout[None, queries], gradients.out[None, queries], gradients.softmax_lse[None, :, queries]
            )
            written = tiles.Gradients(
                gradients.dq[None, queries], gradients.dk[None, keys], gradients.dv[None, keys],
                softmax_d[None, :, queries],
            )  # fmt: skip
            tiles.backward(inputs, outputs, written, index)
        return softmax_d


def in_own_types(device: str = "cpu") -> torch.autocast:
    """No product in the type of a caller's autocast, which a backward is outside of."""
    return torch.autocast(device, enabled=False)


def _seed_of(options: Options, rng_state: torch.Tensor | None) -> tuple[int, int]:
    if rng_state is None or options.dropout_p == 0.0:
        return 0, 0
    seed, offset = rng_state.tolist()
    return seed, offset


def _of_sequence(options: Options, index: int) -> Options:
    return scores.of_sequences(options, slice(index, index + 1))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device) -> torch.Tensor | None:
    return None if dtype is None else torch.zeros(shape, dtype=dtype, device=device)
