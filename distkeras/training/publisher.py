"""The versions of the center that a stream publishes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from distkeras.callbacks import CenterWeights
from distkeras.keras_model import archive
from distkeras.keras_model.keras_config import applied
from distkeras.ps.checkpoint.versions import VersionFolder, Versions
from distkeras.training.run import PreparedJob

log = logging.getLogger(__name__)

#: The parts of a job's identity that all versions of a model share.
_SHARED = ("model", "layout", "moving_statistics")


def _to_publish(job: PreparedJob) -> bytes:
    """Return the compiled model with its attributes, made under the settings with which workers compute."""
    plan = job.plan
    with applied(plan.recipe.settings):
        data = archive.with_optimizer(job.center.build_replica().model)
    return archive.with_attributes(data, archive.attributes_in(plan.model_file))


class Publisher:
    """Publishes versions of one stream.

    Args:
        versions: where and how often to publish.

    Raises:
        DifferentJobError: the directory has versions of another model.
        ConfigurationError: nothing opens the URI, or Keras cannot save the compiled model.
        SnapshotError: the directory cannot be read or written.
    """

    def __init__(self, versions: Versions, job: PreparedJob) -> None:
        self._versions = versions
        self._folder = VersionFolder(versions.uri, create=True)
        identity: dict[str, Any] = job.plan.identity()
        self._folder.take({name: identity[name] for name in _SHARED}, partial(_to_publish, job))
        #: The current micro-batch and its stream, if it has ended without a version.
        self._ended: tuple[str, int] | None = None
        self._begun = False

    def resume(self, stream: str, number: int) -> None:
        """Take over a micro-batch that an earlier driver has ended; it may have died before it published a version."""
        self._ended = stream, number

    def begin(self, stream: str, number: int) -> None:
        """Record that a micro-batch begins.

        Raises:
            DifferentJobError: the directory has versions of another stream, or of later micro-batches.
            SnapshotError: it cannot be read.
        """
        self._ended = None
        if not self._begun:
            self._folder.require_stream(stream, number)
            self._begun = True

    def end(self, stream: str, number: int, fetch_center: Callable[[], CenterWeights]) -> None:
        """Publish the center at the end of a micro-batch, if it is due, and delete old versions.

        Raises:
            DifferentJobError: the version exists with other weights, or is another stream's.
            SnapshotError: it cannot be written.
        """
        self._ended = stream, number
        if number % self._versions.every == 0:
            self.end_stream(fetch_center())

    def end_stream(self, weights: CenterWeights) -> None:
        """Publish the micro-batch that has ended, unless it has a version; see `end`."""
        if self._ended is None:
            return
        stream, number = self._ended
        self._folder.publish(stream, number, weights.vector, weights.moving_statistics)
        self._ended = None
        self._folder.prune(self._versions.keep)
        log.info("version %d is published in %s", number, self._versions.uri)
