"""Dispatch and combine as letters in mailboxes: a second opinion on `tile_ep.reference`, sharing no code with it.

Routings are nested lists of ints, rows are bytes, numbers are float32 scalars. A letter is one selection, addressed
`(rank, local expert)` and stamped `(source, token, k)`; sorting letters gives every order there is.
`None` stands for what is undefined, `FINITE` for bytes that only have to be finite numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

Routing = list[list[list[int]]]  # by rank, by token, by k
Stamp = tuple[int, int, int]  # source rank, token, k
FINITE = b"finite"


def deal_experts(num_experts: int, num_ranks: int) -> list[tuple[int, int]]:
    """`(rank, local index)` of each expert: counts as if dealt one by one, places contiguous."""
    hands = [0] * num_ranks
    for expert in range(num_experts):
        hands[expert % num_ranks] += 1
    return [(rank, local) for rank, hand in enumerate(hands) for local in range(hand)]


def room(hand: int, num_ranks: int, num_experts: int, most_tokens: int, num_topk: int, A: int, factor: Fraction) -> int:
    """Expanded rows that a rank with `hand` experts has room for."""
    everything = num_ranks * most_tokens * num_topk
    fair = math.ceil(Fraction(everything * hand, num_experts))
    return min(math.ceil(factor * fair), everything) + hand * (A - 1)


@dataclass
class Mailbox:
    """What arrives at one rank."""

    hand: int  # experts of the rank
    room: int
    letters: list[tuple[int, Stamp]] = field(default_factory=list)  # local expert and stamp, in order
    tokens: list[tuple[int, int]] = field(default_factory=list)  # (source, token), in order: rows of the rank layout
    shelf: dict[Stamp, int] = field(default_factory=dict)  # row in the expanded layout
    gaps: list[int] = field(default_factory=list)  # rows of the expanded layout that are padding
    counts: list[int] = field(default_factory=list)  # letters of each expert
    aligned: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # row after the last letter of each expert
    needed: int = 0  # rows of the expanded layout

    @property
    def overflows(self) -> bool:
        return self.needed > self.room


@dataclass
class Post:
    """All that follows from a routing."""

    routing: Routing
    num_topk: int
    num_experts: int
    most_tokens: int
    alignment: int
    factor: Fraction
    boxes: list[Mailbox]
    homes: list[tuple[int, int]]

    @property
    def overflowing(self) -> list[int]:
        return [rank for rank, box in enumerate(self.boxes) if box.overflows]

    def factor_needed(self) -> float:
        """By trying, a hundredth at a time: gaps apart, whole rows held before the room is rounded up to one."""
        everything, hundredths = len(self.boxes) * self.most_tokens * self.num_topk, 0
        for box in self.boxes:
            rows = box.needed - box.hand * (self.alignment - 1)
            while (
                box.overflows and hundredths * math.ceil(Fraction(everything * box.hand, self.num_experts)) < 100 * rows
            ):
                hundredths += 1
        return hundredths / 100


def deliver(
    routing: Routing, *, num_topk: int, num_experts: int, most_tokens: int, alignment: int, factor: float
) -> Post:
    """Sort every selection of every rank into mailboxes."""
    num_ranks, exact = len(routing), Fraction(factor)
    homes = deal_experts(num_experts, num_ranks)
    letters = sorted(
        (homes[expert], (source, token, k))
        for source, tokens in enumerate(routing)
        for token, selections in enumerate(tokens)
        for k, expert in enumerate(selections)
        if expert != -1
    )
    boxes = []
    for rank in range(num_ranks):
        hand = sum(1 for home, _ in homes if home == rank)
        box = Mailbox(hand, room(hand, num_ranks, num_experts, most_tokens, num_topk, alignment, exact))
        box.letters = [(local, stamp) for (home, local), stamp in letters if home == rank]
        box.tokens = sorted({stamp[:2] for _, stamp in box.letters})
        row = 0
        for expert in range(hand):
            stamps = [stamp for local, stamp in box.letters if local == expert]
            begin = row
            for stamp in stamps:
                box.shelf[stamp] = row
                row += 1
            box.ends.append(row)
            while row % alignment:
                box.gaps.append(row)
                row += 1
            box.counts.append(len(stamps))
            box.aligned.append(row - begin)
        box.needed = row
        boxes.append(box)
    return Post(routing, num_topk, num_experts, most_tokens, alignment, exact, boxes, homes)


def handle_fields(post: Post, rank: int, *, expand: bool, exact: bool) -> dict[str, Any]:
    """Values of the handle's fields; `recv_src_metadata` has only the rows that count."""
    box, num_ranks = post.boxes[rank], len(post.boxes)
    running, psum = 0, []
    for aligned in box.aligned:
        running += aligned
        psum.append(running)

    def shelf_row(at: int, stamp: Stamp) -> int:
        if not expand or post.boxes[at].overflows:
            return -1
        return post.boxes[at].shelf.get(stamp, -1)

    metadata = []
    for source, token in box.tokens:
        slots = sorted(stamp[2] for _, stamp in box.letters if stamp[:2] == (source, token))
        rows = [shelf_row(rank, (source, token, k)) for k in range(post.num_topk)]
        metadata.append([source * post.most_tokens + token, source * post.num_topk + slots[0], *rows])
    slot_idx, expanded_idx = [], []
    for token, selections in enumerate(post.routing[rank]):
        slot_row, expanded_row = [], []
        for k, expert in enumerate(selections):
            home = post.homes[expert][0] if expert != -1 else None
            slot_row.append(-1 if home is None else post.boxes[home].tokens.index((rank, token)))
            expanded_row.append(-1 if home is None else shelf_row(home, (rank, token, k)))
        slot_idx.append(slot_row)
        expanded_idx.append(expanded_row)
    return {
        "do_expand": expand,
        "num_experts": post.num_experts,
        "expert_alignment": post.alignment,
        "num_max_tokens_per_rank": post.most_tokens,
        "num_sms": 0,
        "topk_idx": post.routing[rank],
        "num_recv_tokens": len(box.tokens) if exact else num_ranks * post.most_tokens,
        "num_expanded_tokens": 0 if not expand else box.needed if exact else box.room,
        "num_recv_tokens_per_expert_list": box.aligned if exact else [],
        "psum_num_recv_tokens_per_scaleup_rank": [
            sum(1 for source, _ in box.tokens if source <= last) for last in range(num_ranks)
        ],
        "psum_num_recv_tokens_per_expert": box.ends if expand else psum,
        "num_unaligned_recv_tokens_per_expert": box.counts,
        "recv_src_metadata": metadata,
        "dst_buffer_slot_idx": slot_idx,
        "dst_expanded_idx": expanded_idx if expand else None,
        "num_rows_needed": [other.needed for other in post.boxes] if expand else None,
        "rank": rank,
        "num_ranks": num_ranks,
        "buffer_id": -1,
    }


def received_rows(
    post: Post, rank: int, rows: list[list[bytes]], *, expand: bool, exact: bool, zero_padding: bool, scales: bool
) -> list[bytes | None]:
    """Rows of one part of the payload at `rank`; `rows` by source and token."""
    box = post.boxes[rank]
    tail = FINITE if scales else None
    if not expand:
        arrived: list[bytes | None] = [rows[source][token] for source, token in box.tokens]
        return arrived + [tail] * (0 if exact else len(post.boxes) * post.most_tokens - len(arrived))
    if box.overflows:
        return [None] * box.room
    out: list[bytes | None] = [tail] * (box.needed if exact else box.room)
    for (source, token, _), row in box.shelf.items():
        out[row] = rows[source][token]
    for row in box.gaps:
        out[row] = bytes(len(next(row for part in rows for row in part))) if zero_padding else None
    return out


def received_idx(post: Post, rank: int, *, exact: bool) -> list[list[int]]:
    """`recv_topk_idx` of the rank layout."""
    box = post.boxes[rank]
    out = []
    for source, token in box.tokens:
        homes = [post.homes[expert] if expert != -1 else (-1, -1) for expert in post.routing[source][token]]
        out.append([local if home == rank else -1 for home, local in homes])
    while not exact and len(out) < len(post.boxes) * post.most_tokens:
        out.append([-1] * post.num_topk)
    return out


def received_weights(
    post: Post, rank: int, weights: list[list[list[float]]], *, expand: bool, exact: bool, zero_padding: bool
) -> list[Any]:
    """`recv_topk_weights`: rows of `K` in the rank layout, one number a row in the expanded one."""
    box = post.boxes[rank]
    if not expand:
        out: list[Any] = [weights[source][token] for source, token in box.tokens]
        while not exact and len(out) < len(post.boxes) * post.most_tokens:
            out.append([0.0] * post.num_topk)
        return out
    if box.overflows:
        return [None] * box.room
    out = [0.0] * (box.needed if exact else box.room)
    for (source, token, k), row in box.shelf.items():
        out[row] = weights[source][token][k]
    for row in box.gaps:
        out[row] = 0.0 if zero_padding else None
    return out


def round_to(value: np.float32, kind: str) -> np.float32:
    """A float32 rounded to the nearest number of `kind` (bf16, fp16 or fp32), ties to even, as a float32."""
    if kind == "fp32" or np.isnan(value):
        return value
    if kind == "fp16":
        return np.float32(np.float16(value))
    bits = int(value.view(np.uint32))
    lower = bits & 0xFFFF
    bits -= lower
    if lower > 0x8000 or (lower == 0x8000 and bits & 0x10000):
        bits += 0x10000
    return np.uint32(bits).view(np.float32)


@np.errstate(over="ignore", invalid="ignore")
def combined_rows(
    post: Post,
    rank: int,
    ys: list[list[list[float]]],
    *,
    width: int,
    kind: str,
    expand: bool,
    biases: list[list[list[float]]],
    weights: list[list[float]] | None = None,
) -> list[list[np.float32]]:
    """`combined_x` of `rank`: each number summed on its own.

    Args:
        ys: by rank, rows of `width` numbers.
        biases: of this rank, none to two of `[token][column]`.
        weights: by rank and expanded row, to multiply the rows with.
    """

    def carried(home: int, token: int, column: int) -> np.float32:
        """What rank `home` sends back for the token."""
        if not expand:
            return np.float32(ys[home][post.boxes[home].tokens.index((rank, token))][column])
        total = np.float32(0.0)
        for k in range(post.num_topk):
            if (rank, token, k) in post.boxes[home].shelf:
                row = post.boxes[home].shelf[rank, token, k]
                term = np.float32(ys[home][row][column])
                if weights is not None:
                    term = term * np.float32(weights[home][row])
                total = total + term
        return round_to(total, kind)

    out = []
    for token, selections in enumerate(post.routing[rank]):
        named: list[int] = []
        for expert in selections:
            if expert != -1 and post.homes[expert][0] not in named:
                named.append(post.homes[expert][0])
        sums = []
        for column in range(width):
            terms = [np.float32(bias[token][column]) for bias in biases]
            total = terms.pop(0) if terms else np.float32(0.0)
            for term in terms + [carried(home, token, column) for home in named]:
                total = total + term
            sums.append(round_to(total, kind))
        out.append(sums)
    return out


def combined_weights(post: Post, rank: int, weights: list[Any], *, expand: bool) -> list[list[float]]:
    """`combined_topk_weights` of `rank`. `weights` by rank: `[row][k]`, or `[row]` in the expanded layout."""
    out = []
    for token, selections in enumerate(post.routing[rank]):
        back = []
        for k, expert in enumerate(selections):
            if expert == -1:
                back.append(0.0)
                continue
            home = post.homes[expert][0]
            box = post.boxes[home]
            if expand:
                back.append(weights[home][box.shelf[rank, token, k]])
            else:
                back.append(weights[home][box.tokens.index((rank, token))][k])
        out.append(back)
    return out
