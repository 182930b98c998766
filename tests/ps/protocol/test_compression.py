from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ml_dtypes import bfloat16
from support.cases import examples

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.compression import FORMATS, BFloat16, Codec, Int8, codec_of, require_format
from distkeras.ps.rules import center_rules, make
from distkeras.ps.rules.base import BLOCK

LARGEST, TINY = float(np.finfo(np.float32).max), 2.0**-149
SIZES = (0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77)
#: The sum of a hundred such numbers does not overflow.
TAME = st.floats(-(2.0**100), 2.0**100, width=32)
ANY = st.floats(width=32, allow_nan=False, allow_infinity=False)

few = hnp.arrays(np.float32, st.integers(0, 40), elements=ANY)


@st.composite
def several_blocks(draw: st.DrawFn) -> np.ndarray:
    """Draw several blocks, each of another magnitude, down to subnormal numbers."""
    size = draw(st.sampled_from(SIZES))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    vector = generator.uniform(-1, 1, size)
    for start in range(0, size, BLOCK):
        vector[start : start + BLOCK] *= 2.0 ** draw(st.integers(-150, 126))
    return vector.astype(np.float32)


def encode_and_decode(codec: Codec, vector: np.ndarray) -> np.ndarray:
    data, out = np.full(codec.nbytes, 170, np.uint8), np.full(codec.size, 7, np.float32)
    codec.encode(vector, data)
    codec.decode(data, out)
    return out


def encoded(codec: BFloat16 | Int8, vector: list[float]) -> bytes:
    data = np.empty(codec.nbytes, np.uint8)
    codec.encode(np.array(vector, np.float32), data)
    return data.tobytes()


def steps(vector: np.ndarray) -> np.ndarray:
    """Return each element's int8 scale, in float64."""
    scales = np.empty(vector.size)
    for start in range(0, vector.size, BLOCK):
        block = vector[start : start + BLOCK]
        scales[start : start + BLOCK] = max(float(np.float32(float(np.abs(block).max()) / 127)), 2.0**-126)
    return scales


class TestBFloat16:
    def test_bytes(self) -> None:
        ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-23]  # Down to even, up to even, no tie.
        expected = "803f 803f 823f 813f 20c0 0000 0080 807f 80ff"
        vector = [1.0, *ties, -2.5, 0.0, -0.0, math.inf, -math.inf]
        assert encoded(BFloat16(9), vector) == bytes.fromhex(expected)

    @examples(40)
    @given(st.one_of(few, several_blocks()))
    def test_error(self, vector: np.ndarray) -> None:
        out = encode_and_decode(BFloat16(vector.size), vector).astype(np.float64)
        exact = vector.astype(np.float64)
        inside = np.abs(exact) < (2 - 2.0**-8) * 2.0**127
        assert (np.abs(out - exact) <= np.maximum(2.0**-8 * np.abs(exact), 2.0**-134))[inside].all()
        assert np.isinf(out[~inside]).all()

    @examples(40)
    @given(st.one_of(few, several_blocks()))
    def test_encoding_equals_the_cast_to_bfloat16(self, vector: np.ndarray) -> None:
        with np.errstate(over="ignore"):
            expected = vector.astype(bfloat16).astype(np.float32)
        np.testing.assert_array_equal(encode_and_decode(BFloat16(vector.size), vector), expected)

    def test_every_bfloat16_number_survives(self) -> None:
        words = np.arange(2**16, dtype=np.uint16)
        numbers = (words.astype(np.uint32) << 16).view(np.float32)
        data = np.empty(2 * words.size, np.uint8)
        codec = BFloat16(words.size)
        codec.encode(numbers, data)
        finite = ~np.isnan(numbers)
        np.testing.assert_array_equal(data.view(np.uint16)[finite], words[finite])
        assert np.isnan(encode_and_decode(codec, numbers)[~finite]).all()


class TestInt8:
    def test_bytes(self) -> None:
        vector = [127.0, -127.0, 0.5, 1.5, -2.5, 0.0, 63.0]  # The scale is 1; ties go to even.
        assert encoded(Int8(7), vector) == bytes.fromhex("0000803f 7f 81 00 02 fe 00 3f")
        # The second block has its own scale, 1/2.
        data = encoded(Int8(BLOCK + 2), [127.0] * BLOCK + [63.5, -1.0])
        assert data == bytes.fromhex("0000803f") + b"\x7f" * BLOCK + bytes.fromhex("0000003f 7f fe")

    @examples(40)
    @given(st.one_of(few, several_blocks()))
    @example(np.array([TINY, -TINY], np.float32))
    @example(np.array([100 * TINY, 178 * TINY, 2.0**-126], np.float32))
    @example(np.array([LARGEST, -LARGEST, 1.0], np.float32))
    @pytest.mark.filterwarnings("error::RuntimeWarning")
    def test_error(self, vector: np.ndarray) -> None:
        out = encode_and_decode(Int8(vector.size), vector).astype(np.float64)
        inside = np.abs(vector) <= LARGEST * (1 - 2.0**-22)
        assert (np.abs(out - vector.astype(np.float64)) <= (0.5 + 2.0**-16) * steps(vector))[inside].all()
        assert (np.abs(out[~inside]) >= LARGEST * (1 - 2.0**-22)).all()
        assert (out[vector == 0] == 0).all()

    def test_zeros_are_exact(self) -> None:
        vector = np.zeros(2 * BLOCK + 1, np.float32)
        assert encode_and_decode(Int8(vector.size), vector).tobytes() == vector.tobytes()

    @given(st.binary(max_size=50))
    @pytest.mark.filterwarnings("error::RuntimeWarning")
    def test_any_bytes_can_be_decoded(self, noise: bytes) -> None:
        data = np.frombuffer(noise + bytes(4), np.uint8)
        out = np.empty(data.size - 4, np.float32)
        Int8(out.size).decode(data, out)
        scale = np.frombuffer(data[:4].tobytes(), "<f4")[0]
        assert np.isfinite(scale) or not np.isfinite(out[data[4:] != 0]).any()

    @given(st.binary(max_size=50))
    @example(bytes.fromhex("ffff7f7e 80"))  # A finite scale slightly above 2^126, times -128.
    @example(bytes.fromhex("0000807f 00"))
    @pytest.mark.filterwarnings("error::RuntimeWarning")
    def test_a_vector_that_is_known_to_be_finite_is_finite(self, noise: bytes) -> None:
        data = np.frombuffer(bytes.fromhex("0000803f") + b"\x7f" * BLOCK + noise + bytes(4), np.uint8)
        codec = Int8(data.size - 8)
        out = np.empty(codec.size, np.float32)
        codec.decode(data, out)
        assert not codec.known_finite(data) or np.isfinite(out).all()

    def test_the_scales_show_whether_a_vector_is_finite(self) -> None:
        data = np.frombuffer(encoded(Int8(BLOCK + 2), [1.0] * BLOCK + [63.5, -1.0]), np.uint8)
        assert Int8(BLOCK + 2).known_finite(data)
        data = np.frombuffer(encoded(Int8(BLOCK + 2), [1.0] * BLOCK + [63.5, math.nan]), np.uint8)
        assert not Int8(BLOCK + 2).known_finite(data)
        assert Int8(0).known_finite(np.empty(0, np.uint8))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [BFloat16, Int8])
def test_elements_that_are_not_finite_stay_so_at_their_places(kind: type[BFloat16 | Int8], bad: float) -> None:
    vector = np.linspace(-1, 1, 2 * BLOCK + 5).astype(np.float32)
    vector[[3, BLOCK + 7]] = bad
    out = encode_and_decode(kind(vector.size), vector)
    assert np.flatnonzero(~np.isfinite(out)).tolist() == [3, BLOCK + 7]
    np.testing.assert_allclose(out[2 * BLOCK :], vector[2 * BLOCK :], rtol=2**-7)


@pytest.mark.parametrize("name", FORMATS[1:])
@pytest.mark.parametrize("size", SIZES)
def test_a_codec_writes_exactly_its_number_of_bytes(name: str, size: int) -> None:
    codec = codec_of(name, size)
    assert codec is not None
    assert codec.nbytes == {"bfloat16": 2 * size, "int8": size + 4 * math.ceil(size / BLOCK)}[name]
    vector = np.arange(size, dtype=np.float32)
    assert encode_and_decode(codec, vector).shape == (size,)
    # Nothing is written outside the codec's own bytes.
    around = np.full(codec.nbytes + 2, 170, np.uint8)
    codec.encode(vector, around[1:-1])
    assert around[[0, -1]].tolist() == [170, 170]


class TestResidual:
    @given(st.lists(hnp.arrays(np.float32, 9, elements=TAME), min_size=1, max_size=20))
    def test_the_sum_of_the_decoded_vectors_plus_the_residual_is_the_sum_of_the_vectors(
        self, vectors: list[np.ndarray]
    ) -> None:
        codec, residual, data = Int8(9), np.zeros(9, np.float32), np.empty(13, np.uint8)
        meant, read, out = np.zeros(9), np.zeros(9), np.empty(9, np.float32)
        rounding = 0.0
        for vector in vectors:
            step = steps(residual + vector)
            codec.encode_with_residual(vector, residual, data)
            codec.decode(data, out)
            meant += vector
            read += out
            rounding += 2.0**-23 * (float(np.abs(vector).max()) + float(step[0]))  # From two float32 additions.
            np.testing.assert_array_less(np.abs(residual), (0.5 + 2.0**-15) * step)
            np.testing.assert_array_less(np.abs(read + residual - meant), rounding + 1e-44)

    def test_a_residual_may_span_several_blocks(self) -> None:
        size = 2 * BLOCK + 3
        codec, generator = Int8(size), np.random.default_rng(0)
        residual, data, out = np.zeros(size, np.float32), np.empty(codec.nbytes, np.uint8), np.empty(size, np.float32)
        meant, read = np.zeros(size), np.zeros(size)
        for _ in range(20):
            vector = generator.normal(size=size).astype(np.float32)
            kept = vector.copy()
            codec.encode_with_residual(vector, residual, data)
            np.testing.assert_array_equal(vector, kept)
            codec.decode(data, out)
            meant += vector
            read += out
        largest = 6 / 127  # The step for standard normal numbers plus a residual.
        assert np.abs(read - meant).max() < 0.6 * largest

    @pytest.mark.filterwarnings("error::RuntimeWarning")
    @pytest.mark.parametrize("bad", [math.nan, math.inf, LARGEST])
    def test_no_residual_is_kept_of_a_number_that_is_not_finite(self, bad: float) -> None:
        codec, residual, data = Int8(3), np.zeros(3, np.float32), np.empty(7, np.uint8)
        codec.encode_with_residual(np.array([1.0, bad, 2.0], np.float32), residual, data)
        assert np.isfinite(residual).all()
        codec.encode_with_residual(np.array([1.0, 0.0, 2.0], np.float32), residual, data)
        assert np.isfinite(residual).all()


class TestDifference:
    def test_both_ends_hold_the_same_center_and_it_does_not_drift(self) -> None:
        size = BLOCK + 9
        codec, generator = Int8(size), np.random.default_rng(1)
        center = generator.normal(size=size).astype(np.float32)
        known, theirs = center.copy(), center.copy()
        data, other = np.empty(codec.nbytes, np.uint8), np.empty_like(center)
        for _ in range(300):
            center += generator.normal(scale=1e-3, size=size).astype(np.float32)
            step = steps(center - known)
            codec.encode_change(center, known, data)
            codec.decode_change(data, theirs, other)
            theirs, other = other, theirs
            assert theirs.tobytes() == known.tobytes()
            bound = (0.5 + 2.0**-15) * step + 2.0**-23 * np.abs(center)
            assert (np.abs(center.astype(np.float64) - theirs) <= bound).all()

    @given(hnp.arrays(np.float32, 5, elements=ANY), hnp.arrays(np.float32, 5, elements=ANY))
    def test_differences_of_any_numbers_give_both_ends_the_same_center(
        self, center: np.ndarray, known: np.ndarray
    ) -> None:
        codec, data, out = Int8(5), np.empty(9, np.uint8), np.empty(5, np.float32)
        theirs = known.copy()
        codec.encode_change(center, known, data)
        codec.decode_change(data, theirs, out)
        np.testing.assert_array_equal(out, known)

    @pytest.mark.filterwarnings("error::RuntimeWarning")
    def test_an_element_that_is_not_finite_is_not_finite_at_the_worker(self) -> None:
        codec, data, out = Int8(3), np.empty(7, np.uint8), np.empty(3, np.float32)
        known = np.array([1.0, 2.0, 3.0], np.float32)
        theirs = known.copy()
        codec.encode_change(np.array([1.5, math.inf, 3.0], np.float32), known, data)
        codec.decode_change(data, theirs, out)
        assert np.isfinite(out).tolist() == np.isfinite(known).tolist() == [True, False, True]


def test_unknown_formats_are_refused() -> None:
    assert codec_of("float32", 3) is None
    for name in ("float16", "", None, ["int8"]):
        with pytest.raises(ConfigurationError, match="`wire_format` must be one of 'float32', 'bfloat16', 'int8'"):
            codec_of(name, 3)  # type: ignore[arg-type]  # the invalid argument


@pytest.mark.parametrize("name", FORMATS)
def test_rules_that_rely_on_the_sent_center_refuse_rounding(name: str) -> None:
    refused = set()
    for rule in center_rules():
        try:
            require_format(name, make(rule))
        except ConfigurationError:
            refused.add(rule)
    exact = {"adag", "dana_dc", "dc_asgd", "aeasgd", "eamsgd", "easgd"}
    assert refused == {"float32": set(), "bfloat16": exact, "int8": exact | {"averaging"}}[name]


@pytest.mark.parametrize("algorithm", [11, 12, 13])
@pytest.mark.parametrize("form", ["4.1", "4.7", "4.10", "4.1norm", "4.7norm"])
def test_adag_refuses_rounding_in_each_of_its_forms(form: str, algorithm: int) -> None:
    """It compares the center with what was sent, wherever that is kept: rounding would look like movement."""
    for name in FORMATS[1:]:
        with pytest.raises(ConfigurationError, match="reads exactly what a worker was sent"):
            require_format(name, make("adag", form=form, algorithm=algorithm))
