"""Groups run along the last dimension, never across the first, and chunks cover a tensor once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_flashoptim.ops import layout

SHAPES = [
    ((64, 128), 1, (64, 4)),
    ((5, 33), 1, (5, 2)),
    ((64, 64, 3, 3), 1, (64, 18)),
    ((64, 3, 3, 3), 1, (64, 1)),
    ((8, 64, 128), 2, (8, 64, 4)),
    ((8, 64, 4), 1, (8, 8)),
    ((50, 1), 1, (50, 1)),
    ((1, 100), 1, (1, 4)),
    ((0, 64), 1, (0, 2)),
    ((64, 0), 1, (64, 0)),
]


@pytest.mark.parametrize("shape, dim, scale", SHAPES, ids=str)
def test_groups_lie_along_trailing_dimensions(shape, dim, scale):
    assert layout.group_dim(shape) == dim
    assert layout.scale_shape(shape) == scale


@pytest.mark.parametrize("shape, dim, scale", SHAPES, ids=str)
def test_scales_match_the_view_in_rows(shape, dim, scale):
    rows, cols = layout.rows_and_cols(shape)
    assert rows * cols == torch.Size(shape).numel()
    assert rows * -(-cols // layout.GROUP_SIZE) == torch.Size(scale).numel()


@given(rows=st.integers(0, 40), cols=st.integers(1, 400), chunk_size=st.integers(32, 512).map(lambda n: n // 32 * 32))
def test_chunks_cover_every_element_and_every_group_once(rows, cols, chunk_size):
    elements = torch.zeros(rows, cols, dtype=torch.int)
    groups = torch.zeros(rows, -(-cols // 32), dtype=torch.int)
    original, layout.CHUNK_SIZE = layout.CHUNK_SIZE, chunk_size
    try:
        for chunk in layout.chunks(rows, cols):
            piece = elements[chunk.rows, chunk.cols]
            assert piece.numel() <= chunk_size
            piece += 1
            groups[chunk.rows, chunk.groups] += 1
    finally:
        layout.CHUNK_SIZE = original
    assert elements.eq(1).all() and groups.eq(1).all()


def test_a_short_last_group_is_padded_with_zeros_and_comes_back():
    values = torch.arange(1.0, 71.0).view(2, 35)
    groups = layout.to_groups(values)
    assert groups.shape == (2, 2, 32) and groups[:, 1, 3:].eq(0).all()
    assert torch.equal(layout.from_groups(groups, 35), values)
