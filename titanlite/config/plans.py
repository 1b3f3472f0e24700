"""Temporary: see `titanlite.config.legacy_plans`."""

from titanlite.config.legacy_plans import *  # noqa: F403
