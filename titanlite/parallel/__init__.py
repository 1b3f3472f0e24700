"""Divide one training run over ranks and over memory: meshes, FSDP, TP, CP, PP, checkpointing,
compilation, float8.
"""

from importlib.metadata import version

from titanlite import exit_codes
from titanlite.config.sections import ActivationCheckpoint, Experimental, Float8


class ParallelismError(ValueError):
    """A setting of this package does not fit the model, the machine or the ranks; the message says
    why.
    """

    exit_code = exit_codes.CONFIG


def compiles_halves(ac: ActivationCheckpoint, float8: Float8, experimental: Experimental) -> bool:
    """Whether `torch.compile` needs halves of tensor-parallel blocks: always before torch 2.13."""
    by_op = ac.mode == "selective" and ac.selective_ac_option == "op"
    untested = (
        ac.offload or float8.enable_float8_linear or experimental.enable_async_tensor_parallel
    )
    return untested or not (by_op or ac.mode == "none") or version("torch") < "2.13"
