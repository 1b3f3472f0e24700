"""What the exit codes of `train.py` and `titanlite` mean.

torchrun masks a worker's code: it ends with 1 whatever the workers returned. Start one process, or read the last
lines of rank 0, to learn more.
"""

#: Everything that was asked for is done.
DONE = 0
#: An error nobody foresaw; its traceback is in the output.
ERROR = 1
#: The configuration, or a file it names, is wrong. Nothing was started.
CONFIG = 2
#: The guard stopped the run: a loss or a gradient was not finite. The weights are those of the step before.
GUARD = 3
#: A folder or checkpoint cannot be used: it belongs to another run, or none in it is valid.
CHECKPOINT = 4
