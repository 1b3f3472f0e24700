"""torchtitan in an environment of its own, and torchrun for either trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TITAN_VERSION = "0.2.2"
TITAN_PACKAGES = ["torchdata", "tyro", "einops", "tokenizers", "datasets", "tensorboard"]
#: The script that the environment's Python runs.
TITAN_SCRIPT = str(ROOT / "benchmarks" / "torchtitan_cpu.py")
DEFAULT_ENVIRONMENT = ROOT / "benchmarks" / ".torchtitan"


def peer_python(folder: Path) -> str:
    """The Python of torchtitan's environment, made first if it is not complete: the same torch as
    here.
    """
    python = str(folder / "bin" / "python")
    if (folder / "complete").exists():
        return python
    print(f"setting up torchtitan {TITAN_VERSION} in {folder}", flush=True)
    import torch

    version = torch.__version__.partition("+")[0]
    pip = [python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([*pip, f"torch=={version}", *TITAN_PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", f"torchtitan=={TITAN_VERSION}"], check=True)
    (folder / "complete").touch()
    return python


def torchrun(python: str, ranks: int, script: str, arguments: list[str]) -> list[str]:
    launch = [
        python,
        "-u",
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(ranks),
        "--rdzv_backend",
        "c10d",
    ]
    return [
        *launch,
        "--rdzv_endpoint",
        "localhost:0",
        "--local-ranks-filter",
        "0",
        "--tee",
        "3",
        script,
        *arguments,
    ]


def write_tokenizer(folder: Path) -> Path:
    """Write the bundled tokenizer as a new folder that torchtitan reads, and return the folder."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    from titanlite.data.tokenizer import BUNDLED_TOKENIZER, load_tokenizer

    ids = load_tokenizer().special_tokens
    special = sorted(ids, key=ids.__getitem__)
    folder.mkdir()
    converter = TikTokenConverter(vocab_file=str(BUNDLED_TOKENIZER), extra_special_tokens=special)
    converter.converted().save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": special[0],
        "eos_token": special[1],
        "add_bos_token": True,
        "add_eos_token": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder
