"""The states of a job, and the one table of transitions between them."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class JobState(enum.StrEnum):
    """The states of a job."""

    QUEUED = "queued"
    STARTING = "starting"
    TRAINING = "training"
    PREDICTING = "predicting"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


_ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.LOST})

#: What may follow each state. A job whose driver died without a word is queued again, to continue from its checkpoint.
FOLLOWS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED}),
    JobState.STARTING: _ENDED | {JobState.TRAINING, JobState.PREDICTING, JobState.QUEUED},
    JobState.TRAINING: _ENDED | {JobState.QUEUED},
    JobState.PREDICTING: _ENDED | {JobState.QUEUED},
    **dict.fromkeys(_ENDED, frozenset()),
}
#: In which nothing more happens.
FINAL = frozenset(state for state, following in FOLLOWS.items() if not following)
#: In which a job has a server that answers for it.
ACTIVE = frozenset({JobState.STARTING, JobState.TRAINING, JobState.PREDICTING})
#: What a job may be for.
TRAIN, PREDICT = "train", "predict"
KINDS = (TRAIN, PREDICT)
#: The state in which a driver does what its job is for.
AT_WORK = {TRAIN: JobState.TRAINING, PREDICT: JobState.PREDICTING}


def before(state: JobState) -> frozenset[JobState]:
    """Return the states that ``state`` may follow."""
    return frozenset(earlier for earlier, following in FOLLOWS.items() if state in following)
