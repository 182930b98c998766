"""Publishes the center of a stream at the end of micro-batches, for other processes that predict with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from distkeras.callbacks import CenterWeights
from distkeras.keras_model import archive
from distkeras.ps.checkpoint.versions import VersionFolder, Versions
from distkeras.training.plan import JobPlan

log = logging.getLogger(__name__)

#: What all versions of a model share, of a job's identity.
_SHARED = ("model", "layout", "moving_statistics")


class Publisher:
    """Publishes versions of one stream.

    Args:
        versions: where, and how often.
        plan: the stream's.

    Raises:
        DifferentJobError: the directory has versions of another model.
        ConfigurationError: nothing opens the URI, or Keras cannot save the compiled model.
        SnapshotError: the directory cannot be read or written.
    """

    def __init__(self, versions: Versions, plan: JobPlan) -> None:
        self._versions = versions
        self._folder = VersionFolder(versions.uri)
        identity: dict[str, Any] = plan.identity()
        self._folder.take(
            {name: identity[name] for name in _SHARED}, lambda: archive.with_optimizer(plan.build_replica().model)
        )
        #: The present micro-batch and its stream, if it has ended without a version.
        self._ended: tuple[str, int] | None = None
        self._begun = False

    def begin(self, stream: str, number: int) -> None:
        """Note that a micro-batch begins.

        Raises:
            DifferentJobError: the directory has versions of another stream, or of later micro-batches.
            SnapshotError: it cannot be read.
        """
        self._ended = None
        if not self._begun:
            self._folder.require_stream(stream, number)
            self._begun = True

    def end(self, stream: str, number: int, fetch_center: Callable[[], CenterWeights]) -> None:
        """Publish the center at the end of a micro-batch, if it is due, and delete what is not to be kept.

        Raises:
            DifferentJobError: the version is there with other weights, or is another stream's.
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
