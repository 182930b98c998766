"""The columns of a model, which are chosen before any job."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T
from support.present import present

from distkeras.data.batches import DataSpec
from distkeras.data.binding import entries_of, names_of
from distkeras.data.column_kinds import held_dtype
from distkeras.data.columns import Column
from distkeras.data.model_columns import data_spec, example
from distkeras.data.source import checked_columns
from distkeras.ps.errors import ColumnTypeError, ConfigurationError, MissingColumnError, ShapeError

FLOATS = T.ArrayType(T.FloatType())
SPARSE = "sparse_categorical_crossentropy"


class OwnSparse(keras.losses.SparseCategoricalCrossentropy):
    """A user's loss, which may accept other labels than Keras' own."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return super().call(keras.ops.abs(y_true), y_pred)


def frame(**columns: Any) -> Any:
    """Return an object with the only attribute of a DataFrame that is read here, its schema."""
    return SimpleNamespace(schema=T.StructType([T.StructField(name, kind) for name, kind in columns.items()]))


def compiled(
    loss: Callable[..., Any] | keras.losses.Loss | str,
    outputs: int = 3,
    inputs: tuple[int, ...] = (4,),
    activation: str = "softmax",
) -> keras.Model:
    model = keras.Sequential([keras.Input(inputs), keras.layers.Flatten(), keras.layers.Dense(outputs, activation)])
    model.compile("sgd", loss)
    return model


def spec(
    model: keras.Model,
    df: Any,
    features: list[str] | str = "x",
    labels: list[str] | list[str | None] | str = "y",
    weight: str | None = None,
) -> DataSpec:
    return data_spec(
        model,
        df.schema,
        features=names_of(features, "features_col"),
        labels=entries_of(labels, "label_col"),
        weight=weight,
        batch_size=8,
        epochs=2,
        seed=3,
        shuffle=True,
        spool_bytes=100,
    )


class TestNames:
    def test_one_or_several_names_are_accepted(self) -> None:
        assert names_of("a", "label_col") == ("a",)
        assert names_of(["a", "b"], "label_col") == ("a", "b")

    @pytest.mark.parametrize("bad", ["", [], [""], [1], ["a", None]])
    def test_other_values_are_refused(self, bad: str | list[Any]) -> None:
        with pytest.raises(ConfigurationError, match="`label_col` must be a column name"):
            names_of(bad, "label_col")


class TestLabels:
    @pytest.mark.parametrize("loss", [SPARSE, keras.losses.SparseCategoricalCrossentropy(from_logits=True)])
    @pytest.mark.parametrize("kind", [T.IntegerType(), T.LongType(), T.DoubleType(), T.BooleanType()])
    def test_sparse_labels_are_classes(self, loss: keras.losses.Loss | str, kind: Any) -> None:
        found = spec(compiled(loss), frame(x=FLOATS, y=kind))
        assert found.labels == (Column("y", (), "int32"),)
        assert found.labels[0].classes == 3

    def test_sparse_labels_of_a_sequence_are_arrays_of_classes(self) -> None:
        model = keras.Sequential([keras.Input((5, 2)), keras.layers.Dense(3, "softmax")])
        model.compile("sgd", SPARSE)
        found = spec(model, frame(x=FLOATS, y=T.ArrayType(T.IntegerType())))
        assert found.labels == (Column("y", (5,), "int32"),)

    @pytest.mark.parametrize(
        ("loss", "outputs", "kind", "shape", "checks"),
        [
            (keras.losses.SparseCategoricalCrossentropy(ignore_class=255), 3, "int", (), (3, 255, False)),
            ("ce", 3, "int", (), (3, None, False)),
            ("crossentropy", 3, "array", (3,), (None, None, False)),
            ("bce", 1, "int", (1,), (None, None, True)),
            (keras.losses.BinaryFocalCrossentropy(), 2, "array", (2,), (None, None, True)),
            (OwnSparse(), 3, "int", (), (None, None, False)),
            ("mse", 1, "int", (1,), (None, None, False)),
        ],
    )
    def test_the_loss_that_keras_resolves_decides_which_labels_are_valid(
        self, loss: Any, outputs: int, kind: str, shape: tuple[int, ...], checks: tuple[Any, ...]
    ) -> None:
        found = spec(compiled(loss, outputs), frame(x=FLOATS, y=FLOATS if kind == "array" else T.IntegerType()))
        label = present(found.labels[0])
        assert label.shape == shape
        assert (label.classes, label.ignored, label.probabilities) == checks

    def test_classes_may_lie_on_another_axis(self) -> None:
        model = keras.Sequential([keras.Input((5, 2)), keras.layers.Dense(3, "softmax"), keras.layers.Permute((2, 1))])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(axis=1))
        (label,) = spec(model, frame(x=FLOATS, y=FLOATS)).labels
        assert (present(label).shape, present(label).classes) == ((5,), 3)

    def test_one_hot_labels_are_arrays(self) -> None:
        found = spec(compiled("categorical_crossentropy"), frame(x=FLOATS, y=FLOATS))
        assert found.labels == (Column("y", (3,), "float32"),)
        assert found.labels[0].classes is None

    def test_labels_of_one_output_are_numbers(self) -> None:
        found = spec(compiled("mse", outputs=1), frame(x=FLOATS, y=T.DoubleType()))
        assert found.labels == (Column("y", (1,), "float32"),)

    @pytest.mark.parametrize("loss", ["mse", "categorical_crossentropy", keras.losses.MeanSquaredError()])
    def test_scalar_labels_are_refused_for_several_numbers(self, loss: keras.losses.Loss | str) -> None:
        with pytest.raises(ShapeError, match=r"arrays of shape \(3,\).*Received: int") as caught:
            spec(compiled(loss), frame(x=FLOATS, y=T.IntegerType()))
        assert caught.value.column == "y"

    @pytest.mark.parametrize("loss", [SPARSE, "categorical_crossentropy", keras.losses.CategoricalCrossentropy()])
    def test_a_loss_of_classes_is_refused_for_one_number(self, loss: keras.losses.Loss | str) -> None:
        with pytest.raises(ConfigurationError, match=r"a number for each class.*'binary_crossentropy'"):
            spec(compiled(loss, outputs=1), frame(x=FLOATS, y=T.IntegerType()))

    def test_one_class_is_refused_for_a_sequence(self) -> None:
        model = keras.Sequential([keras.Input((5, 2)), keras.layers.Dense(3, "softmax")])
        model.compile("sgd", SPARSE)
        with pytest.raises(ShapeError, match=r"labels must be arrays of shape \(5, 3\)"):
            spec(model, frame(x=FLOATS, y=T.IntegerType()))

    def test_a_custom_loss_may_have_scalar_labels(self) -> None:
        def mine(y_true: Any, y_pred: Any) -> Any:
            return keras.ops.mean(y_pred)

        found = spec(compiled(mine), frame(x=FLOATS, y=T.IntegerType()))
        assert found.labels == (Column("y", (), "int32"),)

    def test_each_output_has_the_labels_of_its_loss(self) -> None:
        inputs = keras.Input((4,))
        heads = [keras.layers.Dense(3, "softmax", name="a")(inputs), keras.layers.Dense(1, name="b")(inputs)]
        model = keras.Model(inputs, heads)
        df = frame(x=FLOATS, y=T.IntegerType(), z=FLOATS)
        for loss in ([SPARSE, "mse"], {"b": "mse", "a": SPARSE}):
            model.compile("sgd", loss)
            found = spec(model, df, labels=["y", "z"])
            assert found.labels == (Column("y", (), "int32"), Column("z", (1,), "float32"))
            assert [label.classes for label in found.labels] == [3, None]


class TestFeatures:
    @pytest.mark.parametrize("kind", [FLOATS, VectorUDT(), T.ArrayType(T.DoubleType())])
    def test_features_have_the_shape_of_the_input(self, kind: Any) -> None:
        found = spec(compiled(SPARSE, inputs=(2, 3)), frame(x=kind, y=T.IntegerType()))
        assert found.features == (Column("x", (2, 3), "float32"),)

    def test_integer_inputs_stay_integers(self) -> None:
        inputs = keras.Input((4,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(10, 2)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(hidden))
        model.compile("sgd", SPARSE)
        found = spec(model, frame(x=T.ArrayType(T.IntegerType()), y=T.IntegerType()))
        assert found.features[0].dtype == "int32"

    def test_jax_holds_wide_integers_only_with_x64(self) -> None:
        assert [held_dtype(dtype, "jax", x64=False) for dtype in ("int64", "uint64", "int32")] == [
            "int32",
            "uint32",
            "int32",
        ]
        assert (held_dtype("int64", "jax", x64=True), held_dtype("int64", "torch", x64=False)) == ("int64", "int64")

    def test_doubles_stay_doubles(self) -> None:
        inputs = keras.Input((2,), dtype="float64")
        model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(inputs))
        model.compile("sgd", SPARSE)
        found = spec(model, frame(x=VectorUDT(), y=T.IntegerType()))
        assert found.features[0].dtype == "float64"
        assert (sorted(found.doubles), sorted(found.whole)) == (["x", "y"], ["y"])

    def test_only_the_first_extent_of_an_input_may_be_open(self) -> None:
        model = keras.Sequential(
            [keras.Input((2, None)), keras.layers.GlobalAveragePooling1D(data_format="channels_first")]
        )
        model.compile("sgd", "mse")
        with pytest.raises(ConfigurationError, match="only the first extent may be open") as caught:
            spec(model, frame(x=FLOATS, y=FLOATS))
        assert caught.value.column == "x"

    def test_an_input_of_any_length(self) -> None:
        model = keras.Sequential([keras.Input((None, 2)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)])
        model.compile("sgd", SPARSE)
        found = spec(model, frame(x=FLOATS, y=T.IntegerType()))
        assert [(column.shape, column.is_open) for column in found.columns] == [((None, 2), True), ((), False)]
        assert found.is_open == (True, False)

    @pytest.mark.parametrize(
        ("columns", "text"),
        [
            ({"features": ["x", "y"]}, "`features_col` must name a column for each of the 1 inputs"),
            ({"labels": ["y", "x"]}, "several columns for one output must hold one number each.*array<float>"),
            ({"labels": {"b": "y"}}, "`label_col` must name a column for each of the model's outputs"),
        ],
    )
    def test_another_number_of_columns_is_refused(self, columns: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigurationError, match=text):
            spec(compiled(SPARSE), frame(x=FLOATS, y=T.IntegerType()), **columns)

    @pytest.mark.parametrize(
        ("columns", "kind", "way"),
        [
            ({"features": "s"}, T.StringType(), "StringIndexer"),
            ({"labels": "s"}, T.StringType(), "StringIndexer"),
            ({"weight": "s"}, T.StringType(), "cast digits"),
            ({"features": "s"}, T.BinaryType(), "decode it to an array"),
            ({"features": "s"}, T.ArrayType(T.StringType()), "token ids"),
            ({"features": "s"}, T.ArrayType(VectorUDT()), "VectorAssembler"),
            ({"features": "s"}, T.TimestampType(), "unix_timestamp"),
            ({"features": "s"}, T.StructType([T.StructField("a", T.IntegerType())]), "select its fields"),
        ],
    )
    def test_a_type_without_numbers_is_refused(self, columns: dict[str, Any], kind: Any, way: str) -> None:
        with pytest.raises(ColumnTypeError, match=rf"must hold numbers.*{way}.*Received: type=") as caught:
            spec(compiled(SPARSE), frame(x=FLOATS, y=T.IntegerType(), s=kind), **columns)
        assert caught.value.column == "s"

    def test_scalars_are_refused_for_an_input_of_several_numbers(self) -> None:
        with pytest.raises(ShapeError, match=r"fill the input's shape \(4,\).*VectorAssembler.*Received: double"):
            spec(compiled(SPARSE), frame(x=T.DoubleType(), y=T.IntegerType()))

    def test_vectors_of_a_wrong_size_are_refused_by_their_metadata(self) -> None:
        df = SimpleNamespace(
            schema=T.StructType()
            .add("x", VectorUDT(), metadata={"ml_attr": {"num_attrs": 3}})
            .add("y", T.IntegerType())
        )
        with pytest.raises(ShapeError, match=r"must hold 4 values each.*Received: 3") as caught:
            spec(compiled(SPARSE), df)
        assert caught.value.column == "x"

    def test_an_input_of_text_is_refused(self) -> None:
        inputs = keras.Input((1,), dtype="string")
        hidden = keras.layers.TextVectorization(vocabulary=["a", "b"], output_mode="multi_hot")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(hidden))
        model.compile("sgd", SPARSE)
        with pytest.raises(ConfigurationError, match=r"apply TextVectorization.*Received: an input of text"):
            spec(model, frame(x=T.IntegerType(), y=T.IntegerType()))

    @pytest.mark.parametrize("missing", [{"features": "gone"}, {"labels": "gone"}, {"weight": "gone"}])
    def test_a_missing_column_is_refused(self, missing: dict[str, str]) -> None:
        with pytest.raises(MissingColumnError, match=r"'gone'.*Received: columns=\['x', 'y'\]") as caught:
            spec(compiled(SPARSE), frame(x=FLOATS, y=T.IntegerType()), **missing)
        assert caught.value.column == "gone"


def test_the_other_settings_are_passed_on() -> None:
    found = spec(compiled(SPARSE), frame(x=FLOATS, y=T.IntegerType(), w=T.DoubleType()), weight="w")
    assert found.sample_weight == Column("w")
    assert (found.batch_size, found.epochs, found.seed, found.shuffle, found.spool_bytes) == (8, 2, 3, True, 100)


def test_an_example_has_one_row_of_each_column() -> None:
    found = spec(compiled(SPARSE), frame(x=FLOATS, y=T.IntegerType(), w=T.DoubleType()), weight="w")
    batch = example(found)
    assert batch.size == 1
    assert batch.x[0].shape == (1, 4)
    assert batch.y[0].shape == (1,)
    assert batch.y[0].dtype == np.int32
    assert batch.weight is not None
    assert isinstance(batch.weight, np.ndarray)
    assert batch.weight.tolist() == [1.0]


def test_ids_that_an_embedding_looks_up_must_be_its_rows() -> None:
    ids, others, x = keras.Input((2,), dtype="int32"), keras.Input((1,)), keras.Input((2,))
    small, large = keras.layers.Embedding(5, 2, name="small"), keras.layers.Embedding(9, 2)
    unused = keras.layers.Embedding(3, 2)
    unused(ids)
    found = [layer(ids) for layer in (small, large)] + [small(others % 5)]
    flat = [keras.layers.Flatten()(part) for part in found]
    model = keras.Model([ids, others, x], keras.layers.Dense(1)(keras.layers.concatenate([*flat, x])))
    model.compile("sgd", "mse")
    df = frame(ids=T.ArrayType(T.IntegerType()), other=T.FloatType(), x=T.ArrayType(T.FloatType()), y=T.FloatType())
    tables = [column.table for column in spec(model, df, ["ids", "other", "x"]).features]
    assert tables == [("small", 5), None, None]


INTEGERS = T.ArrayType(T.IntegerType())


def masked_sparse(y_true: Any, y_pred: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, ignore_class=0)


class TestStepsOfAnyLength:
    """Labels and weights of outputs with an open extent, and the inputs that have as many steps."""

    def tagger(self, loss: Any, *, hidden: Any = None, classes: int = 5) -> keras.Model:
        steps = keras.Input((None, 4), name="steps")
        hidden = hidden or keras.layers.Dense(3)
        model = keras.Model(steps, keras.layers.Dense(classes)(hidden(steps)))
        model.compile("sgd", loss)
        return model

    def label(self, model: keras.Model, kind: Any = INTEGERS, **rows: Any) -> Any:
        found = spec(model, frame(x=FLOATS, y=kind))
        (column,) = found.targets
        return column

    def test_a_sparse_loss_needs_a_class_for_each_step(self) -> None:
        column = self.label(self.tagger(SPARSE))
        assert (column.shape, column.dtype, column.classes, column.steps_of) == ((None,), "int32", 5, "x")

    def test_a_regression_needs_the_output_of_each_step(self) -> None:
        column = self.label(self.tagger("mse"), FLOATS)
        assert (column.shape, column.dtype, column.steps_of) == ((None, 5), "float32", "x")

    def test_labels_of_ctc_are_shorter_than_the_input(self) -> None:
        column = self.label(self.tagger(keras.losses.CTC()))
        assert (column.shape, column.steps_of, column.padding.longest) == ((None,), "", None)

    @pytest.mark.parametrize(
        ("hidden", "steps_of"),
        [
            (keras.layers.Conv1D(3, 5, padding="same"), "x"),
            (keras.layers.Conv1D(3, 5), ""),
            (keras.layers.MaxPooling1D(2), ""),
        ],
    )
    def test_layers_may_change_the_number_of_steps(self, hidden: Any, steps_of: str) -> None:
        assert self.label(self.tagger(SPARSE, hidden=hidden)).steps_of == steps_of

    def test_a_number_a_row_is_refused(self) -> None:
        with pytest.raises(ShapeError, match="labels must be arrays of shape"):
            self.label(self.tagger(SPARSE), T.IntegerType())

    def test_inputs_that_must_agree_are_compared_row_by_row(self) -> None:
        one, other = keras.Input((None, 2)), keras.Input((None, 2))
        model = keras.Model([one, other], keras.layers.Dense(3)(keras.layers.Add()([one, other])))
        model.compile("sgd", SPARSE)
        found = spec(model, frame(a=FLOATS, b=FLOATS, y=INTEGERS), ["a", "b"])
        assert [column.steps_of for column in found.columns] == ["", "a", "a"]
        record = pa.RecordBatch.from_pydict({"a": [[1.0, 2, 3, 4]], "b": [[1.0, 2]], "y": [[1, 2]]})
        with pytest.raises(ShapeError, match=r"as many steps as in 'a', 2\. Received: 1 in row 5") as caught:
            checked_columns(record, found, worker=0, step=1, first_row=5)
        assert caught.value.column == "b"

    def test_each_output_follows_its_own_input(self) -> None:
        one, other = keras.Input((None, 2)), keras.Input((None, 2))
        outputs = [keras.layers.Dense(3)(other), keras.layers.Dense(3)(one)]
        model = keras.Model([one, other], outputs)
        model.compile("sgd", [SPARSE, SPARSE])
        found = spec(model, frame(a=FLOATS, b=FLOATS, y=INTEGERS, z=INTEGERS), ["a", "b"], ["y", "z"])
        assert [column.steps_of for column in found.columns] == ["", "", "b", "a"]

    def test_a_mini_batch_to_try_has_the_steps_of_the_output(self) -> None:
        found = spec(self.tagger(SPARSE, hidden=keras.layers.Conv1D(3, 5)), frame(x=FLOATS, y=INTEGERS))
        batch = example(found)
        assert (batch.x[0].shape, batch.y[0].shape, batch.is_open) == ((1, 32, 4), (1, 28), (True, True))

    def test_an_attention_map_needs_no_labels_and_can_have_none(self) -> None:
        steps = keras.Input((None, 4))
        attended, heads = keras.layers.MultiHeadAttention(2, 3)(steps, steps, return_attention_scores=True)
        model = keras.Model(steps, [heads, keras.ops.mean(heads, axis=1), keras.layers.Dense(5)(attended)])
        model.compile("sgd", [None, None, SPARSE])
        found = spec(model, frame(x=FLOATS, y=INTEGERS), labels=[None, None, "y"])
        (column,) = found.targets
        assert (column.shape, column.steps_of, column.shown_steps) == ((None,), "x", 32)
        for number, name in ((0, "2, None, None"), (1, "None, None")):
            model.compile("sgd", ["mse" if output == number else None for output in range(3)])
            labels = ["y" if output == number else None for output in range(3)]
            with pytest.raises(ConfigurationError, match=rf"only the first extent may be open.*{name}"):
                spec(model, frame(x=FLOATS, y=INTEGERS), labels=labels)
