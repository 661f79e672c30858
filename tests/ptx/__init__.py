"""Runs kernels on the CPU: an interpreter of the PTX that NVRTC makes of them.

A machine without a GPU can compile a kernel, but not see that it computes the right thing. Here its
PTX, the very text that the assembler turns into machine code, runs instruction by instruction,
each for all threads at once as NumPy arrays, and what a GPU's tools check is checked on the way:

- every access to device memory lies in an operand, is aligned, and reads nothing unwritten
  (compute-sanitizer's memcheck and initcheck);
- no two threads touch the same element of shared memory between two barriers where one of them
  writes it, and nothing is read while an asynchronous copy to it is under way (racecheck);
- no element of an output is stored by two threads; the threads of a block meet at one barrier, and
  all lanes of a warp at a warp-wide instruction.

Shared memory that was never written, and a register that was never set, read as NaN. Asynchronous
copies arrive as late as they may: in the wait that asks for them. The interpreter cannot show how
fast a kernel is, what the assembler makes of the PTX, and other orders of threads; so it does not
replace the tests on a GPU.

    text     PTX -> instructions
    memory   device and shared memory, with the checks
    machine  threads, divergence, barriers
    opcodes  what each instruction does
    launch   an operation's `Launch` on NumPy operands
"""
