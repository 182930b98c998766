"""The server against its own description: Schemathesis makes up requests from it, good ones and bad ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.job_service import JobService

from distkeras.jobs.server.services import FailureLimit

schemathesis = pytest.importorskip("schemathesis", reason="Schemathesis is not installed: the extra `openapi`")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with JobService(tmp_path_factory.mktemp("service"), failures=FailureLimit(most=10**9)) as service:
        schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
        # What a schema cannot say, such as where data may lie, is refused with 422.
        accepted = schema.config.checks.positive_data_acceptance
        accepted.expected_statuses = [*accepted.expected_statuses, "422"]
        schema.config.update(headers={"Authorization": f"Bearer {service.tokens['admin']}"})
        yield schema


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()  # type: ignore[untyped-decorator]  # it is not always installed
def test_every_answer_is_as_it_is_described(case: Any) -> None:
    case.call_and_validate()
