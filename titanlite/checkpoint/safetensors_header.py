"""What a file of safetensors begins with: a length, and JSON with type, shape and place of each
tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

#: torch's names of types → safetensors'.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def header(tensors: Iterable[tuple[str, str, Sequence[int], int]], **about: str) -> bytes:
    """Return the bytes before tensors, given as name, dtype, shape and bytes. about: further
    metadata.
    """
    # Without the format, `transformers` 4 refuses the file.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    start = 0
    for name, dtype, shape, size in tensors:
        end = start + size
        entries[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
