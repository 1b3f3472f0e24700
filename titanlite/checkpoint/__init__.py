"""Checkpoints: written by `torch.distributed.checkpoint`, and published by a manifest that is
written last.

`manifest`, `paths`, `retention` and `schedule` import no torch: `titanlite checkpoint` lists and
verifies without it.
"""
