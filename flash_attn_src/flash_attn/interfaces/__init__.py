"""What imitates another interface (FlashAttention-3, FlashAttention-4) or joins another program."""
