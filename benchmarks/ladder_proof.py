"""Does a ladder of five small models predict a sixth, more than four times larger? On the bundled
text, without a GPU.

    python benchmarks/ladder_proof.py [--out FOLDER]

It runs `titanlite ladder` on the file below, then trains the file itself, and compares its
validation loss with the prediction. Two cores need about half an hour. The longest run of the
ladder reads the text 1.8 times, the file 1.04 times. All horizons of the ladder and the length
of the file lie between 0.16 and 4.3 million tokens, so only parameters and FLOPs are extrapolated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

FILE = """
[job]
dump_folder = "{folder}/file"
[model]
name = "llama3"
flavor = "debugmodel"
[model.overrides]
dim = 96
n_layers = 3
n_heads = 12
ffn_dim = 288
[optimizer]
lr = 4e-3
[training]
dataset = "c4_test"
batch_size = 24
global_batch_size = 24
seq_len = 128
steps = 800
warmup_steps = 24
mixed_precision_param = "float32"
seed = 0
[activation_checkpoint]
mode = "none"
[lr_scheduler]
decay_ratio = 0.2
[validation]
enable = true
freq = 800
batch_size = 16
seq_len = 128
[metrics]
log_freq = 100
[ladder]
sizes = [20_000, 43_000, 69_000, 100_000, 134_000]
tokens_per_parameter = [8, 16, 32]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/ladder_proof"))
    arguments = parser.parse_args()
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "file.toml"
    file.write_text(FILE.format(folder=folder))
    titanlite = [sys.executable, "-m", "titanlite"]
    subprocess.run([*titanlite, "ladder", str(file)], check=True)
    subprocess.run([*titanlite, "train", str(file)], check=True, stdout=subprocess.DEVNULL)
    found = json.loads((folder / "file-ladder" / "points.json").read_text())["prediction"]
    rows = map(json.loads, (folder / "file" / "metrics.jsonl").read_text().splitlines())
    measured = [row["validation_loss"] for row in rows if "validation_loss" in row][-1]
    error = 100 * (found["loss"] / measured - 1)
    print(
        f"predicted {found['loss']:.4f} ({found['low']:.4f} to {found['high']:.4f}), measured "
        f"{measured:.4f}: {error:+.2f} %"
    )
    return 0 if abs(error) <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
