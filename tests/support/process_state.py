"""What a job of a pooled rank may change for the whole process, put back before the next one.

So no test depends on those that ran before it in the same process.
"""

from __future__ import annotations

import gc
import os
import random
import sys

import numpy as np
import torch

from titanlite.utils import logger


class ProcessState:
    """The state when it is made, which `restore` puts back.

    Whatever it was, `restore` switches garbage collection and gradients on, and deterministic
    algorithms and the default device off.

    Dynamo forgets all that it compiled: it counts how many times it compiled a function, and gives
    up at a limit.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        # A path may be gone by then.
        self._folder = os.open(".", os.O_RDONLY)
        self._path = list(sys.path)
        self._handlers = list(logger.handlers)
        self._level = logger.level
        self._generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self._dtype = torch.get_default_dtype()
        self._precision = torch.get_float32_matmul_precision()
        self._threads = torch.get_num_threads()

    def restore(self) -> None:
        """Make all as it was."""
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        os.fchdir(self._folder)
        sys.path[:] = self._path
        logger.handlers[:] = self._handlers
        logger.setLevel(self._level)
        gc.enable()
        self._restore_torch()

    def _restore_torch(self) -> None:
        of_python, of_numpy, of_torch = self._generators
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        torch.set_default_dtype(self._dtype)
        torch.set_default_device(None)
        torch.set_float32_matmul_precision(self._precision)
        torch.set_num_threads(self._threads)
        torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
            config = torch._dynamo.config
            # `titanlite.assembly.phase_resize` raises it.
            config.recompile_limit = config._config["recompile_limit"].default
