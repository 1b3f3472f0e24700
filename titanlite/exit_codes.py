"""What the exit codes of `train.py` and `titanlite` mean.

torchrun masks a worker's code: it ends with 1 whatever the workers returned. `run_llama_train.sh` ends with the
workers' code; the last line of the run's attempts.jsonl has it too.
"""

from __future__ import annotations

#: Everything that was asked for is done.
DONE = 0
#: An error nobody foresaw; its traceback is in the output.
ERROR = 1
#: The configuration, a file it names or the launcher's variables are wrong, the port of rank 0 is taken, or the model
#: cannot be compiled. Nothing was trained.
CONFIG = 2
#: The guard stopped the run: a loss, a gradient or the weights were not finite, or a loss jumped. No bad update was
#: applied but where the weights are named.
GUARD = 3
#: A folder or checkpoint cannot be used: another run is alive in it or it belongs to one, or none in it is valid.
CHECKPOINT = 4
#: Asked to stop by a signal, and nothing is lost: all that was trained is in a checkpoint. The same command goes on.
PREEMPTED = 5
#: Asked to stop by a signal, but the last steps are not in a checkpoint: checkpoints are off, or the save failed.
PREEMPTED_UNSAVED = 6
#: Another rank raised, or a collective failed on this one: another has ended, hangs or cannot be reached. The cause is
#: there.
LOST_PEER = 7
#: Ended at once by a second Ctrl-C.
INTERRUPTED = 130


def code_of(error: BaseException) -> int:
    """The exit code of a run that ended by `error`."""
    from titanlite.checkpoint import CheckpointError
    from titanlite.config.errors import ConfigError
    from titanlite.data.errors import DataError
    from titanlite.guard import BadStepError
    from titanlite.models.shapes import ShapeError
    from titanlite.observe.stalls import PeerError
    from titanlite.parallel.compile import CompileError
    from titanlite.parallel.environment import WorldError
    from titanlite.parallel.flight_recorder import is_of_collectives
    from titanlite.parallel.meeting import MeetingError
    from titanlite.preempt import Preempted
    from titanlite.runs.lock import LockedError

    if isinstance(error, Preempted):
        return PREEMPTED if error.saved else PREEMPTED_UNSAVED
    kinds: dict[int, tuple[type[BaseException], ...]] = {
        CONFIG: (CompileError, ConfigError, DataError, ShapeError, WorldError),
        GUARD: (BadStepError,),
        CHECKPOINT: (CheckpointError, LockedError),
        LOST_PEER: (PeerError, MeetingError),
        INTERRUPTED: (KeyboardInterrupt,),
    }
    known = next((code for code, types in kinds.items() if isinstance(error, types)), None)
    if known is not None:
        return known
    return LOST_PEER if is_of_collectives(error) else ERROR
