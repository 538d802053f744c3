"""fp32 and int8 on CPU: numba kernels on threads of their own; importing one sets their cache first."""

from executor_service.backends.torch_backend.cpu import kernel_cache as kernel_cache
