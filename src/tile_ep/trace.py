"""Traces: the input and the routing of one MoE layer, as dumped from a model."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tile_ep.errors import TileEPError
from tile_ep.layout import MAX_TOPK

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int16, torch.int32, torch.int64)
REQUIRED = ("x", "topk_idx", "topk_weights")
_EXAMPLE = (
    'safetensors.torch.save_file({"x": ..., "topk_idx": ..., "topk_weights": ...}, path, metadata={"experts": "64"})'
)


class TraceError(TileEPError, ValueError):
    """A trace cannot be read, or what it holds is not a routing."""


@dataclass(frozen=True)
class Trace:
    """Tokens of one MoE layer and the experts that its router chose.

    Attributes:
        x: `[T, H]` bf16, fp16, fp32 or fp64, input of the layer.
        topk_idx: `[T, K]` int16, int32 or int64, experts `0 .. num_experts - 1`; -1 selects nothing.
        topk_weights: `[T, K]` floats, the factor of each selection.
        document: `[T]` integers, the document (sequence, request) of each token; `None` where it is not known.
        metadata: strings of the file; `"experts"` is the number of experts, where the file says it.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    document: torch.Tensor | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """`T`."""
        return self.x.shape[0]

    @property
    def hidden(self) -> int:
        """`H`."""
        return self.x.shape[1]

    @property
    def num_topk(self) -> int:
        """`K`."""
        return self.topk_idx.shape[1]

    @property
    def num_experts(self) -> int:
        """`metadata["experts"]`, else one more than the largest expert that was selected."""
        if "experts" in self.metadata:
            return int(self.metadata["experts"])
        return int(self.topk_idx.max()) + 1 if self.topk_idx.numel() else 0

    @property
    def load(self) -> torch.Tensor:
        """`[num_experts]` int64, selections of each expert."""
        chosen = self.topk_idx[self.topk_idx >= 0].to(torch.int64)
        return torch.bincount(chosen, minlength=self.num_experts)

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read and validate a safetensors file.

        Raises:
            TraceError: there is no such file, it is not safetensors, or the trace is not valid.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        if not path.is_file():
            raise TraceError(f"{path}: no such file")
        try:
            with safe_open(str(path), "pt") as file:
                tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata: dict[str, str] = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise TraceError(f"{path}: not a safetensors file ({error})") from error
        missing = [name for name in REQUIRED if name not in tensors]
        if missing:
            held = ", ".join(sorted(tensors)) or "nothing"
            raise TraceError(f"{path}: lacks {', '.join(missing)}; it holds {held}. Write a trace with {_EXAMPLE}")
        x, topk_idx, topk_weights = (tensors[name] for name in REQUIRED)
        trace = cls(x, topk_idx, topk_weights, tensors.get("document"), metadata)
        try:
            trace.validate()
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None
        return trace

    def save(self, path: str | Path) -> None:
        """Write a safetensors file that `read` gives back."""
        from safetensors.torch import save_file

        tensors = {"x": self.x, "topk_idx": self.topk_idx, "topk_weights": self.topk_weights}
        if self.document is not None:
            tensors["document"] = self.document
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, dict(self.metadata))

    def validate(self) -> None:
        """Check dtypes, shapes and indices.

        Raises:
            TraceError: says which tensor, what it is and what it should be.
        """
        _expect("x", self.x, 2, FLOATS, "[tokens, hidden] of bf16, fp16, fp32 or fp64")
        _expect("topk_idx", self.topk_idx, 2, INTEGERS, "[tokens, topk] of int16, int32 or int64")
        _expect("topk_weights", self.topk_weights, 2, FLOATS, "[tokens, topk] of floats")
        tokens, topk = self.topk_idx.shape
        if not 1 <= topk <= MAX_TOPK:
            raise TraceError(f"topk_idx: {topk} selections per token; expected 1 to {MAX_TOPK}")
        if self.x.shape[0] != tokens:
            raise TraceError(f"x has {self.x.shape[0]} tokens and topk_idx {tokens}; expected as many")
        if self.x.shape[1] < 1:
            raise TraceError("x: rows of 0 elements; expected at least 1")
        if self.topk_weights.shape != self.topk_idx.shape:
            raise TraceError(f"topk_weights is {[*self.topk_weights.shape]}; expected {[tokens, topk]}, as topk_idx")
        if self.document is not None:
            _expect("document", self.document, 1, INTEGERS, "[tokens] of int16, int32 or int64")
            if self.document.shape[0] != tokens:
                raise TraceError(f"document has {self.document.shape[0]} tokens and x {tokens}; expected as many")
        self._check_experts()
        for name, tensor in (("x", self.x), ("topk_weights", self.topk_weights)):
            if not bool(torch.isfinite(tensor).all()):
                raise TraceError(f"{name}: holds infinities or NaNs; expected finite numbers")

    def _check_experts(self) -> None:
        said = self.metadata.get("experts")
        if said is not None and not (said.isdecimal() and int(said) >= 1):
            raise TraceError(f"metadata: experts is {said!r}; expected a number of at least 1")
        bad = (self.topk_idx < -1) | (self.topk_idx >= self.num_experts)
        if bool(bad.any()):
            token, k = bad.nonzero()[0].tolist()
            raise TraceError(
                f"topk_idx: {int(bad.sum())} entries are outside -1..{self.num_experts - 1}, the first at "
                f"token {token}, selection {k}: {int(self.topk_idx[token, k])} "
                f"(the trace has {self.num_experts} experts)"
            )

    def with_experts(self, num_experts: int) -> Trace:
        """The same trace with another number of experts.

        Raises:
            TraceError: an expert that is selected would not exist.
        """
        trace = Trace(
            self.x, self.topk_idx, self.topk_weights, self.document, {**self.metadata, "experts": str(num_experts)}
        )
        trace._check_experts()
        return trace

    def take(self, tokens: torch.Tensor) -> Trace:
        """Some tokens.

        Args:
            tokens: `[n]` int64, which ones.
        """
        document = None if self.document is None else self.document[tokens]
        metadata = {**self.metadata, "experts": str(self.num_experts)}
        return Trace(self.x[tokens], self.topk_idx[tokens], self.topk_weights[tokens], document, metadata)

    def shorten(self, num_tokens: int) -> Trace:
        """At most `num_tokens`, from the beginning of every document in proportion to its length."""
        if num_tokens >= self.num_tokens:
            return self
        positions = torch.empty(self.num_tokens, dtype=torch.float64)
        for tokens in self.documents():
            positions[tokens] = (torch.arange(len(tokens), dtype=torch.float64) + 0.5) / len(tokens)
        return self.take(positions.argsort(stable=True)[:num_tokens].sort().values)

    def documents(self) -> list[torch.Tensor]:
        """The tokens of each document, ascending; all of them are one document where none are known."""
        if self.document is None:
            return [torch.arange(self.num_tokens)] if self.num_tokens else []
        return [(self.document == name).nonzero().flatten() for name in sorted(set(self.document.tolist()))]

    def split(self, num_ranks: int) -> list[torch.Tensor]:
        """Deal the tokens to ranks: whole documents, the longest first, each to the rank that holds least so far.

        Without documents the ranks get contiguous ranges of equal size, give or take a token.

        Returns:
            The tokens of each rank, ascending int64. A rank may get none.

        Raises:
            TraceError: there are more ranks than experts.
        """
        if num_ranks < 1:
            raise TraceError(f"{num_ranks} ranks; expected at least 1")
        if self.num_experts < num_ranks:
            raise TraceError(
                f"{self.num_experts} experts cannot be spread over {num_ranks} ranks; "
                f"use at most {self.num_experts} ranks, so that each has an expert"
            )
        if self.document is None:
            return list(torch.arange(self.num_tokens).tensor_split(num_ranks))
        dealt: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
        emptiest = [(0, rank) for rank in range(num_ranks)]
        for tokens in sorted(self.documents(), key=len, reverse=True):
            held, rank = heapq.heappop(emptiest)
            dealt[rank].append(tokens)
            heapq.heappush(emptiest, (held + len(tokens), rank))
        nothing = torch.empty(0, dtype=torch.int64)
        return [torch.cat([nothing, *documents]).sort().values for documents in dealt]

    def describe(self) -> dict[str, Any]:
        """Sizes and skew, in numbers."""
        load = self.load
        mean = float(load.double().mean()) if len(load) else 0.0
        return {
            "tokens": self.num_tokens,
            "hidden": self.hidden,
            "topk": self.num_topk,
            "experts": self.num_experts,
            "documents": None if self.document is None else len(set(self.document.tolist())),
            "skew": float(load.max()) / mean if mean else 0.0,
        }

    def __repr__(self) -> str:
        return f"Trace({json.dumps(self.describe())})"


def _expect(name: str, tensor: torch.Tensor, dims: int, dtypes: tuple[torch.dtype, ...], expected: str) -> None:
    if tensor.dim() != dims or tensor.dtype not in dtypes:
        raise TraceError(f"{name}: {[*tensor.shape]} of {tensor.dtype}; expected {expected}")
