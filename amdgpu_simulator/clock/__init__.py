"""How long kernels take: the cycles of each instruction, and a timeline of the waves of a compute unit."""
