"""Experiments around runs: `titanlite sweep`."""
