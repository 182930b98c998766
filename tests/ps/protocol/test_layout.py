from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.layout import Layout, decode, encode

shapes = st.lists(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), max_size=5)


@given(shapes)
def test_views_of_a_vector_are_its_arrays(shapes: list[Any]) -> None:
    layout = Layout(tuple(f"a{i}" for i in range(len(shapes))), tuple(shapes))
    arrays = [np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)]
    vector = layout.empty()
    assert vector.shape == (sum(array.size for array in arrays),)
    vector[...] = np.concatenate([np.empty(0), *map(np.ravel, arrays)])
    for view, array in zip(layout.views(vector), arrays, strict=True):
        np.testing.assert_array_equal(view, array)


@given(shapes)
def test_layouts_survive_encoding(shapes: list[Any]) -> None:
    layouts = [Layout(tuple(f"a{i}" for i in range(len(shapes))), tuple(shapes)), Layout((), ())]
    assert decode(encode(layouts), [layouts[0].size, 0]) == layouts


@pytest.mark.parametrize(
    "data", [b"", b"{", b"7", b"[7]", b"[[7]]", b'[[["a", 3]]]', b'[[["a", ["b"]]]]', b'[[["a", [4]]]]', b"[]"]
)
def test_an_invalid_layout_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match="layouts must"):
        decode(data, [3])


def test_views_share_memory() -> None:
    layout = Layout(("kernel", "bias"), ((2, 2), (2,)))
    vector = np.zeros(6, np.float32)
    layout.views(vector)[1][0] = 7
    assert vector[4] == 7


def test_locate_names_the_array_of_an_element() -> None:
    layout = Layout(("kernel", "bias"), ((2, 2), (2,)))
    assert [layout.locate(i) for i in (0, 3, 4, 5)] == ["kernel"] * 2 + ["bias"] * 2
    with pytest.raises(ConfigurationError, match="below 6"):
        layout.locate(6)


def test_mismatches_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="equally long"):
        Layout(("a",), ())
    layout = Layout(("a",), ((2,),))
    with pytest.raises(ConfigurationError, match="must have shape"):
        layout.views(np.zeros(3))
