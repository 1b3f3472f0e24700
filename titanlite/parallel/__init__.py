"""Processes, meshes and sharding: how one model is spread over ranks."""
