"""Checkpoints: written by `torch.distributed.checkpoint` (DCP), and published by a manifest that is
written last.

- `manager` saves and loads; `trainer_save`, `async_save` and `dcp_files` write shards and read
  them back.
- `manifest` makes a folder a checkpoint; `retention` publishes and deletes; `store_paths` has
  folders and object stores in one form. `schedule` says after which steps a run saves.
- `choice` finds the checkpoint to start from, `load` and `resume` read it, `selection` picks its
  tensors.
- `hf`, `torchtitan`, `foreign_weights` and `mxfp4` read weights of other programs, `hf_save` writes
  them.

`manifest`, `store_paths`, `retention` and `schedule` import no torch.
"""
