"""Traces: what is read, what is refused, and how tokens are dealt to ranks."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tile_ep.trace import Trace, TraceError


def make(tokens: int = 12, experts: int = 6, lengths: list[int] | None = None) -> Trace:
    generator = torch.Generator().manual_seed(3)
    document = None
    if lengths is not None:
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        tokens = len(document)
    return Trace(
        x=torch.randn(tokens, 16, generator=generator).bfloat16(),
        topk_idx=torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :3].to(torch.int16),
        topk_weights=torch.rand(tokens, 3, generator=generator),
        document=document,
        metadata={"experts": str(experts), "model": "made up"},
    )


def write(path: Path, metadata: dict[str, str] | None = None, **changes: torch.Tensor | None) -> Path:
    trace = make()
    tensors = {"x": trace.x, "topk_idx": trace.topk_idx, "topk_weights": trace.topk_weights, **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, metadata)
    return path


@pytest.mark.parametrize("lengths", [None, [5, 4, 3]])
def test_what_is_saved_is_read(tmp_path: Path, lengths: list[int] | None) -> None:
    trace = make(lengths=lengths)
    trace.save(tmp_path / "trace.safetensors")
    read = Trace.read(tmp_path / "trace.safetensors")
    for name in ("x", "topk_idx", "topk_weights", "document"):
        before, after = getattr(trace, name), getattr(read, name)
        assert (before is None) == (after is None)
        if before is not None:
            assert before.dtype == after.dtype
            assert torch.equal(before, after)
    assert read.metadata == trace.metadata


def test_number_of_experts_is_in_the_metadata_or_one_more_than_the_largest(tmp_path: Path) -> None:
    idx = torch.tensor([[0, 1, 4], [-1, 2, 3]] * 6)
    assert Trace.read(write(tmp_path / "a", topk_idx=idx)).num_experts == 5
    read = Trace.read(write(tmp_path / "b", {"experts": "9"}, topk_idx=idx))
    assert read.num_experts == 9
    assert read.load.tolist() == [6, 6, 6, 6, 6, 0, 0, 0, 0]
    assert Trace.read(tmp_path / "a").with_experts(7).num_experts == 7
    with pytest.raises(TraceError, match=r"6 entries are outside -1\.\.3, the first at token 0, selection 2: 4"):
        read.with_experts(4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"topk_weights": None}, "lacks topk_weights; it holds topk_idx, x"),
        ({"x": torch.ones(12, 16, dtype=torch.int32)}, "x: .*int32; expected .*bf16"),
        ({"x": torch.ones(12)}, r"x: \[12\]"),
        ({"x": torch.ones(11, 16)}, "x has 11 tokens and topk_idx 12"),
        ({"x": torch.ones(12, 0)}, "rows of 0 elements"),
        ({"x": torch.full((12, 16), float("nan"))}, "x: holds infinities or NaNs"),
        ({"topk_idx": torch.ones(12, 3)}, "topk_idx: .*float32; expected"),
        ({"topk_idx": torch.ones(12, 3, dtype=torch.uint8)}, "topk_idx: .*uint8; expected"),
        ({"topk_idx": torch.ones(12, 33, dtype=torch.int64)}, "33 selections per token; expected 1 to 32"),
        ({"topk_idx": torch.full((12, 3), -2)}, "topk_idx: 36 entries are outside"),
        ({"topk_weights": torch.ones(12, 2)}, r"topk_weights is \[12, 2\]; expected \[12, 3\]"),
        ({"document": torch.zeros(12)}, "document: .*float32"),
        ({"document": torch.zeros(3, dtype=torch.int32)}, "document has 3 tokens and x 12"),
    ],
)
def test_a_broken_trace_says_what_is_wrong(tmp_path: Path, changes: dict[str, torch.Tensor | None], said: str) -> None:
    path = write(tmp_path / "broken.safetensors", **changes)
    with pytest.raises(TraceError, match=said) as caught:
        Trace.read(path)
    assert str(path) in str(caught.value)


def test_metadata_and_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="experts is 'many'"):
        Trace.read(write(tmp_path / "a", {"experts": "many"}))
    with pytest.raises(TraceError, match=r"outside -1\.\.1"):
        Trace.read(write(tmp_path / "b", {"experts": "2"}))
    with pytest.raises(TraceError, match="no such file"):
        Trace.read(tmp_path / "nothing")
    (tmp_path / "text").write_text("not safetensors at all")
    with pytest.raises(TraceError, match="not a safetensors file"):
        Trace.read(tmp_path / "text")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_split_keeps_documents_whole_and_tokens_in_order(num_ranks: int) -> None:
    trace = make(lengths=[7, 1, 5, 5, 2, 4])
    parts = trace.split(num_ranks)
    assert len(parts) == num_ranks
    assert torch.cat(parts).sort().values.tolist() == list(range(24))
    assert trace.document is not None
    owners: dict[int, int] = {}
    for rank, tokens in enumerate(parts):
        assert tokens.tolist() == sorted(tokens.tolist())
        for document in trace.document[tokens].tolist():
            assert owners.setdefault(document, rank) == rank
    longest = max(7, 24 / num_ranks)  # no deal can be better than this, and this one is at most a third worse
    assert max(len(tokens) for tokens in parts) <= 4 / 3 * longest


def test_split_leaves_ranks_empty_when_there_are_few_documents() -> None:
    assert [len(tokens) for tokens in make(lengths=[3, 2]).split(4)] == [3, 2, 0, 0]


def test_split_without_documents_is_by_ranges() -> None:
    assert [tokens.tolist() for tokens in make(tokens=5).split(3)] == [[0, 1], [2, 3], [4]]
    assert [len(tokens) for tokens in make(tokens=2).split(4)] == [1, 1, 0, 0]
    assert [len(tokens) for tokens in make(tokens=0).split(2)] == [0, 0]


def test_split_needs_an_expert_for_every_rank() -> None:
    with pytest.raises(TraceError, match="6 experts cannot be spread over 7 ranks"):
        make().split(7)


def test_shorten_takes_the_beginning_of_every_document() -> None:
    trace = make(lengths=[8, 4, 4])
    short = trace.shorten(8)
    assert short.document is not None
    assert short.document.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert torch.equal(short.x, trace.x[[0, 1, 2, 3, 8, 9, 12, 13]])
    assert short.num_experts == trace.num_experts
    assert trace.shorten(99) is trace


def test_the_shipped_trace_is_small_whole_and_skewed() -> None:
    shipped = resources.files("tile_ep") / "data" / "demo_trace.safetensors"
    with resources.as_file(shipped) as path:
        assert path.stat().st_size <= 2_000_000
        trace = Trace.read(path)
    facts = trace.describe()
    assert (facts["tokens"], facts["documents"], facts["experts"], facts["topk"]) == (2304, 9, 64, 8)
    assert facts["skew"] > 2.5
    assert {len(tokens) for tokens in trace.documents()} == {256}
