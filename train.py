"""Train a model from a TOML file.

torchrun --nproc_per_node 8 train.py --job.config_file train_configs/llama3_8b.toml [--section.key value ...]
"""

import os
import sys
import traceback

from torch.distributed.elastic.multiprocessing.errors import record

from titanlite.app import run


@record
def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    try:
        code = main() or 0
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads sometimes abort a finished process at interpreter exit; everything of ours is closed by now.
    os._exit(code)
