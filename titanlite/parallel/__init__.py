"""Divide one training run over ranks and over memory: meshes, FSDP, TP, CP, PP, checkpointing, compilation, float8."""

from titanlite import exit_codes


class ParallelismError(ValueError):
    """A setting of this package does not fit the model, the machine or the ranks; the message says why."""

    exit_code = exit_codes.CONFIG
