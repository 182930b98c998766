"""Replicas that outlive a task: the next job with the same model and compilation finds its loop traced.

A Python worker of Spark runs task after task. To trace a model's loop takes longer than a small model's epoch, and in a
cross-validation over learning rates each of many fits would do it again. Only what is traced is kept: every task builds
its model, and the kept replica begins again with the state of that one.
"""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

from distkeras.keras_model.fingerprint import fingerprint
from distkeras.keras_model.recipe import Recipe
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.weights_file import ELSEWHERE, WEIGHTS, with_all_weights

if TYPE_CHECKING:
    import keras

#: Most bytes of a replica that is kept: while a task builds its model, the process holds both.
_MOST_BYTES = 256 * 2**20
_PLAIN_MEMBERS = {"metadata.json", "config.json", WEIGHTS, ELSEWHERE}


class ReplicaCache:
    """Keeps the replica that was lent last.

    Only models of Keras' own classes and functions are kept: others may have state that is not in their variables.
    """

    def __init__(self) -> None:
        self._kept: tuple[bytes, KerasReplica] | None = None
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, recipe: Recipe, model_file: bytes) -> Iterator[KerasReplica]:
        """Lend a replica as ``recipe`` builds it, for as long as the context lasts.

        Its weights and moving statistics are to be loaded; everything else is as it is in a new one. After an
        exception it is not kept. Weights that did not travel are read where the archive says that they are.

        Raises:
            ConfigurationError: as `Recipe.build` says.
        """
        with self._lock:
            kept, self._kept = self._kept, None
        model = recipe.build_to_train(with_all_weights(model_file))
        key = _key(recipe, model_file, model)
        replica = kept[1] if kept is not None and kept[0] == key and kept[1].begin_again(model) else None
        if replica is None:
            replica = KerasReplica(model)
        del kept, model
        yield replica
        if key is not None and replica.nbytes <= _MOST_BYTES:
            with self._lock:
                self._kept = key, replica


def _key(recipe: Recipe, model_file: bytes, model: keras.Model) -> bytes | None:
    """Return what two replicas must share for one to stand in for the other; None if none can.

    That is where a part is the user's own, where training goes on from an optimizer's state, and where nothing is
    traced.
    """
    if recipe.objects or recipe.optimizer_state or model.run_eagerly:
        return None
    with zipfile.ZipFile(BytesIO(model_file)) as archive:
        if not _PLAIN_MEMBERS.issuperset(archive.namelist()):
            return None
        config = json.loads(archive.read("config.json"))
    return fingerprint(recipe, config, model.optimizer)
