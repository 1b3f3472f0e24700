"""Weights of checkpoints and of other programs as folders of Hugging Face's or PEFT's.

A few tensors are in memory at a time, or one file of Hugging Face's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from titanlite import doors
from titanlite.checkpoint.foreign_formats import open_weights
from titanlite.checkpoint.foreign_weights import on_meta
from titanlite.checkpoint.hf_files import (
    HF_CONFIG,
    hf_form,
    holds_adapters,
    holds_weights,
    is_torchtitan,
)
from titanlite.checkpoint.hf_save import (
    SHARD_BYTES,
    new_folder,
    plan_files,
    refuse_existing,
    write_configs,
    write_files,
)
from titanlite.checkpoint.loaded import AVERAGE, WEIGHT
from titanlite.checkpoint.manifest import (
    FILE,
    CheckpointError,
    Manifest,
    Progress,
    check_files,
    refuse_older,
    step_of,
)
from titanlite.checkpoint.selection import DTYPE, compare_entries, difference_table
from titanlite.checkpoint.state_dict import converted, describe
from titanlite.checkpoint.store_paths import AnyPath
from titanlite.cli.checkpoint_folders import checkpoint_of
from titanlite.cli.hub.compare_checkpoints import Contents, compare_ids, compare_logits
from titanlite.config.trust import Origin, foreign
from titanlite.data.tokenizer.export_files import hf_files
from titanlite.features.lora.settings import RECORD
from titanlite.models import get_spec
from titanlite.models.recorded_args import from_record
from titanlite.models.spec import ModelSpec, ShapeError
from titanlite.utils import human_bytes

if TYPE_CHECKING:
    from titanlite.features.lora.merged_weights import AdapterFiles

Format = Literal["hf", "peft"]


class ModelOf(NamedTuple):
    """The model of weights, and where its tokenizer is, by a config."""

    spec: ModelSpec
    args: Any
    tokenizer: str | None


@dataclass(frozen=True)
class Source:
    """The weights of one model, under our names. `read(name)` returns a whole tensor on the CPU."""

    path: AnyPath
    family: str
    args: Any
    #: Steps that it was trained for; 0: unknown.
    step: int
    #: Name → a tensor of that type and shape on the meta device.
    empty: Mapping[str, torch.Tensor]
    read: Callable[[str], torch.Tensor]
    #: Manifest of a checkpoint; None: the source is none.
    manifest: Manifest | None = None
    #: A folder that `transformers` reads.
    is_hf: bool = False
    #: `max_position_embeddings` of a config.json that the weights come from.
    context: int | None = None
    #: Folder of the files of its tokenizer; None: unknown.
    tokenizer: str | None = None
    #: The adapters that the weights are merged with; None: there are none.
    adapters: AdapterFiles | None = None

    def converted(self, dtype: str | None, progress: Progress) -> Source:
        """Return the weights in another precision (None: as they are), with progress when read."""
        empty = self.empty
        if dtype:
            empty = {name: converted(name, tensor, dtype) for name, tensor in empty.items()}
        done = 0
        total = sum(tensor.nbytes for tensor in empty.values())

        def read(name: str) -> torch.Tensor:
            nonlocal done
            # The logits take a second reading.
            done = min(done + empty[name].nbytes, total)
            progress(done, total)
            before = self.read(name)
            tensor = before.to(empty[name].dtype)
            if tensor.dtype != before.dtype:
                is_lost = before.isfinite() & ~tensor.isfinite()
                if bool(is_lost.any()):
                    raise CheckpointError(
                        f"{name} has values that {dtype} cannot hold: choose another --dtype"
                    )
            return tensor

        return replace(self, empty=empty, read=read)


def open_source(
    path: AnyPath,
    progress: Progress = lambda done, total: None,
    ema: bool = False,
    trust_code: bool = False,
    base: AnyPath | None = None,
    described: ModelOf | None = None,
) -> Source:
    """Open the weights in `path`; compare every byte of a checkpoint with its hashes first
    (`progress`).

    ema: those of a checkpoint's average (optimizer.ema_decay). trust_code: import code that the
    file names (`titanlite.config.trust`). base: the weights under adapters; None: where the
    adapters say. described: the model of a checkpoint of torchtitan, which does not tell it.

    Raises CheckpointError when it holds no weights, or those of another model than it describes,
    and ConfigError for code that is not trusted.
    """
    if is_torchtitan(path):
        if described is None:
            raise CheckpointError(
                f"{path} is of torchtitan, and does not tell its model: give the TOML file of its "
                "run as `titanlite export --config FILE`"
            )
        source = replace(
            _foreign(path, described.spec, described.args),
            step=step_of(path) or 0,
            tokenizer=described.tokenizer,
        )
    else:
        source = _any_source(path, progress, ema, foreign(trust_code), base)
    refusals = {
        "is not of torchtitan: --config says nothing here": described and not is_torchtitan(path),
        "holds whole weights, no adapters: --base says nothing here": base and not source.adapters,
        "holds no average of the weights: it is no checkpoint of titanlite": ema
        and not source.manifest,
    }
    for refusal, holds in refusals.items():
        if holds:
            raise CheckpointError(f"{path} {refusal}")
    saved = describe(source.empty)
    # A tied head has its own name there.
    model = get_spec(source.family).build_on_meta(source.args)
    wanted = describe(model.state_dict())
    problems = {}
    for name in {*saved, *wanted}:
        problem = compare_entries(saved.get(name), wanted.get(name))
        if problem not in ("", DTYPE):
            problems[name] = problem
    if problems:
        raise CheckpointError(difference_table(problems, saved, wanted, str(path)))
    return source


def _any_source(
    path: AnyPath, progress: Progress, ema: bool, origin: Origin, base: AnyPath | None = None
) -> Source:
    if holds_adapters(path):
        from titanlite.features.lora.merged_weights import base_path, of_peft
        from titanlite.features.lora.peft import base_of

        under = _any_source(base_path(base_of(path), base, path), progress, False, origin)
        return _merged(under, of_peft(path, get_spec(under.family), under.args), under)
    if holds_weights(path):
        return _foreign(path)
    names_step = step_of(path) is not None
    if not names_step:
        refuse_older(path)
    folder = checkpoint_of(path)
    if not names_step:
        refuse_older(folder.parent)
    return _checkpoint(folder, progress, ema, origin, base)


def _checkpoint(
    folder: AnyPath, progress: Progress, ema: bool, origin: Origin, base: AnyPath | None
) -> Source:
    contents = Contents(folder)
    manifest = contents.manifest
    record = manifest.config.get("model")
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{folder} does not say which model it is of. It was written before checkpoints did, "
            "or by a program that "
            'gave no config = {"model": titanlite.models.args.as_record(…)}. Resume the run, and '
            "convert its next one"
        )
    problems = check_files(folder, manifest, progress=progress)
    if problems:
        raise CheckpointError("\n  ".join([f"{folder} is damaged:", *problems]))
    file = folder / FILE
    try:
        family, args = from_record(record, origin, str(file), "config.model.family")
    except (ShapeError, TypeError) as error:
        raise CheckpointError(f"{file}: its model cannot be read: {error}") from None
    prefix = AVERAGE if ema else WEIGHT
    entries = {}
    for name, entry in manifest.tensors.items():
        if name.startswith(prefix):
            entries[name.removeprefix(prefix)] = entry
    if not entries:
        raise CheckpointError(
            f"{folder} holds no average of the weights: its run had no optimizer.ema_decay"
        )
    tokenizer = manifest.config.get("tokenizer")
    found = Source(
        path=folder,
        family=family,
        args=args,
        step=manifest.step,
        empty=on_meta(entries),
        read=lambda name: contents.read(prefix + name),
        manifest=manifest,
        tokenizer=tokenizer.get("path") if isinstance(tokenizer, dict) else None,
    )
    if RECORD not in manifest.config:
        return found
    from titanlite.features.lora.merged_weights import base_path, of_checkpoint

    files = of_checkpoint(folder, manifest, contents.read, prefix)
    place = base_path(files.base, base, files.path)
    if family == "hf" and holds_weights(place):
        # By its config.json it may be of a family of titanlite's, with other names.
        under = _foreign(place, get_spec(family), args)
    else:
        under = _any_source(place, progress, False, origin)
    return _merged(found, files, under)


def _merged(source: Source, files: AdapterFiles, base: Source) -> Source:
    from titanlite.features.lora.merged_weights import merged

    if base.adapters is not None:
        raise CheckpointError(f"{base.path} holds adapters too: name whole weights with --base")
    return replace(
        source,
        path=files.path,
        empty=base.empty,
        read=merged(files, base.read, base.empty),
        is_hf=False,
        context=base.context,
        tokenizer=source.tokenizer or base.tokenizer,
        adapters=files,
    )


def _foreign(path: AnyPath, spec: ModelSpec | None = None, args: Any = None) -> Source:
    """spec, args: of the model; None: by its config."""
    weights = open_weights(path, spec, args)
    weights.check_head()
    has_config = path.is_dir() and (path / HF_CONFIG).is_file()
    return Source(
        path=path,
        family=weights.family,
        args=weights.args,
        step=0,
        empty=on_meta(weights.entries()),
        read=weights.read,
        is_hf=has_config and "quantization_config" not in weights.config,
        context=weights.context,
        tokenizer=str(path if path.is_dir() else path.parent),
    )


def convert(  # noqa: PLR0913
    path: AnyPath,
    target: AnyPath,
    to: Format,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
    ema: bool = False,
    report: Callable[[str], None] | None = None,
    trust_code: bool = False,
    base: AnyPath | None = None,
    described: ModelOf | None = None,
) -> AnyPath:
    """Write the weights in `path` to the folder `target`, of Hugging Face's layout; return it.

    path: one of our checkpoints (or a folder of them), or another program's folder. The target
    appears when it is whole, and nothing is overwritten. dtype: of tensors in floating point, such
    as "bfloat16"; None: as they are. report: takes a line about logits and one about ids, which
    both sides compute; None: neither is compared. ema, trust_code, base, described: as for
    `open_source`. Adapters are merged; with `to = "peft"` they are written alone.

    Raises CheckpointError, also when logits or ids differ; then nothing is published.
    """
    if not isinstance(target, Path):
        raise CheckpointError(
            f"{target}: weights are written to this machine; copy them to the store afterwards"
        )
    refuse_existing(target)
    opened = open_source(path, progress, ema, trust_code, base, described)
    if to == "peft":
        from titanlite.features.lora.peft import save_peft

        files = opened.adapters
        if files is None:
            raise CheckpointError(
                f"{opened.path} holds whole weights, and PEFT's files hold adapters"
            )
        tensors = {}
        for name in files.adapters.shapes:
            tensor = files.read(name)
            tensors[name] = converted(name, tensor, dtype) if dtype else tensor
        model = (get_spec(opened.family), opened.args)
        save_peft(target, files.adapters, tensors, model, files.base)
        return target
    source = opened.converted(dtype, progress)
    needed = sum(tensor.nbytes for tensor in source.empty.values())
    there = next(folder for folder in target.absolute().parents if folder.is_dir())
    disk = shutil.disk_usage(there)
    if disk.total and disk.free < needed:
        raise CheckpointError(
            f"{target} cannot be written: its weights take {human_bytes(needed)}, and {there} has "
            f"{human_bytes(disk.free)} left. Nothing was written"
        )
    try:
        _write_hf(source, target, shard_bytes, report)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    return target


def _write_hf(
    source: Source, final: AnyPath, shard_bytes: int, report: Callable[[str], None] | None
) -> None:
    spec = get_spec(source.family)
    entries = describe(source.empty)
    try:
        names, config = hf_form(spec, source.args)
    except ValueError as error:
        raise CheckpointError(f"{source.path}: {error}") from None
    # The context that the weights came with.
    if source.context:
        config["max_position_embeddings"] = source.context
    beside = dict(hf_files(source.tokenizer)) if source.tokenizer else {}
    with new_folder(final) as folder:
        files = plan_files(names, entries, dict.fromkeys(names, (0,)), shard_bytes)
        problem = write_files(folder, files, source.read)
        if problem:
            raise CheckpointError(f"{final} cannot be written: {problem}")
        for place in doors.installed("exports").values():
            beside |= doors.load(place)(source)
        write_configs(folder, config, files, entries, beside)
        if report is not None:
            report(compare_logits(source.family, source.args, source.read, Path(str(folder))))
            if source.tokenizer:
                report(compare_ids(source.tokenizer, Path(str(folder))))
