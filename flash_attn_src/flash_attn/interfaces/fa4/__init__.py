"""What FlashAttention-4's module, flash_attn.cute, is made of."""
