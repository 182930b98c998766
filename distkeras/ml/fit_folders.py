"""The checkpoints of an estimator that is fitted several times, as a search does: no two fits share a folder."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distkeras.ps.checkpoint.checkpointer import Checkpoint, checkpoint_of
from distkeras.ps.errors import ConfigurationError

_LOCK = threading.Lock()
#: Of this process: uid of an estimator and its checkpoint's place to the numbers of the fits that have a folder, each
#: with whether it runs.
_TAKEN: dict[tuple[str, str], dict[int, bool]] = {}


@contextmanager
def folder_of_fit(uid: str, checkpoint: Any, resume: bool) -> Iterator[Checkpoint | None]:
    """Where one fit is saved, for as long as it runs.

    The first fit has the place that the estimator is told; later ones of the same estimator, and its copies, one beside
    it: ``folder-2`` and so on. A fit that failed leaves its folder to the next one, which resumes it or is told of it.

    Args:
        uid: of the estimator.
        checkpoint, resume: of `Trainer.train`.

    Raises:
        ConfigurationError: they cannot work, or a fit is to be resumed while another one has the folder.
    """
    told = checkpoint_of(checkpoint, resume)
    if told is None:
        yield None
        return
    key = uid, told.uri
    with _LOCK:
        taken = _TAKEN.setdefault(key, {})
        if resume and taken.get(1):
            raise ConfigurationError(
                "`resume` must be of one fit at a time, and not of those of a search. "
                f"Received: checkpoint={told.uri!r}, which another fit of this estimator has now"
            )
        number = 1 if resume else next(number for number in range(1, len(taken) + 2) if number not in taken)
        taken[number] = True
    ended = False
    try:
        yield told if number == 1 else dataclasses.replace(told, uri=f"{told.uri.rstrip('/')}-{number}")
        ended = True
    finally:
        with _LOCK:
            if ended:
                taken[number] = False
            else:
                del taken[number]
