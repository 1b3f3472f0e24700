"""Temporary: see `titanlite.config.legacy_plans`."""

from titanlite.config.derive import smallest_world as smallest_world
from titanlite.config.legacy_plans import resolve as resolve
