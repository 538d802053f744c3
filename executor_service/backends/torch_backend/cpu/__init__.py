"""fp32 and int8 on CPU: numba kernels on threads of their own. From top to bottom, each knows those below it:

    kernels.py     the operations that a model is made of
    layers/        linear layers and whole blocks, as calls of kernels
    threads/       tables of calls, which a pool of threads works off
    attention/     rotation, pages of keys and values, softmax
    gemm/          matrix products over packed weights
    rowwise/       RMSNorm, drawing tokens
    primitives/    records that calls are, raw memory, registers, vector math, how machine code is linked

Importing any of them first sets the folder that compiled kernels are kept in.
"""

from executor_service.backends.torch_backend.cpu import kernel_cache as kernel_cache
