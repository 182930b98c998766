from __future__ import annotations

from distkeras.job_server.errors import ACTIVE, FINAL, TRANSITIONS, JobState, before


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(JobState)
    reached, pending = set(), [JobState.QUEUED]
    while pending:
        state = pending.pop()
        if state not in reached:
            reached.add(state)
            pending += TRANSITIONS[state]
    assert reached == set(JobState)


def test_every_state_leads_to_a_final_state() -> None:
    assert {"done", "failed", "cancelled", "lost"} == FINAL
    for state in ACTIVE:
        assert TRANSITIONS[state] >= FINAL
    assert JobState.CANCELLED in TRANSITIONS[JobState.QUEUED]


def test_before_is_the_inverse_of_the_table() -> None:
    assert before(JobState.TRAINING) == {JobState.STARTING}
    assert before(JobState.QUEUED) == ACTIVE
    assert before(JobState.DONE) == ACTIVE
