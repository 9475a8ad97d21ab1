"""From generated CUDA text to a shared object that the engine can run, compiled once per text."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tile_ep.errors import ArgumentError, BackendUnavailableError

_HERE = Path(__file__).parent
_INCLUDE = _HERE / "include"
_ENGINE = _HERE / "engine" / "engine.cpp"
_MAX_SHARED_BYTES = 227 * 1024
_BUILD_LOCK = threading.Lock()  # threads that want the same kernel shall not compile it twice
_COMMON_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra")
_ENGINE_FLAGS = (*_COMMON_FLAGS, "-O2")
# Generated code relies on what nvcc does: wrapping integers, punned types, no contraction that the text does not ask for.
_KERNEL_FLAGS = (
    *(*_COMMON_FLAGS, "-O1", "-DTILE_EP_SIM", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing"),
    *("-fno-exceptions", "-fno-rtti", "-fno-stack-protector", "-fno-delete-null-pointer-checks"),
    # Style of generated code, not of ours.
    *("-Wno-unused", "-Wno-sign-compare", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized", "-Wno-parentheses"),
)

_SIGNATURE = re.compile(r'extern "C" __global__ void(?: __launch_bounds__\(([^)]*)\))? (\w+)\(([^)]*)\)\s*\{')
_STATIC_SHARED = re.compile(r"(?<!extern )__shared__\s+(?:__align__\((\d+)\)\s+)?([\w ]+?)\s+(\w+)\[(\d+)\];")
_DYNAMIC_SHARED = re.compile(r"extern __shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];")
_SIZES = {
    **{name: 1 for name in ("uchar", "signed char", "unsigned char", "char", "bool", "int8_t", "uint8_t")},
    **{name: 2 for name in ("short", "ushort", "int16_t", "uint16_t", "half_t", "bfloat16_t")},
    **{name: 4 for name in ("int", "uint", "unsigned int", "int32_t", "uint32_t", "float")},
    **{name: 8 for name in ("int64_t", "uint64_t", "long long", "unsigned long long", "double")},
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of the device function, as declared."""

    name: str
    ctype: str


@dataclass(frozen=True)
class SimKernel:
    """A kernel that the simulator can run.

    Attributes:
        name: of the device function.
        parameters: in order; a launch gives them by name.
        num_threads: of a block.
        static_shared_bytes, dynamic_shared_bytes: shared memory of a block.
        source_path: the text that was compiled, to which line numbers in reports refer.
        library_path: the shared object.
        entry: address of the entry point.
    """

    name: str
    parameters: tuple[Parameter, ...]
    num_threads: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    source_path: Path
    library_path: Path
    entry: int = field(repr=False)


@dataclass(frozen=True)
class LaunchInfo:
    """What a lowered TileLang kernel needs of a launch."""

    name: str
    num_threads: int
    dynamic_shared_bytes: int


def launch_info(artifact: Any) -> LaunchInfo:
    """Read thread count and dynamic shared memory from the result of `tilelang.lower`."""
    functions = list(artifact.device_mod.functions.items())
    if len(functions) != 1:
        raise ArgumentError("artifact", f"{len(functions)} device functions", "one kernel")
    attributes = functions[0][1].attrs
    extents = {str(name): extent for name, extent in attributes["thread_extent"].items()}
    dynamic = dict(attributes.items()).get("dyn_shared_memory_buf", 0)
    return LaunchInfo(str(attributes["global_symbol"]), int(extents["threadIdx.x"]), int(dynamic))


def compile_source(
    source: str,
    num_threads: int | None = None,
    dynamic_shared_bytes: int | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> SimKernel:
    """Compile CUDA text that TileLang generated, with one kernel in it.

    Args:
        num_threads: threads of a block; `None`: as `__launch_bounds__` says.
        dynamic_shared_bytes: dynamic shared memory of a block; `None`: as much as a block can have, if it uses any.
        cache_dir: where compiled kernels are kept; `None`: `$TILE_EP_CACHE`, else the user's cache folder.

    Raises:
        ArgumentError: the text is not what TileLang generates.
        BackendUnavailableError: there is no C++ compiler.
        RuntimeError: the text does not compile.
    """
    text, static_bytes = _place_shared_memory(source)
    name, bound, parameters = _signature(source)
    threads = bound if num_threads is None else num_threads
    if threads is None or not 0 < threads <= 1024 or (bound is not None and threads > bound):
        raise ArgumentError("num_threads", threads, f"1 to {bound or 1024}, as the kernel declares")
    if dynamic_shared_bytes is None:
        dynamic_shared_bytes = _MAX_SHARED_BYTES - static_bytes if _DYNAMIC_SHARED.search(source) else 0
    library, kept = _build(text + _entry_point(name, parameters), "kernel", _KERNEL_FLAGS, cache_dir)
    load_engine()
    entry = ctypes.cast(ctypes.CDLL(str(library)).tile_ep_sim_entry, ctypes.c_void_p).value
    assert entry is not None
    return SimKernel(name, parameters, threads, static_bytes, dynamic_shared_bytes, kept, library, entry)


@functools.cache
def load_engine() -> ctypes.CDLL:
    """The engine, with its symbols visible to kernels loaded afterwards."""
    library, _ = _build(_ENGINE.read_text(), "engine", (*_ENGINE_FLAGS, f"-I{_ENGINE.parent}"), None)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _signature(source: str) -> tuple[str, int | None, tuple[Parameter, ...]]:
    found = _SIGNATURE.findall(source)
    if len(found) != 1:
        raise ArgumentError("source", f"{len(found)} kernel definitions", "one")
    bounds, name, declared = found[0]
    parameters = []
    for declaration in filter(None, (part.strip() for part in declared.split(","))):
        words = declaration.replace("__restrict__", "").replace("*", "* ").split()
        parameters.append(Parameter(words[-1], " ".join(words[:-1])))
    return name, int(bounds.split(",")[0]) if bounds else None, tuple(parameters)


def _place_shared_memory(source: str) -> tuple[str, int]:
    """Turn declarations of shared memory into references into the running block's; returns its static size too."""
    used = 0

    def static(match: re.Match[str]) -> str:
        nonlocal used
        alignment, ctype, name, count = match.groups()
        if ctype not in _SIZES:
            raise ArgumentError("source", f"shared array of {ctype}", f"one of {', '.join(sorted(_SIZES))}")
        step = max(16, int(alignment or 1))
        offset = -(-used // step) * step
        used = offset + _SIZES[ctype] * int(count)
        return f"auto &{name} = sim::static_shared<{ctype}, {count}>({offset});"

    text = _STATIC_SHARED.sub(static, source)
    text = _DYNAMIC_SHARED.sub(r"\1 *const \2 = sim::dynamic_shared<\1>();", text)
    left = re.search(r".*\b__shared__\b.*", re.sub(r"//.*", "", text))
    if left:
        raise ArgumentError("source", left.group(0).strip(), "a declaration of a shared array as TileLang writes it")
    return text, used


def _entry_point(name: str, parameters: tuple[Parameter, ...]) -> str:
    values = ", ".join(f"sim::parameter<{p.ctype}>(words[{i}])" for i, p in enumerate(parameters))
    unused = "" if parameters else "(void)words; "
    return f'\nextern "C" void tile_ep_sim_entry(const uint64_t *words) {{ {unused}{name}({values}); }}\n'


def _cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    base = cache_dir or os.environ.get("TILE_EP_CACHE")
    if not base:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tile_ep"
    folder = Path(base) / "sim"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"tile_ep-{os.getuid()}" / "sim"
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _compiler() -> tuple[str, str]:
    """The C++ compiler and what it says about itself."""
    named = os.environ.get("CXX", "g++")
    path = shutil.which(named)
    if path is None:
        raise BackendUnavailableError(
            f"the simulator compiles kernels with {named}, which is not installed: install the package 'g++' "
            "(Debian, Ubuntu), 'gcc-c++' (Fedora) or 'gxx' (conda), or name another compiler in CXX"
        )
    return path, subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout


@functools.cache
def _headers_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted([*_INCLUDE.rglob("*"), *_ENGINE.parent.iterdir()]):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def _build(text: str, kind: str, flags: tuple[str, ...], cache_dir: str | os.PathLike[str] | None) -> tuple[Path, Path]:
    """Compile `text` unless the cache has it: the library and the source. Processes may do so at once: each writes aside."""
    _, version = _compiler()
    digest = hashlib.sha256(_headers_digest())
    for part in (text, *flags, version):
        digest.update(part.encode() + b"\0")
    stem = f"{kind}-{digest.hexdigest()[:32]}"
    folder = _cache_folder(cache_dir)
    library, source = folder / f"{stem}.so", folder / f"{stem}.cpp"
    with _BUILD_LOCK:
        if not library.exists():
            _compile(text, kind, flags, library, source)
    return library, source


def _compile(text: str, kind: str, flags: tuple[str, ...], library: Path, source: Path) -> None:
    compiler, _ = _compiler()
    stem = library.stem
    with tempfile.TemporaryDirectory(dir=library.parent) as aside:
        aside_source, aside_library = Path(aside) / f"{stem}.cpp", Path(aside) / f"{stem}.so"
        aside_source.write_text(text)
        includes = (f"-I{_INCLUDE}", "-include", "sim_cuda.h") if kind == "kernel" else ()
        done = subprocess.run(
            [compiler, *flags, *includes, "-o", str(aside_library), str(aside_source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{compiler} does not compile the {kind} for the simulator:\n{done.stderr[:8000]}")
        os.replace(aside_source, source)
        os.replace(aside_library, library)
