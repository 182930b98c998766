"""The server process that starts while the driver still plans the job."""

from __future__ import annotations

from support.patience import patience
from support.present import present

from distkeras.settings import TrainSettings
from distkeras.training.run import early_server


def test_an_unused_server_process_ends() -> None:
    with early_server(TrainSettings()) as child:
        ahead = present(child)
        assert ahead.exit_code is None
    assert ahead.wait(patience(10))


def test_no_process_starts_for_a_server_in_the_cluster() -> None:
    with early_server(TrainSettings(server="cluster")) as child:
        assert child is None
