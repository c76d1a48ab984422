"""Executes the assembly of AMD GPU kernels instruction by instruction, on a machine without such a GPU.

    program = machine.Program(assembly.parse(text))           # what LLVM prints for a kernel
    machine.launch(program, grid, threads, argument, ranges)  # the bytes of its arguments, with CPU pointers

What a kernel does with its lanes, its registers, shared memory and matrix units is done here as the guides tell it.
What a GPU lets pass ends in an error: an access outside of every tensor or of shared memory, and two waves that touch
the same byte of shared memory without a barrier between them, one of them to change it. Registers and memory that
nobody wrote hold NaN, and so do registers of a load that no wait has covered (`waits`).

A launch comes from a test, or from AMD's own runtime: `hip` starts a process with it, over the driver in kfd.c and the
machine of `topology`; `packets` are what arrives, `through_hip` is how flash_attn's kernels get there.

Sources: AMD, "CDNA3", "CDNA4", "RDNA2", "RDNA3" and "RDNA4 Instruction Set Architecture" reference guides; LLVM, "User
Guide for AMDGPU Backend" (initial state of a wave, kernel descriptor). Not modelled: the order of stores to global
memory, exceptions, and modes: denormals are kept, rounding is to nearest even. Nor does a launch take time: `cycles`
counts what it keeps the units of a compute unit busy, and `timeline` plays what was executed against their clock.
"""
