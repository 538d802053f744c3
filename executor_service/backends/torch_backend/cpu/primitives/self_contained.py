"""Machine code that calls only its own functions, so that it computes the same in every process.

Numba compiles the functions that a kernel calls one by one and loads each of them; the kernel's object has
copies of those that were not inlined, as weak symbols. LLVM binds a weak symbol to what it has loaded under
that name before. So in the process that compiles, a kernel would call the functions as they were compiled
alone, and in one that loads the object from the cache its own copies, which were optimized together with
their callers: sums in another order, other multiply-adds fused.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import Linkage  # type: ignore[import-untyped]
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import AnalysisPass, register_pass
from numba.core.typed_passes import AnnotateTypes


class _SelfContainedLibrary(JITCodeLibrary):
    """A function's machine code, in which the copies of what it calls have no names for the linker."""

    def _optimize_final_module(self) -> None:
        super()._optimize_final_module()  # type: ignore[no-untyped-call]
        # After the optimization, to which such functions would be another matter: it would inline more.
        for function in self._final_module.functions:
            if function.linkage is Linkage.linkonce_odr:
                function.linkage = Linkage.internal


@register_pass(mutates_CFG=False, analysis_only=True)  # type: ignore[no-untyped-call]
class _PrepareLibrary(AnalysisPass):
    """Comes before the lowering, which makes a library only where there is none."""

    _name = "paceline_prepare_library"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def run_pass(self, state: Any) -> bool:
        codegen = state.targetctx.codegen()
        name = state.func_id.func_qualname
        state.library = _SelfContainedLibrary(codegen, name)  # type: ignore[no-untyped-call]
        state.library.enable_object_caching()
        return False


class SelfContained(CompilerBase):
    """`njit(pipeline_class=SelfContained)`: numba's own passes, but no call leaves the machine code.

    Only calls to C remain: of libm, of Python and of numba's runtime.
    """

    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)  # type: ignore[no-untyped-call]
        passes.add_pass_after(_PrepareLibrary, AnnotateTypes)
        passes.finalize()
        return [passes]
