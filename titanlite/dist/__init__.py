"""The processes of a run: environment, process group, store, signals."""

from titanlite import exit_codes


class ParallelismError(ValueError):
    """A setting of this package does not fit the model, the machine or the ranks; the message says
    why.
    """

    exit_code = exit_codes.CONFIG
