"""From a kernel's specification to something that can be launched, compiled once per specification."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from tile_ep.kernels.combine import CombineSpec
from tile_ep.kernels.combine import build as build_combine
from tile_ep.kernels.dispatch import DispatchSpec
from tile_ep.kernels.dispatch import build as build_dispatch
from tile_ep.kernels.primitives import PASS_CONFIGS

KernelSpec = DispatchSpec | CombineSpec

_LOG = logging.getLogger("tile_ep")
_SLOW_S = 2.0
_COMPILE_LOCK = threading.Lock()
_SOURCES: dict[tuple[KernelSpec, str, bool], str] = {}
_CHECKED_OFF = "tl.disable_safe_memory_legalize"


def build(spec: KernelSpec) -> Any:
    """The TileLang `PrimFunc` of `spec`."""
    return build_dispatch(spec) if isinstance(spec, DispatchSpec) else build_combine(spec)


def pass_configs(checked: bool = False) -> dict[str, bool]:
    """Compiler passes. `checked` keeps TileLang's bounds checks on ordinary accesses."""
    return {name: value for name, value in PASS_CONFIGS.items() if not (checked and name == _CHECKED_OFF)}


def cuda_source(spec: KernelSpec, arch: str = "sm_90a", checked: bool = False) -> str:
    """CUDA text of `spec`. Needs no GPU. Made once, however many threads ask at the same time.

    Args:
        arch: compute capability as nvcc spells it: sm_90a, sm_100a.
        checked: keep TileLang's safe-memory pass.
    """
    import tilelang
    from tilelang import tvm

    key = spec, arch, checked
    with _COMPILE_LOCK:
        if key not in _SOURCES:
            target = tvm.target.Target({"kind": "cuda", "arch": arch})
            with target, tvm.transform.PassContext(config=pass_configs(checked)):
                _SOURCES[key] = str(tilelang.lower(build(spec), target=target).kernel_source)
        return _SOURCES[key]


class CudaKernel:
    """A compiled kernel. Calling it enqueues one launch on the current CUDA stream."""

    def __init__(self, spec: KernelSpec) -> None:
        import tilelang

        self.spec = spec
        function = build(spec)
        self._names = _parameter_names(function)
        timer = threading.Timer(_SLOW_S, _LOG.warning, ("compiling %s, once per configuration", spec))
        timer.start()
        try:
            self._kernel = tilelang.compile(function, target=_target(), pass_configs=pass_configs())
            self._entry = _entry_point(self._kernel)
            self._load()
        finally:
            timer.cancel()

    def _load(self) -> None:
        """Load the code onto the device now: CUDA would do it at the first launch, and may wait there for kernels that in
        turn wait for this one.
        """
        import torch

        size = self.spec.control.num_bytes + (1 << 20)
        self._scratch = torch.zeros(size, dtype=torch.uint8, device="cuda")
        address = self._scratch.data_ptr()
        peers = torch.full((self.spec.num_ranks,), address, dtype=torch.int64).cuda().view(torch.uint64)
        numbers = {name: 0 for name in self._names if name in _NUMBERS}
        ones = {"num_blocks": self.spec.cluster, "capacity": 1, "alignment": 1}
        self._nothing = {**dict.fromkeys(self._names, address), **numbers, **ones, "peers": peers}
        self.launch_on_scratch()
        torch.cuda.current_stream().synchronize()

    def launch_on_scratch(self) -> None:
        """A launch without tokens, among peers that are all one scratch region: it gives up at once."""
        self(self._nothing)

    def __call__(self, arguments: Mapping[str, Any]) -> None:
        self._entry(*[arguments[name] for name in self._names])


_NUMBERS = {
    *("rank", "num_tokens", "max_tokens", "slot", "slots_at", "slot_bytes", "scales_at", "idx_at", "weights_at"),
    *("source_at", "rows_at", "timeout_ns", "larger_rows", "smaller_rows", "y_rows"),
}
_CUDA_KERNELS: dict[tuple[int, KernelSpec], CudaKernel] = {}


def cuda_kernel(spec: KernelSpec) -> CudaKernel:
    """The compiled kernel of `spec`, for the current device."""
    key = _current_device(), spec
    kernel = _CUDA_KERNELS.get(key)
    if kernel is None:
        with _COMPILE_LOCK:
            kernel = _CUDA_KERNELS.get(key) or CudaKernel(spec)
            _CUDA_KERNELS[key] = kernel
    return kernel


def compiled_kernels() -> list[CudaKernel]:
    """Every kernel compiled so far in this process."""
    return list(_CUDA_KERNELS.values())


def is_compiled(spec: KernelSpec) -> bool:
    """Whether launching `spec` on the current device compiles nothing."""
    return (_current_device(), spec) in _CUDA_KERNELS


def _current_device() -> int:
    import torch

    return torch.cuda.current_device()


def _entry_point(kernel: Any) -> Any:
    """What a TileLang kernel calls once it has looked its arguments and its modules over, which here costs as much as the
    launch. It takes its stream from the tensor among the arguments, as torch has it.
    """
    executable = getattr(kernel.adapter, "get_exportable_executable", None)
    if executable is None:
        return kernel
    module = executable()  # loaded from the cache it can be called as it is
    return getattr(module, "main", None) or module.jit().main


def _target() -> dict[str, str]:
    """TileLang's target for the current device, with what only its generation has."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return {"kind": "cuda", "arch": f"sm_{major}{minor}{'a' if major >= 9 else ''}"}


def _parameter_names(function: Any) -> list[str]:
    return [parameter.name.removesuffix("_handle") for parameter in function.params]
