"""fp8 casts: the convention, its error, and every awkward width."""

from __future__ import annotations

import pytest
import torch

from tile_ep import ArgumentError, per_token_cast_back, per_token_cast_to_fp8


@pytest.mark.parametrize("hidden", [1, 7, 127, 128, 129, 256, 2880, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_trip(hidden: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(hidden)).to(dtype)
    data, scales = per_token_cast_to_fp8(x)
    assert data.shape == (5, hidden) and data.dtype == torch.float8_e4m3fn and data.is_contiguous()
    assert scales.shape == (5, -(-hidden // 128)) and scales.dtype == torch.float32
    back = per_token_cast_back(data, scales, torch.float32)
    # Three mantissa bits: half a unit in the last place is 1/16 of the value, and at least half of 2**-9 scales.
    bound = torch.maximum(x.float().abs() / 16, scales.repeat_interleave(128, 1)[:, :hidden] * 2**-10)
    assert ((back - x.float()).abs() <= bound * 1.001).all()


def test_scale_is_the_block_maximum_over_448() -> None:
    x = torch.zeros(1, 256)
    x[0, 3], x[0, 200] = -896.0, 2.0
    data, scales = per_token_cast_to_fp8(x)
    assert torch.equal(scales, torch.tensor([[2.0, 2.0 / 448.0]]))
    assert data[0, 3].float() == -448.0 and data[0, 200].float() == 448.0


def test_zero_rows_and_no_rows() -> None:
    data, scales = per_token_cast_to_fp8(torch.zeros(2, 130))
    assert torch.equal(scales, torch.full((2, 2), 1e-4) / 448.0)
    assert torch.equal(per_token_cast_back(data, scales), torch.zeros(2, 130, dtype=torch.bfloat16))
    data, scales = per_token_cast_to_fp8(torch.zeros(0, 130))
    assert data.shape == (0, 130) and scales.shape == (0, 2)
    assert per_token_cast_back(data, scales).shape == (0, 130)


def test_column_major_scales_are_read_alike() -> None:
    data, scales = per_token_cast_to_fp8(torch.randn(6, 300))
    assert torch.equal(per_token_cast_back(data, scales.t().contiguous().t()), per_token_cast_back(data, scales))


def test_wrong_shapes_are_named() -> None:
    data, scales = per_token_cast_to_fp8(torch.randn(6, 300))
    with pytest.raises(ArgumentError, match=r"scales: got \[6, 2\], expected \[6, 3\]"):
        per_token_cast_back(data, scales[:, :2])
    with pytest.raises(ArgumentError, match="x: got"):
        per_token_cast_to_fp8(torch.zeros(3, 4, dtype=torch.int32))
