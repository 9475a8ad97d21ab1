"""Lowering the kernels: every variant, both architectures, with and without the safe-memory pass. Needs no GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tilelang")

from tile_ep.kernels.combine import CombineSpec
from tile_ep.kernels.dispatch import DispatchSpec
from tile_ep.kernels.launcher import KernelSpec, build, cuda_source, pass_configs
from tile_ep.kernels.tuning import HOPPER, SIMULATOR, Tuning

ARCHITECTURES = ("sm_90a", "sm_100a")


def dispatch_spec(**changes: object) -> DispatchSpec:
    values: dict[str, object] = {
        "num_ranks": 4,
        "num_experts": 10,
        "num_topk": 3,
        "max_experts": 16,
        "index_dtype": "int64",
        "data_bytes": 1024,
        "scale_bytes": 0,
        "has_weights": True,
        "has_stats": False,
        "copies_idx": True,
        "cached": False,
        "expanded": False,
        "zero_gaps": False,
        "fill_tail": False,
        "host_counts": True,
        "bulk": True,
        "num_warps": 4,
        "chunk_bytes": 512,
        "depth": 2,
    }
    return DispatchSpec(**{**values, **changes})  # type: ignore[arg-type]


def combine_spec(**changes: object) -> CombineSpec:
    values: dict[str, object] = {
        "num_ranks": 4,
        "num_experts": 10,
        "num_topk": 3,
        "max_experts": 16,
        "index_dtype": "int64",
        "dtype": "bfloat16",
        "hidden": 512,
        "num_bias": 1,
        "has_weights": True,
        "staged": True,
        "pushed": False,
        "expanded": False,
        "apply_weights": False,
        "bulk": True,
        "num_warps": 4,
        "chunk_bytes": 512,
        "depth": 3,
    }
    return CombineSpec(**{**values, **changes})  # type: ignore[arg-type]


VARIANTS: dict[str, KernelSpec] = {
    "dispatch": dispatch_spec(),
    "dispatch-no-sync-fp8-stats": dispatch_spec(
        fill_tail=True, host_counts=False, scale_bytes=32, has_stats=True, index_dtype="int32"
    ),
    "dispatch-cached": dispatch_spec(cached=True, host_counts=False, copies_idx=False),
    "dispatch-odd": dispatch_spec(bulk=False, data_bytes=14, index_dtype="int16", num_topk=32),
    "dispatch-72-ranks": dispatch_spec(num_ranks=72, num_experts=288, max_experts=288, num_topk=8),
    "dispatch-expanded": dispatch_spec(expanded=True, zero_gaps=True, scale_bytes=8),
    "dispatch-expanded-cached": dispatch_spec(
        expanded=True, cached=True, host_counts=False, fill_tail=True, bulk=False
    ),
    "combine": combine_spec(),
    "combine-expanded": combine_spec(expanded=True, apply_weights=True),
    "combine-expanded-odd": combine_spec(expanded=True, bulk=False, hidden=7, dtype="float32"),
    "combine-pushed": combine_spec(pushed=True),
    "combine-pushed-expanded": combine_spec(pushed=True, expanded=True, has_weights=False),
    "combine-pushed-odd": combine_spec(pushed=True, bulk=False, hidden=7),
    "combine-zero-copy": combine_spec(staged=False, has_weights=False, num_bias=0),
    "combine-odd": combine_spec(bulk=False, hidden=7, dtype="float16", num_bias=2),
    "combine-fp32-short-chunk": combine_spec(dtype="float32", hidden=300, chunk_bytes=416),
}


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", VARIANTS)
def test_lowers(name: str, arch: str, checked: bool) -> None:
    source = cuda_source(VARIANTS[name], arch, checked)
    assert 'extern "C" __global__' in source
    # Warp collectives must not be torn apart, and block barriers must not appear where the kernel has none.
    assert source.count("__syncthreads();") == cuda_source(VARIANTS[name], "sm_90a").count("__syncthreads();")


def test_checked_mode_keeps_the_safe_memory_pass() -> None:
    assert "tl.disable_safe_memory_legalize" not in pass_configs(checked=True)
    assert pass_configs()["tl.disable_safe_memory_legalize"] is True


@pytest.mark.parametrize("name", ["dispatch", "dispatch-odd", "combine-zero-copy", "combine-odd"])
def test_addresses_of_data_dependent_rows_are_not_clamped(name: str) -> None:
    """Taking an address is no access: the checked mode must not guard or clamp it by the extent of some tensor."""
    calls = re.compile(r"\bep_(?:copy_warp|fetch|push|put_\w+|get_\w+)\(")
    fast = cuda_source(VARIANTS[name], "sm_90a", False)
    checked = cuda_source(VARIANTS[name], "sm_90a", True)
    body = slice(fast.index('extern "C" __global__'), None)
    checked_body = slice(checked.index('extern "C" __global__'), None)
    assert len(calls.findall(checked[checked_body])) == len(calls.findall(fast[body])) > 0


def test_variants_cost_nothing_when_unused() -> None:
    plain, stats = cuda_source(dispatch_spec()), cuda_source(dispatch_spec(has_stats=True))
    signature = re.compile(r'extern "C" __global__ void __launch_bounds__\([^)]*\) \w+\(([^)]*)\)')
    assert "stats" not in signature.search(plain).group(1)  # type: ignore[union-attr]
    assert "stats" in signature.search(stats).group(1)  # type: ignore[union-attr]


@pytest.mark.parametrize("spec", [dispatch_spec(cluster=2), combine_spec(cluster=2)], ids=["dispatch", "combine"])
def test_clusters_are_a_matter_of_the_launch(spec: KernelSpec) -> None:
    import tilelang
    from tilelang import tvm

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target, tvm.transform.PassContext(config=pass_configs()):
        artifact = tilelang.lower(build(spec), target=target)
    ((_, function),) = artifact.device_mod.functions.items()
    assert [int(extent) for extent in function.attrs["cluster_dims"]] == [2, 1, 1]
    assert str(artifact.kernel_source) == cuda_source(replace(spec, cluster=1))


@pytest.mark.parametrize("tuning", [HOPPER, SIMULATOR], ids=["hopper", "simulator"])
@pytest.mark.parametrize("row_bytes", [16, 48, 128, 1000 * 16, 2880 * 2, 7168, 14336, 14336 * 2, 16384 * 4])
def test_shapes_fit(tuning: Tuning, row_bytes: int) -> None:
    for most in (tuning.dispatch, tuning.expanded, tuning.combine, tuning.combine_few):
        shape = tuning.shape(most, row_bytes)
        assert shape.chunk_bytes % 16 == 0 and 0 < shape.chunk_bytes <= max(most.chunk_bytes, 16)
        assert 1 <= shape.num_warps <= most.num_warps and shape.depth == most.depth
        assert shape.num_warps * shape.depth * shape.chunk_bytes <= tuning.shared_bytes
        chunks = -(-row_bytes // shape.chunk_bytes)
        assert (chunks - 1) * shape.chunk_bytes < row_bytes <= chunks * shape.chunk_bytes


def _nvcc() -> str | None:
    found = shutil.which("nvcc")
    if found is None and (spec := importlib.util.find_spec("nvidia")) is not None:
        for folder in spec.submodule_search_locations or ():
            for candidate in Path(folder).glob("cu*/bin/nvcc"):
                return str(candidate)
    return found


@pytest.mark.skipif(_nvcc() is None, reason="needs nvcc (or pip install 'tilelang[nvcc]')")
@pytest.mark.parametrize("name", ["dispatch-no-sync-fp8-stats", "combine", "combine-odd"])
def test_compiles_with_nvcc(name: str, tmp_path: Path) -> None:
    import tilelang

    root = Path(tilelang.__file__).parent
    source = tmp_path / "kernel.cu"
    source.write_text(cuda_source(VARIANTS[name], "sm_90a"))
    command = [
        *(str(_nvcc()), "-w", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v"),
        *("-I", str(root / "src"), "-I", str(root / "3rdparty/cutlass/include")),
        *("-o", str(tmp_path / "kernel.cubin"), str(source)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert spills and max(spills) == 0, done.stderr


@pytest.mark.skipif(_nvcc() is None, reason="needs nvcc (or pip install 'tilelang[nvcc]')")
def test_what_measures_the_limits_compiles(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "benchmarks/limits.cu"
    command = [str(_nvcc()), "-std=c++17", "-arch=sm_90a", "-o", str(tmp_path / "limits"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
