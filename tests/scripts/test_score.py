"""Tests of `distkeras score`: its flags, and scoring rows as a batch and as a stream."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pyarrow.parquet as pq
import pytest
from support.programs import spark_submit

from distkeras.data.datasets import write_parquet

SCRIPT = Path(__file__).parents[2] / "scripts" / "score.py"
X = np.random.default_rng(0).random((50, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def score() -> ModuleType:
    import distkeras.commands.score

    return distkeras.commands.score


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
    made.compile("sgd", "sparse_categorical_crossentropy")
    return made


def test_every_parameter_of_the_model_is_a_flag_or_excluded(score: ModuleType) -> None:
    options = score.parser().options()
    assert set(score.keywords().values()) <= set(options)
    assert {"features", "prediction", "probability", "batch_size", "batch_bytes", "output_type"} <= set(options)
    assert "rows a call of the model" in inspect.cleandoc(score.parser().format_help()).replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stream"], "`--checkpoint`"),
        (["--every", "3"], "`--stream`"),
        (["--stream", "--checkpoint", "c", "--overwrite"], "`--overwrite`"),
    ],
)
def test_incompatible_options_are_refused(
    score: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score.main(["--data", "d", "--model", "m.keras", "--out", "o", *arguments]) == 2
    assert message in capsys.readouterr().err


def add_file(folder: Path, rows: slice) -> None:
    """Write some of the rows as one more file."""
    name = f"from-{rows.start}"
    write_parquet(folder / name, X[rows], np.arange(len(X))[rows])
    (made,) = (folder / name).iterdir()
    made.rename(folder / "arriving" / f"{name}.parquet")


@pytest.mark.slow
def test_rows_are_scored_as_a_batch_and_as_a_stream(tmp_path: Path) -> None:
    trained = model()
    trained.save(tmp_path / "model.keras")
    expected = trained.predict(X, verbose=0)
    (tmp_path / "arriving").mkdir()
    add_file(tmp_path, slice(0, 30))
    common = ("--data", "arriving", "--model", "model.keras", "--prediction", "class")
    done = spark_submit(tmp_path, SCRIPT, *common, "--out", "scored", "--raw-prediction", "")
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(tmp_path / "scored").sort_by("label")
    assert rows.column_names == ["features", "label", "class", "probability"]
    assert rows["class"].to_pylist() == expected[:30].argmax(axis=1).tolist()
    assert spark_submit(tmp_path, SCRIPT, *common, "--out", "scored").returncode == 2  # The output exists.

    stream = (*common, "--out", "streamed", "--stream", "--checkpoint", "progress")
    for call in range(2):
        if call:
            add_file(tmp_path, slice(30, 50))
        done = spark_submit(tmp_path, SCRIPT, *stream)
        assert done.returncode == 0, done.stderr
    rows = pq.read_table(tmp_path / "streamed").sort_by("label")
    assert rows["label"].to_pylist() == list(range(50))
    assert rows["class"].to_pylist() == expected.argmax(axis=1).tolist()
