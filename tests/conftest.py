"""For all tests."""

from __future__ import annotations

import hypothesis

# How long an example takes depends on who else computes; nothing here asserts times.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
