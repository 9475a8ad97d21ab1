"""Cases drawn by hypothesis. Values come from short lists, so that kernels compiled once serve many cases."""

from __future__ import annotations

from hypothesis import strategies as st

from tile_ep.cases import CACHED, INDEX_DTYPES, MASKS, PAYLOADS, ROW_DTYPES, SCALED, SKEWS, STRIDES, Case


@st.composite
def any_case(draw: st.DrawFn, max_ranks: int = 4, layouts: tuple[bool, ...] = (False, True)) -> Case:
    """A case of at most `max_ranks` ranks; `layouts` are the values that `do_expand` may have."""

    tokens = tuple(draw(st.lists(st.integers(0, 12), min_size=1, max_size=max_ranks)))
    do_expand = draw(st.sampled_from(layouts))
    payload = draw(st.sampled_from(PAYLOADS))
    cached = draw(st.sampled_from(CACHED if do_expand else CACHED[:2]))
    combine_weights = draw(st.booleans())
    return Case(
        tokens=tokens,
        hidden=draw(st.sampled_from((1, 7, 24, 64, 130))),
        num_topk=draw(st.sampled_from((1, 2, 3, 8, 17))),
        num_experts=len(tokens) * draw(st.sampled_from((1, 3))) + draw(st.integers(0, 2)),
        payload=payload,
        index_dtype=draw(st.sampled_from(INDEX_DTYPES)),
        spare_tokens=draw(st.integers(0, 3)),
        do_expand=do_expand,
        expert_alignment=draw(st.sampled_from((1, 2, 7, 64))),
        expand_factor=draw(st.sampled_from((0.5, 1.0, 2.0, 1000.0))),
        do_zero_padding=draw(st.booleans()),
        mask=draw(st.sampled_from(MASKS)),
        skew=draw(st.sampled_from(SKEWS)),
        weights=draw(st.sampled_from((None, "fp32", "fp16", "bf16"))),
        combine_weights=combine_weights,
        apply_weights=do_expand and combine_weights and draw(st.booleans()),
        bias_count=draw(st.integers(0, 2)),
        cached=cached,
        cached_weights=cached != "no" and draw(st.booleans()),
        stats=draw(st.booleans()),
        do_cpu_sync=draw(st.booleans()),
        do_handle_copy=draw(st.booleans()),
        combine_dtype=draw(st.sampled_from(ROW_DTYPES)),
        col_major_scales=payload in SCALED and draw(st.booleans()),
        strides=draw(st.sampled_from(STRIDES)),
        rounds=draw(st.integers(1, 2)),
        zero_copy=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
