"""Faults in the columns of labels and weights, and in what a loss means."""

from __future__ import annotations

from mutants.mutant import Mutant

_STEPS = ("tests/keras_model/test_labels_and_weights.py",)

LABELS = (
    Mutant(
        "a loss is known by its name only",
        "distkeras/data/losses.py",
        "            loss = keras.losses.get(loss)\n",
        "            loss = None if loss == 'bce' else keras.losses.get(loss)\n",
        "a classifier of the loss 'bce' is a regression",
        ("tests/data/test_losses.py",),
    ),
    Mutant(
        "labels of a binary cross-entropy are any numbers",
        "distkeras/data/columns.py",
        "    elif column.probabilities:\n",
        "    elif column.probabilities and not values.size:\n",
        "a classifier trains on the classes -1 and 1, and its loss falls without a bound",
        ("tests/data/test_columns.py",),
    ),
    Mutant(
        "labels keep the order of those that are there",
        "distkeras/data/model_columns.py",
        "        labels=targets.labels(entries),\n",
        "        labels=tuple(sorted(targets.labels(entries), key=lambda label: label is None)),\n",
        "an output is trained on the labels of another one",
        _STEPS,
    ),
    Mutant(
        "weights of outputs are lost",
        "distkeras/data/spec.py",
        "        return x, y, as_weight(weights)\n",
        "        return x, y, as_weight(weights[:1])\n",
        "the weights of the first output count for all",
        _STEPS,
    ),
)
