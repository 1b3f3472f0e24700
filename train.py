"""Train a model from a TOML file.

torchrun --nproc_per_node 8 train.py --job.config_file train_configs/llama3_8b.toml [--section.key value ...]
"""

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from titanlite.app import run


@record
def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    code = main() or 0
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads sometimes abort a finished process at interpreter exit; everything of ours is closed by now.
    os._exit(code)
