"""Shared by the tests of MXFP8."""

from __future__ import annotations

from titanlite.config.sections import Float8

MX = Float8(enable_float8_linear=True, recipe_name="mxfp8", emulate=True)
FLOOR = Float8(enable_float8_linear=True, recipe_name="mxfp8_floor", emulate=True)
