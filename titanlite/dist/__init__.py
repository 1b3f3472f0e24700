"""The processes of a run: environment, process group, store, signals."""

from titanlite import exit_codes


class ParallelismError(ValueError):
    """A setting does not fit the model, machine or ranks; the message says why."""

    exit_code = exit_codes.CONFIG
