"""Tokens drawn from logits."""

from __future__ import annotations

import torch

from flash_attn.ops.checks import check_int, check_number, check_tensor


def modify_logits_for_top_k_filtering(logits: torch.Tensor, top_k: int) -> None:
    """All but the largest top_k of logits (..., vocab_size) become -inf, in place."""
    check_tensor("logits", logits)
    check_int("top_k", top_k, 1, logits.shape[-1])
    logits.masked_fill_(logits < logits.topk(top_k).values[..., -1:], float("-inf"))


def modify_logits_for_top_p_filtering(logits: torch.Tensor, top_p: float) -> None:
    """Logits (..., vocab_size) outside of the smallest set of probability top_p or more become -inf, in place; none
    where top_p is 0 or 1."""
    check_tensor("logits", logits)
    if check_number("top_p", top_p, 0.0, 1.0) in (0.0, 1.0):
        return
    ascending, order = logits.sort(dim=-1)
    outside = ascending.float().softmax(-1).cumsum(-1) <= 1.0 - top_p
    outside[..., -1] = False  # rounding of the sum may not take the likeliest
    logits.masked_fill_(torch.zeros_like(outside).scatter(-1, order, outside), float("-inf"))


def sample(logits: torch.Tensor, top_k: int = 1, top_p: float = 0.0, temperature: float = 1.0) -> torch.Tensor:
    """int64 (batch,): a token for each row of logits (batch, vocab_size).

    top_k 1 takes the likeliest; 0 draws from all, more from so many, and top_p, if not 0, from as few of those as have
    that probability together. logits / temperature are drawn from.
    """
    check_tensor("logits", logits, ("batch", "vocab_size"))
    check_sampling(top_k, top_p, temperature)
    if top_k == 1:
        return logits.argmax(-1)
    tokens = None
    logits = logits / temperature
    if top_k:
        logits, tokens = logits.topk(min(top_k, logits.shape[-1]))
    modify_logits_for_top_p_filtering(logits, top_p)
    drawn = torch.multinomial(logits.float().softmax(-1), 1)
    return (drawn if tokens is None else tokens.gather(-1, drawn)).squeeze(-1)


def check_sampling(top_k: int, top_p: float, temperature: float) -> None:
    check_int("top_k", top_k, 0)
    check_number("top_p", top_p, 0.0, 1.0)
    if check_number("temperature", temperature, 0.0, float("inf"), below=True) == 0.0:
        raise ValueError("temperature: got 0.0, wanted more, or top_k=1 for the likeliest token")
