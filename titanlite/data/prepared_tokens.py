"""The folder that `titanlite data prepare` makes: its index, and its parts.

`index.json` is written last and atomically. A part has up to three files. `part-*.tokens` has ids,
little-endian uint16, or uint32 for vocabularies over 65,536. `.offsets` (int64 [documents + 1])
says where documents begin in the part. Records with prompts have `.targets`: bits, lowest first,
0 where a token is no target.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data import DataError
from titanlite.data.mapped_tokens import ORDER, Part, SourceSpan
from titanlite.data.token_integrity import PartHashes, check_sizes
from titanlite.data.token_paths import INDEX
from titanlite.utils import parse_json

VERSION = 1
#: Ends of the names of the files of a part.
SUFFIXES = ("tokens", "offsets", "targets")


def read_index(folder: Path) -> dict[str, Any]:
    """Return a prepared folder's index. Raises DataError if it is missing or damaged."""
    file = folder / INDEX
    try:
        index: dict[str, Any] = parse_json(file.read_bytes())
        if index["version"] > VERSION:
            raise DataError(
                f"{file} has version {index['version']}; this titanlite reads {VERSION}: upgrade"
            )
        if index["fingerprint"] != fingerprint_of(index):
            raise ValueError("it does not fit its fingerprint")
        if index.get("checksum", checksum_of(index)) != checksum_of(index):
            raise ValueError("it does not fit its checksum")
        for part in index["parts"]:
            name = part["name"]
            # Nothing outside of the folder.
            if not re.fullmatch(r"part-[\w-]+", name) or not {*part["bytes"]} <= {*SUFFIXES}:
                raise ValueError(f"it names {name!r}, which is no part of this folder")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} is no finished folder of prepared tokens: it has no {INDEX}; run `titanlite "
            f"data prepare ... --out {folder}`, again if it was interrupted"
        ) from None
    except DataError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(
            f"{file} is damaged ({error}); remove the folder, and prepare it again"
        ) from None
    return index


def fingerprint_of(index: Mapping[str, Any]) -> str:
    """Return the hex digest of a folder's tokens, documents, targets and tokenizer."""
    names = ("tokens", "documents", "checksums")
    parts = [[part[name] for name in names] for part in index["parts"]]
    decisive = [ORDER, index["dtype"], index["tokenizer"], parts]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def checksum_of(index: Mapping[str, Any]) -> str:
    """Return the hex digest of a whole index; folders of older versions have none."""
    said = {name: value for name, value in index.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def part_of(folder: Path, index: Mapping[str, Any], record: Mapping[str, Any]) -> Part:
    """Return a part of a prepared folder from its record in the index.

    Raises DataError if record or sizes do not fit, OSError for missing files.
    """
    dtype = np.dtype(index["dtype"])
    try:
        check_sizes(folder, record, dtype.itemsize)
        sources = [
            SourceSpan(index["files"][source], first, number)
            for source, first, number in record["sources"]
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder / INDEX} is damaged ({error!r}); prepare the folder again"
        ) from None
    file = folder / f"{record['name']}.tokens"
    return Part(
        file,
        dtype,
        record["tokens"],
        has_targets="targets" in record["bytes"],
        sources=sources,
    )


def hashes_of(folder: Path, record: Mapping[str, Any], records: Path | None = None) -> PartHashes:
    """Return the hashes of a part's files; `records` holds records of whole parts."""
    hashes = record["checksums"].items()
    return PartHashes({folder / f"{record['name']}.{end}": one for end, one in hashes}, records)
