"""Speed of text to token ids: tokens per second of one core, from the same files with the same
tokenizer.

    python benchmarks/data.py  # titanlite, and a plain loop over a stream of `datasets`
    python benchmarks/data.py --versus torchtitan    # and torchtitan 0.2.2's HuggingFaceTextDataset

The files are C4-format .json.gz shards of the bundled text. Each contestant runs in a process of
its own, all in turn in every repeat, and the first one changes. The time starts after imports and
the tokenizer's load, and ends with the last id. Its processor time counts all threads. All
contestants must give the same first ids.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peer import DEFAULT_ENVIRONMENT, ROOT, peer_python, write_tokenizer

SEQ_LEN = 2048
#: All contestants must agree on so many ids.
COMPARED = 100_000

#: A generator that first loads what it needs and yields an empty array, then yields arrays of ids
#: in file order.
Contestant = Callable[[list[Path], Path], Iterator[Any]]


def titanlite_files(shards: list[Path], tokenizer: Path, workers: int = 0) -> Iterator[Any]:
    """The text that a run tokenizes at its start."""
    import numpy as np

    from titanlite.data.tokenize_files import tokenize
    from titanlite.data.tokenizer import load_tokenizer

    ours = load_tokenizer(str(tokenizer))
    yield np.empty(0, np.int64)
    yield tokenize(shards, ours, ours.vocab_size, workers).tokens


def titanlite_all_cores(shards: list[Path], tokenizer: Path) -> Iterator[Any]:
    yield from titanlite_files(shards, tokenizer, workers=os.cpu_count() or 1)


def titanlite_tiktoken(shards: list[Path], tokenizer: Path) -> Iterator[Any]:
    """The same ids from the tokenizer's other form, for the bundled tokenizer only."""
    yield from titanlite_files(
        shards, ROOT / "titanlite" / "data" / "assets" / "tokenizer.tiktoken"
    )


def titanlite_stream(shards: list[Path], tokenizer: Path) -> Iterator[Any]:
    """One pass over text that is read while training, in file order like the others."""
    import numpy as np

    from titanlite.config.data_sections import Data
    from titanlite.config.sections import Training
    from titanlite.data.dataset_builder import TextReader
    from titanlite.data.tokenizer import load_tokenizer

    ours = load_tokenizer(str(tokenizer))
    yield np.empty(0, np.int64)
    data = Data(streaming=True, shuffle=False, lanes=1, num_workers=0)
    training = Training(dataset_path=str(shards[0].parent), seq_len=SEQ_LEN)
    rows = TextReader(data, ours, ours.vocab_size).train(training)
    number = 0
    while not number or rows.state_dict()["cursors"][0][2] == 0:  # the lane's epoch
        yield rows.sequence(number).tokens
        number += 1


def datasets_loop(shards: list[Path], tokenizer: Path) -> Iterator[Any]:
    """The loop that one writes by hand."""
    import numpy as np
    import torch  # noqa: F401  # load_dataset imports it, and imports are not timed
    from datasets import load_dataset
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    names = json.loads((tokenizer / "tokenizer_config.json").read_text())
    bos, eos = (library.token_to_id(names[key]) for key in ("bos_token", "eos_token"))
    yield np.empty(0, np.int64)
    stream = load_dataset(
        "json", data_files=[str(shard) for shard in shards], split="train", streaming=True
    )
    for row in stream:
        ids = library.encode(row["text"], add_special_tokens=False).ids
        yield np.array([bos, *ids, eos], dtype=np.int64)


def torchtitan(shards: list[Path], tokenizer: Path) -> Iterator[Any]:
    """torchtitan's data set over the same stream; its last sequence is cut off."""
    import numpy as np
    from torchtitan_cpu import stand_in_for_triton

    stand_in_for_triton()
    from datasets import load_dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

    def load(path: str) -> Any:
        return load_dataset(
            "json", data_files=[str(shard) for shard in shards], split="train", streaming=True
        )

    DATASETS["bench"] = DatasetConfig(
        path="", loader=load, sample_processor=lambda sample: sample["text"]
    )
    theirs = HuggingFaceTokenizer(str(tokenizer))
    yield np.empty(0, np.int64)
    for inputs, labels in HuggingFaceTextDataset("bench", None, theirs, seq_len=SEQ_LEN):
        # Windows of SEQ_LEN + 1 ids do not overlap: together they are the stream.
        yield np.append(inputs["input"].numpy(), labels[-1].item())


CONTESTANTS: dict[str, Contestant] = {
    "titanlite": titanlite_files,
    "titanlite, all cores": titanlite_all_cores,
    "titanlite, tiktoken ranks": titanlite_tiktoken,
    "titanlite, stream": titanlite_stream,
    "datasets loop": datasets_loop,
    "torchtitan": torchtitan,
}


def run_here(name: str, shards: list[Path], tokenizer: Path) -> None:
    """Run a contestant in this process and print what it did as JSON."""
    arrays = CONTESTANTS[name](shards, tokenizer)
    first = [next(arrays)]
    wall, processor = time.perf_counter(), time.process_time()
    first += arrays
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    import numpy as np

    ids = np.concatenate(first).astype(np.int64)
    digest = hashlib.sha256(ids[:COMPARED].tobytes()).hexdigest()
    print(json.dumps({"tokens": len(ids), "wall": wall, "cpu": processor, "ids": digest}))


def measure(
    name: str, python: str, shards: list[Path], tokenizer: Path, home: Path
) -> dict[str, Any]:
    """Run a contestant in a process of its own."""
    libraries = {
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [
        python,
        __file__,
        "--contestant",
        name,
        "--files",
        *map(str, shards),
        "--tokenizer",
        str(tokenizer),
    ]
    environment = os.environ | libraries | offline | {"PYTHONPATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"{name} failed:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def write_shards(folder: Path, megabytes: float) -> tuple[list[Path], int]:
    """Write the bundled text, again and again, as four C4-format shards.

    Return them and their text in bytes.
    """
    from titanlite.data.text_files import BUNDLED, iter_records

    texts = [record.text for record in iter_records(BUNDLED["c4_test"])]
    size = sum(len(text.encode()) for text in texts)
    times = max(1, round(megabytes * 1e6 / size))
    lines = [json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n" for text in texts]
    part = len(lines) * times / 4
    folder.mkdir()
    shards = [folder / f"c4-train.{k:05d}-of-00004.json.gz" for k in range(4)]
    for k, shard in enumerate(shards):
        with gzip.open(shard, "wt", 6 if times < 10 else 1) as file:
            file.writelines(
                itertools.islice(itertools.cycle(lines), int(k * part), int((k + 1) * part))
            )
    return shards, size * times


def table(runs: dict[str, list[dict[str, Any]]], size: int) -> list[str]:
    """Markdown: medians per contestant, and the ratio to the first one's, repeat by repeat."""
    median = statistics.median
    ours = next(iter(runs.values()))
    lines = [
        (
            "| reader | tokens/s of one core | MB/s of one core | tokens/s, wall | processor time "
            "against titanlite |"
        ),
        "|---|---|---|---|---|",
    ]
    for name, mine in runs.items():
        cpu = median(run["cpu"] for run in mine)
        speed, wall = (
            median(run["tokens"] / run[clock] for run in mine) for clock in ("cpu", "wall")
        )
        cost = [run["cpu"] / other["cpu"] for run, other in zip(mine, ours, strict=True)]
        spread = f"{median(cost):.2f} ({min(cost):.2f}–{max(cost):.2f})"
        lines.append(f"| {name} | {speed:,.0f} | {size / 1e6 / cpu:.1f} | {wall:,.0f} | {spread} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versus", choices=["torchtitan"], help="also run this trainer's reader")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=24, help="of text")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="with tokenizer.json; default: the bundled one",
    )
    parser.add_argument(
        "--peer-environment", type=Path, default=DEFAULT_ENVIRONMENT, metavar="FOLDER"
    )
    parser.add_argument("--out", type=Path, help="write FILE.md and FILE.json", metavar="FILE")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--files", type=Path, nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        return run_here(arguments.contestant, arguments.files, arguments.tokenizer)

    pythons = dict.fromkeys(CONTESTANTS, sys.executable)
    if arguments.tokenizer:
        del pythons["titanlite, tiktoken ranks"]
    if arguments.versus:
        pythons["torchtitan"] = peer_python(arguments.peer_environment)
    else:
        del pythons["torchtitan"]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shards, size = write_shards(folder / "text", arguments.megabytes)
        tokenizer = arguments.tokenizer or write_tokenizer(folder / "tokenizer")
        for repeat in range(arguments.repeats):
            for name in list(pythons)[:: -1 if repeat % 2 else 1]:
                runs[name].append(measure(name, pythons[name], shards, tokenizer, folder / "home"))
            print(
                f"repeat {repeat + 1}: "
                + ", ".join(f"{n} {r[-1]['cpu']:.2f} CPU s" for n, r in runs.items()),
                flush=True,
            )
    if len({run["ids"] for mine in runs.values() for run in mine}) > 1:
        raise SystemExit(f"the contestants gave different ids: {runs}")
    from throughput import hardware

    head = (
        f"{hardware()}; {size / 1e6:.0f} MB of text in 4 .json.gz files; {arguments.repeats} "
        "repeats, medians."
    )
    lines = [head, "", *table(runs, size)]
    print("\n".join(["", *lines]))
    if arguments.out:
        arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
        record = {"hardware": hardware(), "command": sys.argv, "runs": runs}
        arguments.out.with_suffix(".json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
