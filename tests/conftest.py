"""What every test runs under: hypothesis without a wall clock."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("isles", deadline=None)
settings.load_profile("isles")
