"""Temporary: see `titanlite.config.legacy_plans`."""

from titanlite.config.legacy_plans import checked_plans, load_plans, model_args, resolve_plans  # noqa: F401
