"""A worker's first word to the server, over a connection that breaks."""

from __future__ import annotations

import pytest
from support.running_server import Running

from distkeras.ps.protocol.messages import FetchModel, ModelFile
from distkeras.ps.rules import make

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("finished", [False, True])
def test_a_connection_that_breaks_before_the_answer_is_made_again(finished: bool) -> None:
    with Running(make("downpour"), workers=1) as running:
        holder = running.client()
        holder.join()
        if finished:
            holder.leave()
        holder.close()
        late = running.client(attempt=1)
        late.request(FetchModel(), ModelFile)
        assert late.channel is not None
        late.channel.hang_up()
        welcome = late.join()
        assert (welcome.finished, welcome.held) == (finished, False)
        late.close()
