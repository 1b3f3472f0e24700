"""The sections of the TOML dialect, as strict pydantic models.

A field's `description` is its documentation: `titanlite config explain KEY` prints it.
"""
