"""Executes the code of AMD GPUs instruction by instruction, on a machine without such a GPU. README.md is the map.

    from amdgpu_simulator.isa import assembly, machine

    program = machine.Program(assembly.parse(text))           # what LLVM prints for a kernel
    machine.launch(program, grid, threads, argument, ranges)  # the bytes of its arguments, with CPU pointers

Two things that a GPU lets pass end in an error: an access outside of every tensor or of shared memory, and two waves
that touch the same byte of shared memory without a barrier, if one of them changes it. Registers and memory that nobody
wrote hold NaN. So do the registers of a load until a wait covers it (`isa.waits`).

Sources: AMD, "CDNA3", "CDNA4", "RDNA2", "RDNA3" and "RDNA4 Instruction Set Architecture" reference guides; LLVM, "User
Guide for AMDGPU Backend" (initial state of a wave, kernel descriptor). Not modelled: the order of stores to global
memory, exceptions, and modes: denormals are kept, rounding is to nearest even. A launch takes no time; `clock` plays
afterwards what it executed.
"""
