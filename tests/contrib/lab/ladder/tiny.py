"""A ladder of three sizes and two horizons whose runs take a second each."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny import KEPT_TOKENS

#: The model that is predicted: heads of 8, 32 wide.
FILE = """
[model]
name = "llama3"
flavor = "debugmodel"
[model.overrides]
dim = 32
n_layers = 4
n_heads = 4
ffn_dim = 96
[optimizer]
lr = 1e-3
[training]
batch_size = 4
global_batch_size = 8
seq_len = 16
steps = 200
warmup_steps = 20
mixed_precision_param = "float32"
seed = 5
[lr_scheduler]
decay_ratio = 0.5
[validation]
enable = true
steps = 2
batch_size = 2
[metrics]
log_freq = 1
[ladder]
sizes = [20_000, 40_000, 63_000]
tokens_per_parameter = [0.02, 0.04]
decay_ratio = 0.5
"""
FLAGS = (KEPT_TOKENS,)
#: Runs in their order, each trunk before its branch.
NAMES = (
    "d8-l2-t0.04",
    "d8-l2-t0.02",
    "d16-l2-t0.04",
    "d16-l2-t0.02",
    "d24-l3-t0.04",
    "d24-l3-t0.02",
)
#: N of each size, and of the target.
PARAMETERS = (20_136, 43_600, 77_928)
TARGET = 127_264


def written(folder: Path, more: str = "") -> Path:
    """The file of the target."""
    file = folder / "target.toml"
    file.write_text(f'job.dump_folder = "{folder / "target"}"\n{FILE}{more}')
    return file
