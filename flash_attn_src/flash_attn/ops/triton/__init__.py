"""Operations whose GPU side is Triton kernels, compiled ahead of time; CPU tensors are served by PyTorch."""
