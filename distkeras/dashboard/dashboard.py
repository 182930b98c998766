"""A page of some jobs of this process, served on loopback, shown in a notebook, or saved as a file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, finalize

from distkeras.callbacks import Callback, CallbackContext, TrainingSetup
from distkeras.dashboard.journal import read_since
from distkeras.dashboard.listener import PageListener
from distkeras.dashboard.page import saved_page
from distkeras.dashboard.watch import JobWatch
from distkeras.ps.errors import LocalProtocolError

if TYPE_CHECKING:
    from distkeras.results.job_results import JobResults
    from distkeras.trainer import Trainer

#: The page of each trainer that has one.
_PAGES: WeakKeyDictionary[Trainer, Dashboard] = WeakKeyDictionary()
#: Pixels of the frame in a notebook.
_HEIGHT = 760


class Dashboard(Callback):
    """A callback that shows a trainer's jobs on a live page.

    ::

        dashboard = Dashboard()                              # in a notebook; elsewhere, open its `url`
        trainer.train(df, callbacks=[dashboard])
        dashboard.save("job.html")                           # one file that needs nothing else

    Args:
        watches: of the jobs, in the page's order; the first one is of the jobs that this is a callback of. Default: a
            new one.
        port: of loopback; 0 for one that is free.

    Attributes:
        watches: the same.

    Raises:
        ConfigurationError: the port is taken.
    """

    def __init__(self, watches: Sequence[JobWatch] = (), port: int = 0) -> None:
        self.watches = list(watches) or [JobWatch()]
        super().__init__(every_seconds=self.watches[0].every_seconds)
        self._listener = PageListener(self.watches, port)

    def on_begin(self, setup: TrainingSetup) -> None:
        """See `JobWatch`."""
        self.watches[0].on_begin(setup)

    def on_center(self, context: CallbackContext) -> None:
        """See `JobWatch`."""
        self.watches[0].on_center(context)

    def on_end(self, context: CallbackContext) -> None:
        """See `JobWatch`."""
        self.watches[0].on_end(context)

    def on_success(self, results: JobResults) -> None:
        """See `JobWatch`."""
        self.watches[0].on_success(results)

    def on_failure(self, error: BaseException) -> None:
        """See `JobWatch`."""
        self.watches[0].on_failure(error)

    @property
    def url(self) -> str:
        """Return the page's address for browsers of this machine. Its secret lets anyone read the page."""
        return self._listener.url

    @property
    def closed(self) -> bool:
        """Return whether the page is not served any more."""
        return self._listener.closed

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page as it is now to one HTML file, which needs nothing else, not even a network.

        Raises:
            LocalProtocolError: there is no job yet.
            OSError: the file cannot be written.
        """
        journals = [read_since(watch.path) for watch in self.watches]
        if not any(journals):
            raise LocalProtocolError("a page must have a job to be saved. Received: no training yet")
        target = Path(path)
        target.write_text(saved_page([journal for journal in journals if journal]), encoding="utf-8")
        return target

    def close(self) -> None:
        """Stop serving the page. Saved files stay."""
        self._listener.close()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        """Return a frame with the page, for a notebook, and a link to it."""
        url = escape(self.url)
        return (
            f'<p><a href="{url}" target="_blank" rel="noopener">Open the dashboard</a></p>'
            f'<iframe src="{url}" title="distkeras dashboard" '
            f'style="width: 100%; height: {_HEIGHT}px; border: 1px solid #8888; border-radius: 6px"></iframe>'
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'closed' if self.closed else self.url})"


def dashboard_of(trainers: Sequence[Trainer], port: int = 0) -> Dashboard:
    """Return the page of these trainers' jobs, which ends with the first one; the same page for the same trainers.

    Raises:
        ConfigurationError: the port is taken.
    """
    watches, first = [watch_of(trainer) for trainer in trainers], trainers[0]
    page = _PAGES.get(first)
    if page is None or page.closed or page.watches != watches:
        if page is not None:
            page.close()
        page = _PAGES[first] = Dashboard(watches, port)
        finalize(first, page.close)
    return page


def watch_of(trainer: Trainer) -> JobWatch:
    """Return the callback that writes the journal of a trainer's jobs from now on."""
    for observer in trainer.observers:
        if isinstance(observer, JobWatch):
            return observer
    watch = JobWatch()
    watch.take(trainer.outcome)
    trainer.observers.append(watch)
    return watch
