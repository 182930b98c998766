"""The table of a server's states."""

from __future__ import annotations

from typing import Any

import pytest

from distkeras.ps.errors import JobStoppedError, LocalProtocolError, ServerLostError
from distkeras.ps.protocol.messages import Fault, fault_of
from distkeras.ps.server.job_state import TRANSITIONS, JobCondition, ServerState


def fault() -> Fault:
    return fault_of(JobStoppedError("for a test"))


def test_every_state_is_in_the_table_and_is_reached() -> None:
    assert set(TRANSITIONS) == set(ServerState)
    reached, pending = set(), [ServerState.RUNNING]
    while pending:
        state = pending.pop()
        if state not in reached:
            reached.add(state)
            pending += TRANSITIONS[state]
    assert reached == set(ServerState)


@pytest.mark.parametrize("state", ServerState)
@pytest.mark.parametrize("following", ServerState)
def test_the_error_for_a_transition_that_the_table_lacks_names_both_states(
    state: ServerState, following: ServerState
) -> None:
    condition = JobCondition()
    condition.state = state
    with condition:
        if following in TRANSITIONS[state]:
            condition.move(following)
            assert condition.state is following
            return
        with pytest.raises(LocalProtocolError, match=f"{state.value} cannot become {following.value}"):
            condition.move(following)
    assert condition.state is state


@pytest.mark.parametrize("state", ServerState)
def test_every_event_is_accepted_in_every_state(state: ServerState) -> None:
    """Threads report failures, the driver's goodbye and the close in any order."""
    for event in ("fail", "report_corruption", "release", "close"):
        condition = JobCondition()
        condition.state = state
        arguments: dict[str, list[Any]] = {"fail": [fault()], "report_corruption": ["half a commit"]}
        getattr(condition, event)(*arguments.get(event, []))
        assert condition.state is state or condition.state in TRANSITIONS[state]


def test_a_goodbye_and_a_close_are_both_recorded() -> None:
    for order in (("release", "close"), ("close", "release")):
        condition = JobCondition()
        for event in order:
            getattr(condition, event)()
        assert (condition.over, condition.closing) == (True, True)


def test_workers_look_for_another_server_if_theirs_closes_without_a_goodbye() -> None:
    """Another attempt may own the checkpoint, and a worker that received `JobStoppedError` would end a healthy job."""
    condition = JobCondition()
    condition.close()
    with pytest.raises(ServerLostError, match="is closing, and its job has not ended"):
        condition.require_running()
    condition.release()
    with pytest.raises(JobStoppedError, match="the job is over"):
        condition.require_running()


def test_a_corrupt_center_stays_corrupt_when_the_job_fails() -> None:
    condition = JobCondition()
    condition.report_corruption("half a commit")
    condition.fail(fault())
    assert condition.state is ServerState.FAILED
    assert condition.corruption == "half a commit"
