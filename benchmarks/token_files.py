"""Speed of token files: `python benchmarks/data.py --tokens`.

Batches of each form of file are compared with the loop of nanoGPT: a numpy map, slices of it at
places that are known before, and two tensors. titanlite also finds the places (its mixed order) and
compares each id with the vocabulary. The second loop over the map finds the same places. All take
turns in every repeat.

The last figure is the time from the config's path to the first batch of a sparse file of 10 GB, in
a process of its own, without imports.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from peer import ROOT

#: Tokens of a batch, and batches in each repeat.
BATCH_TOKENS = 32_768
BATCHES = 200
SPARSE_BYTES = 10_000_000_000

_FIRST_BATCH = """
import sys, time
import numpy, torch
import titanlite.data.foreign.opening
from titanlite.config.data_sections import Data
from titanlite.config.sections import Training
from titanlite.data.loader import TrainLoader
from titanlite.data.text import build_dataset
from titanlite.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer()
began = time.perf_counter()
training = Training(dataset_path=sys.argv[1], seq_len=2048)
rows = build_dataset(training, Data(token_dtype="uint16"), tokenizer, tokenizer.vocab_size)
TrainLoader(rows, 16, 16).next_step()
print(time.perf_counter() - began)
"""


def write_forms(folder: Path, tokens: int) -> dict[str, Path]:
    """Write the same ids in several forms; return the file of each."""
    import numpy as np

    from titanlite.data.tokenizer import load_tokenizer

    ids = np.random.default_rng(0).integers(0, 2000, tokens).astype("<u2")
    ids[999::1000] = load_tokenizer().eos_id
    files = {
        "raw": folder / "raw.bin",
        "llm.c": folder / "llmc.bin",
        "datatrove": folder / "a.ds",
        "numpy": folder / "a.npy",
    }
    ids.tofile(files["raw"])
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    files["llm.c"].write_bytes(header.tobytes() + ids.tobytes())
    ids.tofile(files["datatrove"])
    Path(f"{files['datatrove']}.index").write_bytes(np.array([tokens], "<u8").tobytes())
    np.save(files["numpy"], ids)
    return files


def map_loop(file: Path, seq_len: int, places: Iterable[int]) -> None:
    """Make the batches as nanoGPT does."""
    import numpy as np
    import torch

    size = BATCH_TOKENS // seq_len
    tokens = np.memmap(file, dtype=np.uint16, mode="r")
    left = iter(places)
    for _ in range(BATCHES):
        inputs = []
        labels = []
        for place in itertools.islice(left, size):
            inputs.append(torch.from_numpy(tokens[place : place + seq_len].astype(np.int64)))
            following = tokens[place + 1 : place + 1 + seq_len]
            labels.append(torch.from_numpy(following.astype(np.int64)))
        torch.stack(inputs)
        torch.stack(labels)


def measure(files: dict[str, Path], seq_len: int, repeats: int) -> dict[str, list[float]]:
    """Return the processor time of each contestant's batches, by repeat."""
    from titanlite.config.data_sections import Data
    from titanlite.config.sections import Training
    from titanlite.data.loader import TrainLoader
    from titanlite.data.text import build_dataset
    from titanlite.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer()
    size = BATCH_TOKENS // seq_len
    contestants: dict[str, Callable[[], None]] = {}
    places: list[int] = []

    def loop() -> None:
        map_loop(files["raw"], seq_len, places)

    def loop_in_order() -> None:
        order = (rows.window(index) * seq_len for index in range(size * BATCHES))
        map_loop(files["raw"], seq_len, order)

    contestants["map"] = loop
    contestants["map, in titanlite's order"] = loop_in_order
    for name, file in files.items():
        training = Training(dataset_path=str(file), seq_len=seq_len)
        rows: Any = build_dataset(training, Data(), tokenizer, tokenizer.vocab_size)
        places = [rows.window(index) * seq_len for index in range(size * BATCHES)]

        def serve(rows: Any = rows) -> None:
            loader = TrainLoader(rows, size, size)
            for _ in range(BATCHES):
                loader.next_step()

        contestants[name] = serve
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for name in list(contestants)[:: -1 if repeat % 2 else 1]:
            began = time.process_time()
            contestants[name]()
            # The first repeat fills the page cache.
            if repeat:
                found[name].append(time.process_time() - began)
    return found


def first_batch(folder: Path, repeats: int) -> list[float]:
    """Return seconds to the first batch of a sparse file, by process."""
    file = folder / "sparse.bin"
    with open(file, "wb") as stream:
        stream.truncate(SPARSE_BYTES)
    found: list[float] = []
    for _ in range(repeats):
        command = [sys.executable, "-c", _FIRST_BATCH, str(file)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found.append(float(done.stdout.split()[-1]))
    return found


def run(repeats: int, tokens: int = 50_000_000) -> None:
    """Print the table."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        files = write_forms(Path(scratch), tokens)
        for seq_len in (2048, 8192):
            times = measure(files, seq_len, repeats)
            print(f"| seq_len {seq_len} | tokens/s of one core | processor time against the map |")
            print("|---|---|---|")
            for name, mine in times.items():
                ratios = [own / plain for own, plain in zip(mine, times["map"], strict=True)]
                speed = BATCH_TOKENS * BATCHES / statistics.median(mine)
                spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
                print(f"| {name} | {speed:,.0f} | {statistics.median(ratios):.2f} ({spread}) |")
        seconds = first_batch(Path(scratch), repeats)
    print(
        f"first batch of a sparse file of {SPARSE_BYTES / 1e9:.0f} GB: "
        f"{statistics.median(seconds):.3f} s ({min(seconds):.3f}–{max(seconds):.3f})"
    )
