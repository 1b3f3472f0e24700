"""The manifest, which makes a folder a checkpoint, and the choice of the one to load.

No torch here.

A folder `step-N` is a checkpoint only if its `manifest.json` can be read and has a known format.
The manifest also carries the hash of its own content, and lists only files that exist with their
sizes. A save writes it last, a deletion removes it first. All other folders are reported with the
reason, and never loaded.

While a save or a deletion is at work, a mark lies beside the folder: a file `.partial-step-N-…` or
`.deleted-step-N-…`. A folder with a mark and without a manifest is a leftover of a killed process.
The next start or save deletes it.

All formats are read. Format 4 may hash files with XXH3. Format 3 may hold weights only, and says
where a run is recorded. Format 2 has hashes of all files and of the manifest itself. Format 1 had
neither.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.checkpoint.errors import CheckpointError as CheckpointError
from titanlite.checkpoint.errors import NewerFormatError as NewerFormatError
from titanlite.checkpoint.hf_files import is_torchtitan
from titanlite.checkpoint.store_paths import AnyPath, StoreError, entries, files_in
from titanlite.config.urls import public_names
from titanlite.runs import ATTEMPTS
from titanlite.utils import human_bytes

FORMAT = 4
FILE = "manifest.json"
#: DCP's file with the places of all tensors.
INDEX = ".metadata"
#: A checkpoint with a file of this name is never deleted by a run.
PIN = "KEEP"
#: File with the reason in a quarantined folder, `step-N.invalid-K`.
REASON = "invalid.txt"
#: How the names of marks begin: of a save, of a deletion.
PARTIAL = ".partial-"
DELETED = ".deleted-"
_STEP = re.compile(r"step-(\d+)")
#: Names of marks, of checkpoints alone: what a mark names is deleted, and somebody else may have
#: written it.
_MARK = re.compile(r"\.(?:partial|deleted)-(step-[0-9]+(?:\.invalid-[0-9]+)?)-[0-9a-f]{8}")
#: Names of all folders and marks of checkpoints.
NAMES = re.compile(r"step-(\d+)(\.invalid-\d+)?|\.(?:partial|deleted)-.*")
#: The manifest's entry with the hash of all others.
_DIGEST = "digest"
#: Algorithm → hexadecimal digits. XXH3 with 128 bits finds damage, and costs a save almost nothing.
#: SHA-256 is for the index and the manifest, which decide how the rest is read.
_DIGITS = {"xxh3": 32, "sha256": 64, "blake2b": 64}
FAST_HASH = "xxh3"
SAFE_HASH = "sha256"
#: Bytes that are read at a time; files that are hashed at the same time.
_BLOCK = 8 << 20
_THREADS = 4
PROGRESS_SECONDS = 10.0
#: Called with bytes done and bytes in all, by any thread, one at a time.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint, and the run that it belongs to."""

    step: int
    #: "model", "tokenizer", "data": hex digests or readable descriptions that must match on resume.
    fingerprints: dict[str, str]
    #: Tensor name -> [dtype, shape].
    tensors: dict[str, list[Any]]
    #: File name in the folder -> bytes.
    files: dict[str, int]
    #: State of the loop: data position, tokens seen.
    train: dict[str, Any]
    #: titanlite, Python and the libraries that numbers may depend on.
    versions: dict[str, str]
    #: Ranks that wrote it.
    world_size: int
    #: Seconds since the epoch.
    created: float
    #: The resolved configuration, for people and for `config diff`.
    config: dict[str, Any] = field(default_factory=dict)
    #: File name -> hash of the bytes written, `xxh3:…`; empty in format 1.
    hashes: dict[str, str] = field(default_factory=dict)
    #: Commit of the checkout that wrote it, and whether that had changes.
    git: dict[str, Any] = field(default_factory=dict)
    #: Variables of the environment that change what a run does (see `titanlite.runs.provenance`).
    environment: dict[str, str] = field(default_factory=dict)
    #: Records of the run: service → id of the run there.
    trackers: dict[str, str] = field(default_factory=dict)
    #: Mean loss on the validation text with these weights, where that was measured; finite.
    validation_loss: float | None = None
    #: No optimizer, no generators: no run can resume from it, but another one can start from it.
    weights_only: bool = False
    #: Type that the weights were converted to; "": as they were trained.
    dtype: str = ""
    #: From the beginning of the save to this manifest; None: not measured.
    seconds: float | None = None
    format: int = FORMAT

    def to_json(self) -> str:
        content = asdict(self)
        return json.dumps({**content, _DIGEST: _digest(content)}, indent=1, sort_keys=True)

    @property
    def size(self) -> int:
        """Bytes of its files, without the manifest."""
        return sum(self.files.values())

    def can_be_resumed_by(self, fingerprints: Mapping[str, str] | None) -> bool:
        return not self.weights_only and (fingerprints is None or self.fingerprints == fingerprints)


def dtype_name(dtype: object) -> str:
    """Return a torch type as manifests name it: `float32`."""
    return str(dtype).removeprefix("torch.")


def new_hash(algorithm: str) -> Any:
    """Return an object with `update` and `hexdigest`."""
    if algorithm == FAST_HASH:
        # Only here: `titanlite --help` and a config's check do without.
        import xxhash

        return xxhash.xxh3_128()
    return hashlib.blake2b(digest_size=32) if algorithm == "blake2b" else hashlib.new(algorithm)


def digest_of(data: bytes, algorithm: str = SAFE_HASH) -> str:
    """Return a hash as in manifests: `sha256:…`."""
    found = new_hash(algorithm)
    found.update(data)
    return f"{algorithm}:{found.hexdigest()}"


def file_digest(
    path: AnyPath, algorithm: str, read: Callable[[int], None] = lambda count: None
) -> str:
    """Return the hash of a file. Raises OSError. read: called with the bytes of each block."""
    found = new_hash(algorithm)
    view = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(view):
            found.update(view[:count])
            read(count)
    return f"{algorithm}:{found.hexdigest()}"


def _digest(content: dict[str, Any]) -> str:
    """Return a hash on which the file's layout has no effect."""
    return digest_of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def step_folder(root: AnyPath, step: int) -> AnyPath:
    """Return the folder of the checkpoint of a step."""
    return root / f"step-{step}"


def hf_folder(root: AnyPath, step: int) -> AnyPath:
    """Return the folder of the last save in Hugging Face's format."""
    return root / f"step-{step}-hf"


def last_hf_step(root: AnyPath) -> int:
    """Return the step of the newest whole `hf_folder` (config.json is written last); -1: none."""
    newest = -1
    for name in entries(root):
        match = re.fullmatch(r"step-(\d+)-hf", name)
        if match and (root / name / "config.json").is_file():
            newest = max(newest, int(match[1]))
    return newest


def step_of(folder: AnyPath) -> int | None:
    """Return the step in a checkpoint folder's name; None for other names."""
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def steps_in(root: AnyPath) -> list[int]:
    """Return the steps of all folders `step-N`, ascending, without leftovers."""
    names = entries(root)
    leftovers = set()
    for name, is_folder in names.items():
        folder = None if is_folder else marked_folder(root / name)
        if folder is not None and not (folder / FILE).is_file():
            leftovers.add(folder.name)
    steps = []
    for name, is_folder in names.items():
        step = step_of(root / name)
        if step is not None and is_folder and name not in leftovers:
            steps.append(step)
    return sorted(steps)


def marked_folder(mark: AnyPath) -> AnyPath | None:
    """Return the checkpoint's folder that a mark is about; None for other names."""
    match = _MARK.fullmatch(mark.name)
    return mark.parent / match.group(1) if match else None


def read_manifest(folder: AnyPath) -> Manifest:
    """Return the manifest of a valid checkpoint. Raises CheckpointError with the reason."""
    manifest = parse_manifest(folder)
    if problems := list(_wrong_sizes(folder, manifest).values()):
        raise CheckpointError(problems[0])
    return manifest


def _wrong_sizes(folder: AnyPath, manifest: Manifest) -> dict[str, str]:
    """Return file → fault, by one listing."""
    existing = files_in(folder)
    problems = {}
    for name, size in manifest.files.items():
        if name not in existing:
            problems[name] = f"{folder / name} is missing"
        elif existing[name].st_size != size:
            found = existing[name].st_size
            problems[name] = f"{folder / name} has {found} bytes, the manifest says {size}"
    return problems


def fault_of(folder: AnyPath) -> str:
    """Return why a folder is no checkpoint, by manifest and sizes; or "". Raises
    NewerFormatError.
    """
    try:
        read_manifest(folder)
    except NewerFormatError:
        raise
    except CheckpointError as error:
        return str(error)
    return ""


def parse_manifest(folder: AnyPath) -> Manifest:
    """Return the manifest without a look at the files that it lists.

    Raises CheckpointError when it is wrong, NewerFormatError for one of a later titanlite, and
    StoreError when a store cannot be asked: the checkpoint may be good then.
    """
    path = folder / FILE
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        if is_torchtitan(folder):
            raise CheckpointError(
                f"{folder} is of torchtitan: name it alone as checkpoint.initial_load_path"
            ) from None
        raise CheckpointError(f"{folder} has no {FILE}: it was never finished") from None
    except StoreError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict) or type(raw.get("format")) is not int:
        raise CheckpointError(f"{path} is not a titanlite manifest")
    if raw["format"] > FORMAT:
        raise NewerFormatError(
            f"{path} has format {raw['format']}; this titanlite reads up to {FORMAT}: upgrade "
            f"titanlite, or move {folder.name} to another folder"
        )
    try:
        digest = raw.pop(_DIGEST, None)
        now = _digest(raw)
        # Format 1 had none.
        if digest != now and (raw["format"] > 1 or digest is not None):
            raise ValueError(f"its contents have the hash {now}, and it says {digest}")
        manifest = Manifest(**raw)
        _check_types(manifest)
        # Older ones have the whole URLs of sources without a name.
        known = {name: public_names(text) for name, text in manifest.fingerprints.items()}
        manifest = replace(manifest, fingerprints=known)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if folder.name != step_folder(folder.parent, manifest.step).name:
        raise CheckpointError(f"{folder} was renamed: its manifest is of step {manifest.step}")
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raise ValueError for an entry of a wrong type or an impossible one."""
    import msgspec

    msgspec.convert(vars(manifest), Manifest)
    msgspec.convert(manifest.tensors, dict[str, tuple[str, list[int]]])
    if not 0 <= manifest.created < 1e11 or not math.isfinite(manifest.validation_loss or 0.0):
        raise ValueError(
            f"created = {manifest.created} or validation_loss = {manifest.validation_loss} is "
            "impossible"
        )
    for name in manifest.files:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is no file of it")
    if manifest.format > 1 and manifest.hashes.keys() != manifest.files.keys():
        raise ValueError("not every file has a hash")
    for digest in manifest.hashes.values():
        algorithm, _, value = digest.partition(":")
        if len(value) != _DIGITS.get(algorithm):
            raise ValueError(f"{digest!r} is no digest that is known here")


def check_files(
    folder: AnyPath,
    manifest: Manifest,
    names: Sequence[str] | None = None,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Compare files (None: all) with their hashes; return what is wrong, a line each.

    Raises StoreError when a store cannot be asked, which says nothing of the files.
    """
    names = sorted(manifest.files) if names is None else names
    wrong = _wrong_sizes(folder, manifest)
    total = sum(manifest.files[name] for name in names)
    done = 0
    lock = threading.Lock()

    def read(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress(done, total)

    def check(name: str) -> str | None:
        digest = manifest.hashes.get(name)
        if digest is None or name in wrong:
            return wrong.get(name)
        path = folder / name
        try:
            found = file_digest(path, digest.partition(":")[0], read)
        except StoreError:
            raise
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
        if found == digest:
            return None
        return (
            f"{path} has changed since it was written: {_shortened(digest)} in the manifest, "
            f"{_shortened(found)} found"
        )

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="titanlite-verify") as pool:
        return [problem for problem in pool.map(check, names) if problem]


def _shortened(digest: str) -> str:
    return f"{digest[: digest.index(':') + 17]}…"


def progress(report: Callable[[str], None], lead: str, tail: str = "") -> Progress:
    """Return a function that reports bytes every ten seconds."""
    shown = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown >= PROGRESS_SECONDS:
            shown = time.monotonic()
            report(f"{lead}{human_bytes(done)} of {human_bytes(total)}{tail}")

    return show


class Found(NamedTuple):
    """The answer of `find`."""

    #: The checkpoint to load; None: there is none.
    manifest: Manifest | None
    #: Why newer ones were passed over.
    passed: list[str]

    def valid(self, root: AnyPath) -> Manifest:
        """Raises CheckpointError where there is none."""
        if self.manifest is None:
            raise CheckpointError("\n  ".join([f"{root} has no valid checkpoint", *self.passed]))
        return self.manifest


def find(
    root: AnyPath, step: int | None = None, known_bad: Mapping[int, str] | None = None
) -> Found:
    """Return the checkpoint to load from `root`: that of `step`, or the newest valid one.

    known_bad: step → why its content is wrong. Raises CheckpointError when `step` is not valid, and
    NewerFormatError instead of passing over such a one.
    """
    known_bad = known_bad or {}
    steps = steps_in(root)
    if step is not None and step not in steps:
        have = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{root} has no step-{step} (steps there: {have})")
    if step is not None:
        return Found(_read_known(root, step, known_bad), [])
    passed: list[str] = []
    for candidate in reversed(steps):
        try:
            return Found(_read_known(root, candidate, known_bad), passed)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            passed.append(str(error))
    return Found(None, passed)


def _read_known(root: AnyPath, step: int, known_bad: Mapping[int, str]) -> Manifest:
    if step in known_bad:
        raise CheckpointError(known_bad[step])
    return read_manifest(step_folder(root, step))


def root_of(path: AnyPath) -> AnyPath:
    """Return the folder of checkpoints: `path`, or `checkpoint` in it. Raises CheckpointError."""
    for root in (path, path / "checkpoint"):
        if any(NAMES.fullmatch(name) for name in entries(root)):
            return root
    if (path / ATTEMPTS).is_file():
        raise CheckpointError(
            f"the run {path} has kept no checkpoint: train it with --checkpoint.enable_checkpoint"
        )
    if path.is_dir():
        raise CheckpointError(
            f"{path} holds no checkpoints, nor does a folder 'checkpoint' in it, and no weights as "
            "safetensors: name a run or its folder"
        )
    if path.is_file():
        raise CheckpointError(f"{path} is a file: name a run or its folder of checkpoints")
    hint = ""
    if re.fullmatch(r"(?!assets/|outputs/)[\w-]+/\w[\w.-]*", str(path)):
        hint = f"; a model of the hub: hf download {path} --local-dir {path}"
    raise CheckpointError(f"{path}: no such folder{hint}")


def refuse_older(path: AnyPath) -> None:
    """Raise CheckpointError where a run's newest weights are in Hugging Face's format."""
    for root in (path, path / "checkpoint"):
        done = last_hf_step(root)
        if done < 0:
            continue
        manifest, _ = find(root)
        other = ""
        if manifest:
            if done <= manifest.step:
                continue
            other = f", or step-{manifest.step}"
        raise CheckpointError(
            f"the newest weights are in {hf_folder(root, done)}: name that folder{other}"
        )
