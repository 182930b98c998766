"""A draw of every layer of Keras, and the reason for each layer that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

Draw = np.random.Generator


class Place(NamedTuple):
    """One input of a model: the shape of a row, its dtype, and a function that draws rows of a full shape."""

    shape: tuple[int, ...]
    dtype: str
    draw: Callable[[Draw, tuple[int, ...]], np.ndarray]


def numbers(*shape: int) -> Place:
    return Place(shape, "float32", lambda draw, full: draw.normal(size=full))


def integers(most: int, *shape: int) -> Place:
    return Place(shape, "int32", lambda draw, full: draw.integers(0, most, full))


VECTOR, SEQUENCE, IMAGE, VOLUME = numbers(6), numbers(5, 4), numbers(6, 6, 2), numbers(4, 4, 4, 1)
TOKENS, CLASSES = integers(7, 5), integers(5, 3)
COLORS = Place((8, 8, 3), "float32", lambda draw, full: draw.uniform(0, 255, size=full))
SOUND = numbers(64)
FRAMES = numbers(3, 5, 5, 1)

Inner = Callable[[Any], Any]
"""A function from a symbolic tensor to another one, which makes the layers that it calls."""


def chain(*makers: Callable[[], Any]) -> Inner:
    """Return a function that makes layers and calls one after another."""

    def call(x: Any) -> Any:
        for make in makers:
            x = make()(x)
        return x

    return call


def merged(kind: Any, **arguments: Any) -> tuple[Place, Inner]:
    """Return the draw of a layer of two inputs."""

    def call(x: Any) -> Any:
        return kind(**arguments)([layers.Dense(4)(x), layers.Dense(4, "tanh")(x)])

    return VECTOR, call


def after_dense(make: Callable[[], Any]) -> tuple[Place, Inner]:
    return VECTOR, chain(lambda: layers.Dense(4), make)


def after_convolution(make: Callable[[], Any]) -> tuple[Place, Inner]:
    return IMAGE, chain(lambda: layers.Conv2D(2, 2), make)


def attended(make: Callable[[], Any]) -> tuple[Place, Inner]:
    def call(x: Any) -> Any:
        return make()(x, x) + x

    return SEQUENCE, call


def listed(make: Callable[[], Any]) -> tuple[Place, Inner]:
    def call(x: Any) -> Any:
        hidden = layers.Dense(4)(x)
        return make()([hidden, hidden])

    return SEQUENCE, call


def adapted() -> layers.Layer:
    made = layers.Normalization()
    made.adapt(np.random.default_rng(1).normal(3, 2, size=(50, 6)))
    return made


def crossed(x: Any) -> Any:
    first, second = x[:, 0], x[:, 1]
    return layers.HashedCrossing(5, output_mode="one_hot")((first, second))


def cells(*made: Any) -> layers.Layer:
    return layers.RNN(list(made) if len(made) > 1 else made[0])


def colored(kind: Any, *arguments: Any, **options: Any) -> tuple[Place, Inner]:
    """Return the draw of a layer that changes images at random."""

    def scaled() -> layers.Layer:
        return layers.Rescaling(1 / 1000)

    return COLORS, chain(lambda: kind(*arguments, **options), scaled)


L = layers
#: By the name of the layer's class: its place in a model, and the function that calls it.
LAYERS: dict[str, tuple[Place, Inner]] = {
    "Activation": after_dense(lambda: L.Activation("gelu")),
    "ActivityRegularization": after_dense(lambda: L.ActivityRegularization(0.01, 0.01)),
    "AdaptiveAveragePooling1D": (SEQUENCE, chain(lambda: L.AdaptiveAveragePooling1D(2))),
    "AdaptiveAveragePooling2D": after_convolution(lambda: L.AdaptiveAveragePooling2D(2)),
    "AdaptiveAveragePooling3D": (VOLUME, chain(lambda: L.AdaptiveAveragePooling3D(2))),
    "AdaptiveMaxPooling1D": (SEQUENCE, chain(lambda: L.AdaptiveMaxPooling1D(2))),
    "AdaptiveMaxPooling2D": after_convolution(lambda: L.AdaptiveMaxPooling2D(2)),
    "AdaptiveMaxPooling3D": (VOLUME, chain(lambda: L.AdaptiveMaxPooling3D(2))),
    "Add": merged(L.Add),
    "AdditiveAttention": listed(L.AdditiveAttention),
    "AlphaDropout": after_dense(lambda: L.AlphaDropout(0.3, seed=1)),
    "Attention": listed(lambda: L.Attention(use_scale=True, dropout=0.2, seed=1)),
    "AutoContrast": colored(L.AutoContrast),
    "Average": merged(L.Average),
    "AveragePooling1D": (SEQUENCE, chain(lambda: L.AveragePooling1D(2))),
    "AveragePooling2D": after_convolution(lambda: L.AveragePooling2D(2)),
    "AveragePooling3D": (VOLUME, chain(lambda: L.AveragePooling3D(2))),
    "BatchNormalization": after_dense(lambda: L.BatchNormalization(momentum=0.8)),
    "Bidirectional": (SEQUENCE, chain(lambda: L.Bidirectional(L.GRU(2, reset_after=False), merge_mode="sum"))),
    "CategoryEncoding": (CLASSES, chain(lambda: L.CategoryEncoding(5, output_mode="multi_hot"))),
    "CenterCrop": (IMAGE, chain(lambda: L.CenterCrop(4, 4))),
    "Concatenate": merged(L.Concatenate),
    "ContrastLimitedAdaptiveHistogramEqualization": colored(
        L.ContrastLimitedAdaptiveHistogramEqualization, tile_grid_size=(2, 2)
    ),
    "Conv1D": (SEQUENCE, chain(lambda: L.Conv1D(3, 2, padding="causal"))),
    "Conv1DTranspose": (SEQUENCE, chain(lambda: L.Conv1DTranspose(2, 2, strides=2))),
    "Conv2D": (IMAGE, chain(lambda: L.Conv2D(4, 3, groups=2))),
    "Conv2DTranspose": (IMAGE, chain(lambda: L.Conv2DTranspose(2, 2))),
    "Conv3D": (VOLUME, chain(lambda: L.Conv3D(2, 2))),
    "Conv3DTranspose": (VOLUME, chain(lambda: L.Conv3DTranspose(2, 2))),
    "ConvLSTM1D": (numbers(3, 5, 2), chain(lambda: L.ConvLSTM1D(2, 2))),
    "ConvLSTM2D": (FRAMES, chain(lambda: L.ConvLSTM2D(2, 2))),
    "ConvLSTM3D": (numbers(2, 3, 3, 3, 1), chain(lambda: L.ConvLSTM3D(2, 2))),
    "Cropping1D": (SEQUENCE, chain(lambda: L.Cropping1D(1))),
    "Cropping2D": (IMAGE, chain(lambda: L.Cropping2D(1))),
    "Cropping3D": (VOLUME, chain(lambda: L.Cropping3D(1))),
    "CutMix": colored(L.CutMix, seed=1),
    "Dense": (VOLUME, chain(lambda: L.Dense(4, "relu"))),
    "DepthwiseConv1D": (SEQUENCE, chain(lambda: L.DepthwiseConv1D(2))),
    "DepthwiseConv2D": (IMAGE, chain(lambda: L.DepthwiseConv2D(2, depth_multiplier=2))),
    "Discretization": (VECTOR, chain(lambda: L.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot"))),
    "Dot": merged(L.Dot, axes=1, normalize=True),
    "Dropout": after_dense(lambda: L.Dropout(0.4, seed=1)),
    "ELU": after_dense(lambda: L.ELU()),
    "EinsumDense": (SEQUENCE, chain(lambda: L.EinsumDense("abc,cd->abd", (5, 3), bias_axes="d"))),
    "Embedding": (TOKENS, chain(lambda: L.Embedding(7, 3))),
    "Equalization": colored(L.Equalization),
    "Flatten": (SEQUENCE, chain(lambda: L.Flatten())),
    "GRU": (SEQUENCE, chain(lambda: L.GRU(3, dropout=0.2, recurrent_dropout=0.2, seed=1))),
    "GRUCell": (SEQUENCE, chain(lambda: cells(L.GRUCell(3)))),
    "GaussianDropout": after_dense(lambda: L.GaussianDropout(0.3, seed=1)),
    "GaussianNoise": after_dense(lambda: L.GaussianNoise(0.3, seed=1)),
    "GlobalAveragePooling1D": (SEQUENCE, chain(lambda: L.GlobalAveragePooling1D())),
    "GlobalAveragePooling2D": after_convolution(lambda: L.GlobalAveragePooling2D(keepdims=True)),
    "GlobalAveragePooling3D": (VOLUME, chain(lambda: L.GlobalAveragePooling3D())),
    "GlobalMaxPooling1D": (SEQUENCE, chain(lambda: L.GlobalMaxPooling1D())),
    "GlobalMaxPooling2D": after_convolution(lambda: L.GlobalMaxPooling2D()),
    "GlobalMaxPooling3D": (VOLUME, chain(lambda: L.GlobalMaxPooling3D())),
    "GroupNormalization": after_dense(lambda: L.GroupNormalization(2)),
    "GroupQueryAttention": attended(lambda: L.GroupQueryAttention(2, 2, 1, dropout=0.2, seed=1)),
    "HashedCrossing": (CLASSES, crossed),
    "Hashing": (CLASSES, chain(lambda: L.Hashing(4, output_mode="multi_hot"))),
    "Identity": after_dense(lambda: L.Identity()),
    "IntegerLookup": (CLASSES, chain(lambda: L.IntegerLookup(vocabulary=[1, 2, 4], output_mode="multi_hot"))),
    "LSTM": (SEQUENCE, chain(lambda: L.LSTM(3, dropout=0.2, seed=1, go_backwards=True))),
    "LSTMCell": (SEQUENCE, chain(lambda: cells(L.LSTMCell(3)))),
    "Lambda": (VECTOR, chain(lambda: L.Lambda(lambda x: 2 * x))),
    "LayerNormalization": after_dense(lambda: L.LayerNormalization()),
    "LeakyReLU": after_dense(lambda: L.LeakyReLU(0.2)),
    "Masking": (SEQUENCE, chain(lambda: L.ReLU(), lambda: L.Masking(0.0), lambda: L.LSTM(3))),
    "MaxPooling1D": (SEQUENCE, chain(lambda: L.MaxPooling1D())),
    "MaxPooling2D": after_convolution(lambda: L.MaxPooling2D()),
    "MaxPooling3D": (VOLUME, chain(lambda: L.MaxPooling3D())),
    "Maximum": merged(L.Maximum),
    "MelSpectrogram": (SOUND, chain(lambda: L.MelSpectrogram(16, 8, sampling_rate=64, num_mel_bins=4))),
    "Minimum": merged(L.Minimum),
    "MultiHeadAttention": attended(lambda: L.MultiHeadAttention(2, 2, dropout=0.2, seed=1)),
    "Multiply": merged(L.Multiply),
    "Normalization": (VECTOR, chain(adapted)),
    "PReLU": after_dense(lambda: L.PReLU()),
    "Permute": (SEQUENCE, chain(lambda: L.Permute((2, 1)), lambda: L.Dense(2))),
    "Pipeline": colored(L.Pipeline, [L.RandomFlip(seed=1), L.RandomBrightness(0.2, (0, 255), seed=2)]),
    "RMSNormalization": after_dense(lambda: L.RMSNormalization()),
    "RNN": (SEQUENCE, chain(lambda: cells(L.SimpleRNNCell(3), L.GRUCell(2)))),
    "RandAugment": colored(L.RandAugment, (0, 255), seed=1),
    "RandomBrightness": colored(L.RandomBrightness, 0.2, (0, 255), seed=1),
    "RandomColorDegeneration": colored(L.RandomColorDegeneration, 0.3, (0, 255), seed=1),
    "RandomColorJitter": colored(
        L.RandomColorJitter, (0, 255), 0.2, 0.2, 0.2, 0.1, seed=1
    ),
    "RandomContrast": colored(L.RandomContrast, 0.2, (0, 255), seed=1),
    "RandomCrop": colored(L.RandomCrop, 6, 6, seed=1),
    "RandomErasing": colored(L.RandomErasing, seed=1),
    "RandomFlip": colored(L.RandomFlip, seed=1),
    "RandomGaussianBlur": colored(L.RandomGaussianBlur, seed=1),
    "RandomGrayscale": colored(L.RandomGrayscale, 1.0),
    "RandomHue": colored(L.RandomHue, 0.2, (0, 255), seed=1),
    "RandomInvert": colored(L.RandomInvert, value_range=(0, 255), seed=1),
    "RandomPerspective": colored(L.RandomPerspective, seed=1),
    "RandomPosterization": colored(L.RandomPosterization, 3, seed=1),
    "RandomRotation": colored(L.RandomRotation, 0.2, seed=1),
    "RandomSaturation": colored(L.RandomSaturation, 0.2, (0, 255), seed=1),
    "RandomSharpness": colored(L.RandomSharpness, 0.2, (0, 255), seed=1),
    "RandomShear": colored(L.RandomShear, 0.2, 0.2, seed=1),
    "RandomTranslation": colored(L.RandomTranslation, 0.2, 0.2, seed=1),
    "RandomZoom": colored(L.RandomZoom, 0.2, seed=1),
    "ReLU": after_dense(lambda: L.ReLU(max_value=1.0, negative_slope=0.1)),
    "RepeatVector": (VECTOR, chain(lambda: L.RepeatVector(2))),
    "Rescaling": (VECTOR, chain(lambda: L.Rescaling(0.5, 0.1))),
    "Reshape": (VECTOR, chain(lambda: L.Reshape((3, 2)), lambda: L.Conv1D(2, 2))),
    "Resizing": (IMAGE, chain(lambda: L.Resizing(3, 3))),
    "ReversibleEmbedding": (TOKENS, chain(lambda: L.ReversibleEmbedding(7, 3))),
    "STFTSpectrogram": (SOUND, chain(lambda: L.STFTSpectrogram(frame_length=16, frame_step=8, fft_length=16))),
    "SeparableConv1D": (SEQUENCE, chain(lambda: L.SeparableConv1D(2, 2))),
    "SeparableConv2D": (IMAGE, chain(lambda: L.SeparableConv2D(2, 2))),
    "SimpleRNN": (SEQUENCE, chain(lambda: L.SimpleRNN(3))),
    "SimpleRNNCell": (SEQUENCE, chain(lambda: cells(L.SimpleRNNCell(3, dropout=0.2, seed=1)))),
    "Softmax": after_dense(lambda: L.Softmax()),
    "Solarization": colored(L.Solarization, 0.2, 0.4, (0, 255), seed=1),
    "SpatialDropout1D": (SEQUENCE, chain(lambda: L.SpatialDropout1D(0.3, seed=1))),
    "SpatialDropout2D": after_convolution(lambda: L.SpatialDropout2D(0.3, seed=1)),
    "SpatialDropout3D": (VOLUME, chain(lambda: L.Conv3D(2, 2), lambda: L.SpatialDropout3D(0.3, seed=1))),
    "SpectralNormalization": (VECTOR, chain(lambda: L.SpectralNormalization(L.Dense(4)))),
    "StackedRNNCells": (
        SEQUENCE, chain(lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(3), L.SimpleRNNCell(2)])))
    ),
    "Subtract": merged(L.Subtract),
    "TimeDistributed": (SEQUENCE, chain(lambda: L.TimeDistributed(L.Dense(2, "tanh")))),
    "UnitNormalization": after_dense(lambda: L.UnitNormalization()),
    "UpSampling1D": (SEQUENCE, chain(lambda: L.UpSampling1D(2))),
    "UpSampling2D": after_convolution(lambda: L.UpSampling2D(2, interpolation="bilinear")),
    "UpSampling3D": (VOLUME, chain(lambda: L.UpSampling3D(2))),
    "Wrapper": (VECTOR, chain(lambda: Doubled(L.Dense(4)))),
    "ZeroPadding1D": (SEQUENCE, chain(lambda: L.ZeroPadding1D(1))),
    "ZeroPadding2D": (IMAGE, chain(lambda: L.ZeroPadding2D(1))),
    "ZeroPadding3D": (VOLUME, chain(lambda: L.ZeroPadding3D(1))),
    # Inputs of other dtypes.
    "bytes": (
        Place((6, 6, 2), "uint8", lambda draw, full: draw.integers(0, 255, full)),
        chain(lambda: L.Rescaling(0.001)),
    ),
    "large integers": (
        Place((3,), "int64", lambda draw, full: 2**40 + draw.integers(0, 5, full)),
        chain(lambda: L.Hashing(4, output_mode="multi_hot")),
    ),
    "booleans": (Place((6,), "bool", lambda draw, full: draw.integers(0, 2, full)), chain(lambda: L.Rescaling(1.0))),
    "doubles": (Place((6,), "float64", lambda draw, full: draw.normal(size=full)), chain(lambda: L.Dense(3))),
    "halves": (Place((6,), "float16", lambda draw, full: draw.normal(size=full)), chain(lambda: L.Dense(3))),
}  # fmt: skip

_BASE = "a base class or an argument, which has no behavior of its own"
_OTHER = "it wraps a model of another framework, which is not installed or cannot be trained"
_TEXT = "its input is text: the columns of a job are numbers, and the constructor's error says what to do"
#: Layers without a draw.
REASONS = {
    "Layer": _BASE, "Input": _BASE, "InputLayer": "every model has one", "InputSpec": _BASE,
    "FlaxLayer": _OTHER, "JaxLayer": _OTHER, "TorchModuleWrapper": _OTHER, "TFSMLayer": _OTHER,
    "StringLookup": _TEXT, "TextVectorization": _TEXT,
    "MaxNumBoundingBoxes": "its input is a dictionary of boxes, for pipelines of data",
    "AugMix": "it draws from Python's own generator, so that two runs of Keras differ",
    "RandomElasticTransform": "the compiled and the eager step of Keras differ on a short mini-batch",
    "MixUp": "it mixes images and labels in a dictionary, for pipelines of data",
}  # fmt: skip


@keras.saving.register_keras_serializable("draws")
class Doubled(layers.Wrapper):
    """A user's wrapper, which doubles what its layer returns."""

    def call(self, x: Any) -> Any:
        return 2.0 * self.layer(x)
