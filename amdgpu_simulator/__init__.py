"""Executes the code of AMD GPUs instruction by instruction, on a machine without such a GPU. README.md is the map.

    from amdgpu_simulator.isa import arguments, assembly, machine

    kernel = assembly.parse(text)                     # the assembly text of a kernel, as LLVM prints it
    content, ranges = arguments.pack(kernel, values)  # numpy arrays and numbers
    machine.launch(machine.Program(kernel), grid, threads, content, ranges)

The simulator raises an error where a GPU may stay silent: for an access outside of every tensor or of shared memory,
and for two waves that touch the same byte of shared memory without a barrier, if one of them writes it. Registers and
memory that nobody wrote hold NaN. The registers of a load hold NaN until a wait covers the load (`isa.queues`).

Sources: AMD, "CDNA3", "CDNA4", "RDNA2", "RDNA3" and "RDNA4 Instruction Set Architecture" reference guides; LLVM, "User
Guide for AMDGPU Backend" (initial state of a wave, kernel descriptor). Not modelled: the order of stores of one wave to
global memory, exceptions, and rounding other than to nearest even. A launch takes no time; `clock` replays what a
launch executed.
"""
