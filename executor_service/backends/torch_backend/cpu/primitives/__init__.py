"""What numba kernels are written with: raw memory, vector registers, math that LLVM vectorizes, linking."""
