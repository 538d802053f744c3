"""fp32 and int8 on CPU: numba kernels on threads of their own. Each part imports only those below it:

    kernels.py     the operations that a model is made of
    layers/        linear layers and whole blocks, as calls of kernels
    threads/       tables of calls, and the pool of threads that computes them
    attention/     rotation, pages of keys and values, softmax
    gemm/          matrix products over packed weights, and what adapters change in them
    rowwise/       RMSNorm, drawing tokens
    primitives/    records of calls, raw memory, registers, vector math, the linking of machine code

Importing any of them first sets the folder for compiled kernels.
"""

from executor_service.backends.torch_backend.cpu import kernel_cache as kernel_cache
