"""For all tests."""

from __future__ import annotations

import hypothesis
import pytest

# How long an example takes depends on who else computes; nothing here asserts times.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

#: Folders of tests that start whole programs. Last, one of them would keep one process busy while another idles.
LONGEST = ("notebooks", "scripts", "spark")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.parent.name, len(ranks)))
