"""Tensors of checkpoints without a process group.

Reads them, and compares two checkpoints. Compares logits before and after a conversion: of
titanlite's model, and of `transformers` where it is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint.dcp_files import CheckedReader
from titanlite.checkpoint.hf_files import HF_CONFIG
from titanlite.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from titanlite.checkpoint.source_model import read_json
from titanlite.checkpoint.store_paths import AnyPath
from titanlite.features.float8.package import torchao
from titanlite.models import get_spec
from titanlite.models.hf import read_config
from titanlite.models.spec import ModelSpec
from titanlite.utils import human_bytes, pip_install

_NO_TRANSFORMERS = f"transformers is not installed: {pip_install('transformers')}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide DCP's warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        yield


class Contents:
    """Reads the tensors of one checkpoint."""

    def __init__(self, folder: AnyPath, manifest: Manifest | None = None) -> None:
        """Raises CheckpointError when it is not a valid checkpoint.

        manifest: of one that is not published yet.
        """
        self.folder = folder
        self.manifest: Manifest = manifest or read_manifest(folder)
        self._reader = CheckedReader(folder, self.manifest)
        self._reader.read_metadata()

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU. Raises CheckpointError when it cannot be read."""
        return self.read_all([name])[name]

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return whole tensors on the CPU by name, in one pass: faster than a `read` of each.

        Raises CheckpointError.
        """
        state = {}
        for name in names:
            dtype, shape = self.manifest.tensors[name]
            state[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        try:
            with quiet():
                dcp.load(state, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, Exception) as error:
            what = names[0] if len(names) == 1 else f"one of {len(names)} tensors"
            raise CheckpointError(
                f"{what} cannot be read from {self.folder}: {error!r}; `titanlite checkpoint "
                f"verify {self.folder}` tells which file is damaged"
            ) from error
        return state


class TensorDifference(NamedTuple):
    """How one tensor differs: `left`, `right` are [dtype, shape], None if there is no such
    tensor.
    """

    name: str
    left: list[Any] | None
    right: list[Any] | None
    #: Elements that differ (NaNs do not), and their largest difference, where both sides are alike
    #: in type and shape.
    elements: int = 0
    largest: float = 0.0


def compare(left: Contents, right: Contents) -> Iterator[TensorDifference]:
    """Return one entry per tensor of either, also of equal ones, by name."""
    ours = left.manifest.tensors
    theirs = right.manifest.tensors
    for name in sorted({*ours, *theirs}):
        found = TensorDifference(name, ours.get(name), theirs.get(name))
        if found.left == found.right:
            a, b = left.read(name), right.read(name)
            differ = ~torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
            if differ.any():
                largest = torch.dist(a[differ].float(), b[differ].float(), math.inf)
                found = found._replace(elements=int(differ.sum()), largest=largest.item())
        yield found


#: Tokens of the sample.
TOKENS = 64
#: Largest relative difference |a - b| / |b| of the logits, as vectors, computed in float32.
TOLERANCE = 1e-4
Read = Callable[[str], torch.Tensor]


def compare_logits(family: str, args: Any, read: Read, folder: Path) -> str:
    """Return a line that compares logits of random tokens. Raises CheckpointError.

    read: our name → tensor. folder: the same weights, as Hugging Face's.
    """
    shape = (1, min(TOKENS, args.max_seq_len))
    sample = torch.randint(args.vocab_size, shape, generator=torch.Generator())
    if reason := _cannot(family, args):
        return f"logits are not compared: {reason}"
    ours = our_logits(family, args, read, sample)
    try:
        with torch.no_grad():
            other = read_transformers(folder)(sample).logits
    except Exception as error:  # of any of its parts
        raise CheckpointError(f"transformers cannot read {folder}: {error}") from error
    if ours.shape != other.shape:
        raise CheckpointError(
            f"the logits of transformers have another shape: {list(other.shape)}, "
            f"{list(ours.shape)} here"
        )
    gap = (torch.linalg.norm(ours - other) / torch.linalg.norm(other)).item()
    line = (
        f"logits of {sample.numel()} tokens, compared with those of transformers: they differ by "
        f"{gap:.1e}"
    )
    if not gap <= TOLERANCE:
        raise CheckpointError(f"{line}, more than {TOLERANCE:.0e}: nothing is published")
    return line


def compare_ids(tokenizer: str, folder: Path) -> str:
    """Return a line that compares `AutoTokenizer`'s ids of sample texts with titanlite's.

    folder: an exported one. tokenizer: path of the run's. Raises CheckpointError when ids differ,
    unless `transformers` takes its own class for such a model.
    """
    from titanlite.data import DataError
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.data.tokenizer.hf_export import SAMPLES, differing_ids, other_class

    try:
        ours = load_tokenizer(tokenizer)
    except DataError as error:
        return f"ids of texts are not compared: {error}"
    if importlib.util.find_spec("transformers") is None:
        return f"ids of texts are not compared: {_NO_TRANSFORMERS}"
    line = f"ids of {len(SAMPLES)} texts, compared with those of AutoTokenizer"
    if found := differing_ids(folder, ours):
        shown = "".join(f"\n  {one}" for one in found[:5])
        with contextlib.suppress(Exception):  # it cannot be read at all
            if taken := other_class(folder):
                return (
                    f"{line}: {len(found)} differ, as transformers takes {taken} for every such "
                    f"model:{shown}"
                )
        raise CheckpointError(
            f"{line}: {len(found)} differ, and nothing is published:{shown}\n"
            "--unchecked writes the folder without this comparison"
        )
    return f"{line}: they are equal"


def empty_model(spec: ModelSpec, args: Any, device: torch.device | str = "cpu") -> nn.Module:
    """Return a model for evaluation, with the buffers that no checkpoint holds; `fill` does the
    rest.
    """
    model = spec.build_on_meta(args).eval()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
    if callable(getattr(model, "init_buffers", None)):
        model.init_buffers()  # type: ignore[operator]
    return model


def fill(
    model: nn.Module,
    names: Iterable[str],
    read: Read,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Give parameters and buffers of these names their values, in place.

    dtype: of parameters. Buffers keep theirs: RoPE tables and biases of experts need float32.
    """
    filled: dict[torch.Tensor | None, nn.Parameter] = {}  # a tied one once
    for name in names:
        place, _, leaf = name.rpartition(".")
        module = model.get_submodule(place)
        buffer = module._buffers.get(leaf)
        if buffer is not None:
            module._buffers[leaf] = read(name).to(device, buffer.dtype)
            continue
        empty = module._parameters[leaf]
        if empty not in filled:
            filled[empty] = nn.Parameter(read(name).to(device, dtype), requires_grad=False)
        module._parameters[leaf] = filled[empty]


def our_logits(family: str, args: Any, read: Read, tokens: torch.Tensor) -> torch.Tensor:
    """Return titanlite's logits [1, seq, vocab] in float32."""
    model = empty_model(get_spec(family), args)
    with torch.no_grad():
        fill(model, list(model.state_dict()), read)
        logits: torch.Tensor = model(tokens)
    return logits.float()


def _cannot(family: str, args: Any) -> str:
    """Return why `transformers` cannot compute the logits; "": it can."""
    if importlib.util.find_spec("transformers") is None:
        return _NO_TRANSFORMERS
    # 4 bytes of float32, and a part of it once more.
    needed = 5 * get_spec(family).count_parameters(args)
    available = needed
    # macOS has no such file: there it is tried.
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if "MemAvail" in line:
                available = 1024 * int(line.split()[1])
    if available >= needed:
        return ""
    return (
        f"transformers would need {human_bytes(needed)} of memory, {human_bytes(available)} are "
        "free"
    )


def read_transformers(folder: Path) -> Any:
    """Return the model of a folder, which may be of somebody else, by `transformers`, in float32.

    No code of it runs: files in `auto_map` stay unread, and kernels in config.json are not fetched.
    """
    if importlib.util.find_spec("torchao") is not None:
        torchao()  # without the lines that it logs when `transformers` imports it
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    content = read_json(folder / HF_CONFIG)
    text = content.get("text_config")
    if "vocab_size" not in content and isinstance(text, dict):
        content = text
    options = {"config": read_config(content), "dtype": "auto", "local_files_only": True}
    options["trust_remote_code"] = False
    read = AutoModelForCausalLM.from_pretrained
    try:
        model = read(folder, attn_implementation="sdpa", **options)
    except ValueError:  # some models have only their own attention
        model = read(folder, attn_implementation="eager", **options)
    return model.float().eval()
