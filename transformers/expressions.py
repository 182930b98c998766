"""JVM expressions that the stages share: any numeric column as an array, and errors raised within a job.

An expression cannot raise a Python error. `error_expression` makes the JVM raise one whose text names the Python type;
`typed_errors` raises that type, for jobs that this project starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from distkeras.data.schema import NumericColumn
from distkeras.ps.errors import BadValueError, ConfigurationError, DistkerasError, EmptyDataError, ShapeError
from distkeras.spark.failures import named_error


def check_new_columns(df: DataFrame, *names: str, arguments: Sequence[str] = ()) -> None:
    """Raise ConfigurationError unless the names are new in ``df``; by default, Spark's names are case-insensitive.

    ``arguments`` are the caller's for each name; empty: all come from ``output_col``.
    """
    exact = df.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    existing = {name if exact else name.lower() for name in df.columns}
    for given, argument in zip(names, arguments or ["output_col"] * len(names), strict=True):
        name = given if exact else given.lower()
        if name in existing:
            why = ""
            if names.count(given) > 1:
                why = ", not that of another new one"
            elif given not in df.columns:
                why = ", upper and lower case being the same unless spark.sql.caseSensitive"
            raise ConfigurationError(
                f"`{argument}` must name a new column{why}. Received: {given!r} with columns={df.columns}",
                column=given,
            )
        existing.add(name)


def null_or_nan(value: Column) -> Column:
    """Return whether a number is null or NaN."""
    return value.isNull() | F.isnan(value.cast("double"))


def error_expression(kind: type[DistkerasError], name: str, expected: str, received: Column) -> Column:
    """Return an expression that fails the job with the text of an error of type ``kind``."""
    text = F.concat(
        F.lit(f"{kind.__module__}.{kind.__qualname__}: {expected}. Received: "),
        F.coalesce(received.cast("string"), F.lit("null")),
        F.lit(f" [column {name!r}]"),
    )
    return F.raise_error(text)


def class_of_scores(scores: NumericColumn, threshold: float | None, default_index: int | None = None) -> Column:
    """Return the class that scores predict, as a double; null stays null.

    Args:
        scores: numbers, arrays or vectors.
        threshold: least single score of class 1; a lower one is class 0. None: a single number is the class itself.
        default_index: if given, the class is that of the first score of at least ``threshold``, else of the largest if
            it is above 0, else this one. Not for numbers.
    """
    name, column = scores.name, scores.column
    if scores.depth > 1:
        raise ConfigurationError("scores must be flat arrays or vectors. Received: nested arrays", column=name)

    def of_single(score: Column) -> Column:
        number = score.cast("double")
        if threshold is not None:
            return (number >= threshold).cast("double")
        whole = (number >= 0) & (number == F.floor(number))
        wrong = error_expression(BadValueError, name, "a class must be a whole number from 0 on", number)
        return F.when(whole, number).otherwise(wrong)

    if scores.depth == 0:
        nan = error_expression(BadValueError, name, "scores must not be NaN", column)
        return F.when(column.isNull(), None).when(null_or_nan(column), nan).otherwise(of_single(column))
    largest = (F.array_position(column, F.array_max(column)) - 1).cast("double")
    broken = error_expression(BadValueError, name, "scores must be neither null nor NaN", column)
    empty = error_expression(ShapeError, name, "there must be a score at least", F.size(column))
    if default_index is None or threshold is None:
        index = F.when(F.size(column) == 1, of_single(F.element_at(column, 1))).otherwise(largest)
    else:
        first = F.array_position(F.transform(column, lambda score: score.cast("double") >= threshold), True) - 1
        above = F.when(F.array_max(column) > 0, largest).otherwise(float(default_index))
        index = F.when(first >= 0, first.cast("double")).otherwise(above)
    return (
        F.when(column.isNull(), None)
        .when(F.size(column) == 0, empty)
        .when(F.exists(column, null_or_nan), broken)
        .otherwise(index)
    )


#: Texts of Spark ML's own errors.
_SPARK_TEXTS = (
    ("Nothing has been added to this summarizer", EmptyDataError, "there must be a row. Received: none"),
    ("empty collection", EmptyDataError, "there must be a row. Received: none"),
    ("Dimensions mismatch when", ShapeError, "arrays must be equally long. Received: unequal"),
)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise the error that a task or `error_expression` named, in place of the Spark error around it."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        spark_text = str(error)
        typed = named_error(error)
        if typed is not None:
            raise typed from None
        for text, kind, message in _SPARK_TEXTS:
            if text in spark_text:
                raise kind(message, remote_traceback=spark_text) from None
        raise
