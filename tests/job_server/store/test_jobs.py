from __future__ import annotations

import multiprocessing
from collections import Counter

import pytest
from job_server.conftest import ManualClock
from sqlalchemy import Engine
from support.job_server.claims import take_all
from support.patience import patience
from support.present import present

from distkeras.job_server.errors import FINAL, JobState, NotFoundError, QuotaError, StateError
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.accounts import Account
from distkeras.job_server.store.jobs import JobStore, StoredJob

QUOTA = Settings()
SERVER = "host/1:1.00/a"


def add(store: JobStore, account: Account, size: int = 10, quota: Settings = QUOTA) -> StoredJob:
    return store.add(account, "a job", {"rule": "agn"}, size, quota)


def claimed(store: JobStore, account: Account) -> StoredJob:
    add(store, account)
    return present(store.claim(SERVER))


def test_a_job_is_stored_unchanged(store: JobStore, people: dict[str, Account], clock: ManualClock) -> None:
    job = add(store, people["ann"])
    assert (job.user, job.name, job.state, job.attempt, job.bytes) == ("ann", "a job", JobState.QUEUED, 0, 10)
    assert job.description == {"rule": "agn"}
    assert job.created == clock.now
    assert (job.started, job.ended, job.server, job.driver, job.cancel, job.error) == (None,) * 6


def test_another_users_job_is_not_found(store: JobStore, people: dict[str, Account]) -> None:
    job = add(store, people["ann"])
    for call in (store.get, store.request_cancel):
        with pytest.raises(NotFoundError):
            call(people["ben"], job.id)
    assert store.page(people["ben"]) == []
    assert store.get(people["admin"], job.id) == store.get(people["ann"], job.id) == job


def test_jobs_are_paged_with_the_latest_first(store: JobStore, people: dict[str, Account]) -> None:
    jobs = [add(store, people["ann"]) for _ in range(5)]
    add(store, people["ben"])
    first = store.page(people["ann"], limit=3)
    assert [job.id for job in first] == [job.id for job in jobs[:1:-1]]
    assert [job.id for job in store.page(people["ann"], before=first[-1].number)] == [jobs[1].id, jobs[0].id]
    store.request_cancel(people["ann"], jobs[3].id)
    assert [job.id for job in store.page(people["ann"], state=JobState.CANCELLED)] == [jobs[3].id]
    assert len(store.page(people["admin"])) == 6


def test_a_user_cannot_have_more_than_the_quota(store: JobStore, people: dict[str, Account]) -> None:
    add(store, people["ann"], 60, Settings(bytes_max=100))
    with pytest.raises(QuotaError, match="120 bytes with this job"):
        add(store, people["ann"], 60, Settings(bytes_max=100))
    add(store, people["ben"], 60, Settings(bytes_max=100))
    add(store, people["ann"], 0, Settings(queued_max=2))
    with pytest.raises(QuotaError, match="2 waiting jobs"):
        add(store, people["ann"], 0, Settings(queued_max=2))
    assert len(store.page(people["ann"])) == 2


def test_each_driver_of_a_job_is_recorded_until_the_job_is_removed(
    store: JobStore, people: dict[str, Account], clock: ManualClock
) -> None:
    first = claimed(store, people["ann"])
    assert [(one.attempt, one.ended, one.outcome) for one in store.attempts(first)] == [(1, None, None)]
    began = clock.now
    clock.now += 5
    assert store.move(first, JobState.QUEUED, outcome="died with exit status -9")
    clock.now += 2
    second = present(store.claim(SERVER))
    clock.now += 1
    assert not store.move(first, JobState.FAILED, "too late")
    assert store.move(second, JobState.FAILED, "ShapeError: no")
    assert [tuple(one.model_dump().values()) for one in store.attempts(first)] == [
        (1, began, began + 5, "died with exit status -9"),
        (2, began + 7, began + 8, "ShapeError: no"),
    ]
    store.remove(second)
    assert store.attempts(first) == []


def test_users_take_fair_turns(store: JobStore, people: dict[str, Account], clock: ManualClock) -> None:
    """A user with many jobs does not delay the others, whether jobs run in parallel or one after the other."""
    for _ in range(4):
        add(store, people["ann"])
    for _ in range(2):
        add(store, people["ben"])
    users = []
    for _ in range(6):
        clock.now += 1
        users.append(present(store.claim(SERVER)))
    assert [job.user for job in users] == ["ann", "ben", "ann", "ben", "ann", "ann"]
    assert store.claim(SERVER) is None
    for job in users:
        store.move(job, JobState.DONE)
    clock.now += 1
    add(store, people["ann"])
    add(store, people["ben"])
    assert present(store.claim(SERVER)).user == "ben"  # Ben's last turn was longer ago.


def test_the_user_with_fewer_running_jobs_is_first(
    store: JobStore, people: dict[str, Account], clock: ManualClock
) -> None:
    first = claimed(store, people["ann"])
    add(store, people["ann"])
    clock.now += 1
    claimed(store, people["ben"])
    store.move(first, JobState.DONE)
    add(store, people["ben"])
    assert present(store.claim(SERVER)).user == "ann"


@pytest.mark.parametrize("state", sorted(FINAL))
def test_a_final_state_does_not_change(
    store: JobStore, people: dict[str, Account], state: JobState, clock: ManualClock
) -> None:
    job = claimed(store, people["ann"])
    assert store.move(job, state, "why", 77)
    ended = store.get(people["ann"], job.id)
    assert (ended.state, ended.ended, ended.error, ended.bytes) == (state, clock.now, "why", 77)
    for following in JobState:
        assert not store.move(job, following)
    assert not store.set_driver(job, "1:1.00")
    assert store.claim(SERVER) is None


def test_the_state_of_another_attempts_or_servers_job_is_not_changed(
    store: JobStore, people: dict[str, Account]
) -> None:
    job = claimed(store, people["ann"])
    assert store.adopt(job, "host/2:2.00/b")
    assert not store.move(job, JobState.DONE)
    adopted = store.get(people["ann"], job.id)
    assert not store.adopt(job, "host/3:3.00/c")
    assert store.move(adopted, JobState.QUEUED)
    again = present(store.claim(SERVER))
    assert (again.attempt, again.driver) == (2, None)
    assert not store.move(adopted, JobState.DONE)
    assert store.move(again, JobState.TRAINING)


def test_cancelling_ends_a_waiting_job_and_requests_the_end_of_a_running_one(
    store: JobStore, people: dict[str, Account]
) -> None:
    waiting = add(store, people["ann"])
    assert store.request_cancel(people["ann"], waiting.id).state is JobState.CANCELLED
    # A second cancellation changes nothing.
    assert store.request_cancel(people["ann"], waiting.id).state is JobState.CANCELLED
    job = claimed(store, people["ann"])
    assert store.request_cancel(people["ann"], job.id).cancel is not None
    assert not store.move(job, JobState.QUEUED)  # No other driver continues the job.
    assert store.move(job, JobState.CANCELLED)
    done = claimed(store, people["ann"])
    store.move(done, JobState.DONE)
    with pytest.raises(StateError, match="is done"):
        store.request_cancel(people["ann"], done.id)


def test_only_an_ended_job_is_removed(store: JobStore, people: dict[str, Account]) -> None:
    job = claimed(store, people["ann"])
    with pytest.raises(StateError):
        store.remove(job)
    store.move(job, JobState.DONE)
    store.remove(job)
    with pytest.raises(NotFoundError):
        store.get(people["ann"], job.id)
    assert add(store, people["ann"]).number > job.number


def test_ended_jobs_are_listed_by_their_age(store: JobStore, people: dict[str, Account], clock: ManualClock) -> None:
    old, waiting = claimed(store, people["ann"]), add(store, people["ann"])
    store.move(old, JobState.FAILED)
    clock.now += 100
    assert [job.id for job in store.ended_before(clock.now)] == [old.id]
    assert store.ended_before(clock.now - 100) == []
    assert waiting.id not in [job.id for job in store.ended_before(clock.now + 1)]


def share(url: str, jobs: set[str]) -> Counter[str]:
    """Return how many of ``jobs`` each of three processes claims; each job is claimed exactly once."""
    context = multiprocessing.get_context("spawn")
    start, taken = context.Event(), context.Queue()
    servers = [context.Process(target=take_all, args=(url, f"host/{place}:1.00/x", start, taken)) for place in range(3)]
    for process in servers:
        process.start()
    start.set()
    found: list[tuple[str, str | None]] = []
    while [job for _, job in found].count(None) < len(servers):
        found.append(taken.get(timeout=patience(60)))
    for process in servers:
        process.join(patience(20))
    ids = [job for _, job in found if job is not None]
    assert sorted(ids) == sorted(jobs)
    return Counter(server for server, job in found if job is not None)


@pytest.mark.slow
def test_servers_of_one_database_do_not_claim_a_job_twice(
    store: JobStore, people: dict[str, Account], engine: Engine
) -> None:
    jobs = {add(store, people[name]).id for name in ("ann", "ben") for _ in range(15)}
    share(engine.url.render_as_string(hide_password=False), jobs)


@pytest.mark.usefixtures("sqlite_files")
def test_a_thousand_jobs_are_listed_by_an_index(store: JobStore, people: dict[str, Account], engine: Engine) -> None:
    """Check that no query scans rows that it does not show; a manual measurement is well under a second."""
    with engine.connect() as connection:
        for condition in ("user_id = 2", "state = 'queued'"):
            query = f"EXPLAIN QUERY PLAN SELECT * FROM distkeras_jobs WHERE {condition} ORDER BY number DESC LIMIT 9"
            plan = " ".join(row[3] for row in connection.exec_driver_sql(query))
            assert "USING INDEX distkeras_jobs_by_" in plan
            assert "TEMP B-TREE" not in plan
