"""Replicas that outlive a task: the next job with the same model and compilation finds them built and traced.

A Python worker of Spark runs task after task. To build a model and to trace its loop takes longer than a small model's
epoch, and in a cross-validation over learning rates each of many fits would do it again.
"""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

from distkeras.keras_model.fingerprint import Fingerprint, fingerprint
from distkeras.keras_model.recipe import Recipe
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.weights_file import ELSEWHERE, WEIGHTS, with_all_weights

#: Most bytes of initial values beside a replica; one that needs more is built anew each time.
_MOST_BYTES = 64 * 2**20
_PLAIN_MEMBERS = {"metadata.json", "config.json", WEIGHTS, ELSEWHERE}


@dataclass(frozen=True)
class _Key:
    """What two replicas must share for one to stand in for the other.

    Args:
        built: how the model is built and compiled; the learning rates may differ.
        weights: digest of the weights' file, which holds more than a center brings.
    """

    built: Fingerprint
    weights: bytes


class ReplicaCache:
    """Keeps the replica that was lent last; one, so that a process never holds two models.

    Only models of Keras' own classes and functions are kept: what is the user's own may have state that nobody else
    knows of.
    """

    def __init__(self) -> None:
        self._kept: tuple[_Key, KerasReplica] | None = None
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, recipe: Recipe, model_file: bytes) -> Iterator[KerasReplica]:
        """A replica as ``recipe`` builds it, for as long as the context lasts.

        Its weights and moving statistics are to be loaded; everything else is as it is in a new one. After an
        exception it is not kept. Weights that did not travel are read where the archive says that they are.

        Raises:
            ConfigurationError: as `Recipe.build` says.
        """
        key = _key(recipe, model_file)
        replica = self._take(key)
        if replica is None:
            replica = KerasReplica(recipe.build_to_train(with_all_weights(model_file)), resettable=key is not None)
        yield replica
        if key is not None and replica.resettable(_MOST_BYTES):
            with self._lock:
                self._kept = key, replica

    def _take(self, key: _Key | None) -> KerasReplica | None:
        """The kept replica if it fits; it is not kept any longer in either case."""
        with self._lock:
            kept, self._kept = self._kept, None
        if key is None or kept is None or kept[0].built.digest != key.built.digest:
            return None
        replica = kept[1]
        if not replica.is_all_loaded and kept[0].weights != key.weights:
            return None
        replica.reset()
        if key.built.learning_rate is not None:
            replica.model.optimizer.learning_rate = key.built.learning_rate
        return replica


def _key(recipe: Recipe, model_file: bytes) -> _Key | None:
    """None where a part is the user's own, or training goes on from an optimizer's state, which has no second time."""
    if recipe.objects or recipe.optimizer_state:
        return None
    with zipfile.ZipFile(BytesIO(model_file)) as archive:
        if not _PLAIN_MEMBERS.issuperset(archive.namelist()):
            return None
        config = json.loads(archive.read("config.json"))
        weights = b"".join(archive.read(name) for name in (WEIGHTS, ELSEWHERE) if name in archive.namelist())
    found = fingerprint(recipe, config)
    return None if found is None else _Key(found, hashlib.sha256(weights).digest())
