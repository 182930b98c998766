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

#: The states that may follow each one. A job whose driver died without a result is queued again, to continue from its
#: checkpoint.
TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED}),
    JobState.STARTING: _ENDED | {JobState.TRAINING, JobState.PREDICTING, JobState.QUEUED},
    JobState.TRAINING: _ENDED | {JobState.QUEUED},
    JobState.PREDICTING: _ENDED | {JobState.QUEUED},
    **dict.fromkeys(_ENDED, frozenset()),
}
#: The states that no other state follows.
FINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)
#: The states in which a server is responsible for the job.
ACTIVE = frozenset({JobState.STARTING, JobState.TRAINING, JobState.PREDICTING})
#: The kinds of jobs.
TRAIN, PREDICT = "train", "predict"
KINDS = (TRAIN, PREDICT)
#: The state in which the driver of each kind of job works.
WORKING_STATES = {TRAIN: JobState.TRAINING, PREDICT: JobState.PREDICTING}


def before(state: JobState) -> frozenset[JobState]:
    """Return the states that ``state`` may follow."""
    return frozenset(earlier for earlier, following in TRANSITIONS.items() if state in following)
