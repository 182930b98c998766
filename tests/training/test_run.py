"""What a job begins before it is settled."""

from __future__ import annotations

from support.patience import patience
from support.present import present

from distkeras.settings import TrainSettings
from distkeras.training.run import server_ahead


def test_a_server_that_no_job_needs_is_gone() -> None:
    with server_ahead(TrainSettings()) as child:
        ahead = present(child)
        assert ahead.exit_code is None
    assert ahead.wait(patience(10))


def test_a_server_in_the_cluster_has_none() -> None:
    with server_ahead(TrainSettings(server="cluster")) as child:
        assert child is None
