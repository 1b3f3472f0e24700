"""Source code and markup as text: which folders of them are one text."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from titanlite.config.data_sections import Data, Validation
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.choose_files import choose
from titanlite.data.dataset_builder import TextReader, build_dataset
from titanlite.data.file_kinds import SOURCE_SUFFIXES
from titanlite.data.listing import FoundFile, Listing, Place
from titanlite.data.local_files import list_text
from titanlite.data.text_files import iter_records
from titanlite.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()

#: A repository of code, as it is cloned.
CLONE = {
    ".git/config": "[core]\n",
    "README.md": "# A library\n",
    "LICENSE": "MIT\n",
    "pyproject.toml": "[project]\nname = 'x'\n",
    "requirements.txt": "numpy\n",
    "logo.png": "\x00",
    "docs/guide.md": "Call `f`.\n",
    "docs/api.rst": "API\n===\n",
    "src/x/__init__.py": "# x\n",
    "src/_vendor/__main__.py": "f()\n",
    "src/_vendor/data.md": "data\n",
    "src/x/train.py": "def train():\n    pass\n",
    "src/x/license_check.py": "VALID = ('MIT',)\n",
    "src/native.CPP": "int f() { return 1; }\n",
    "tests/test_x.py": "assert True\n",
    "tests/validation.js": "let valid = 1\n",
}
#: Its files that are read.
CODE = [
    "docs/api.rst",
    "docs/guide.md",
    "pyproject.toml",
    "src/_vendor/__main__.py",
    "src/native.CPP",
    "src/x/__init__.py",
    "src/x/license_check.py",
    "src/x/train.py",
    "tests/test_x.py",
    "tests/validation.js",
]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def listed(folder: Path | str, reader: str = "source", split: str | None = None) -> Listing:
    return list_text(Place(str(folder), "training.dataset_path", split, reader))  # type: ignore[arg-type]


def names(listing: Listing, folder: Path) -> list[str]:
    return [Path(file).relative_to(folder).as_posix() for file in listing.files]


def test_a_code_base_is_one_text_of_all_its_languages_and_levels(tmp_path: Path) -> None:
    folder = write(tmp_path / "code", CLONE)
    listing = listed(folder)
    assert names(listing, folder) == CODE
    assert listing.kinds == {"source code": 8, "Markdown": 1, "reStructuredText": 1}
    assert listing.passed_over == {
        "about the data": ("requirements.txt",),
        "documentation": ("README.md",),
        "hidden": ("src/_vendor/data.md",),
        "other kinds of files": ("LICENSE", "logo.png"),
    }
    assert listing.warning() is None
    training = Training(dataset_path=str(folder), seq_len=8, epochs=1)
    data = Data(shuffle=False, format="source")
    rows = build_dataset(training, data, TOKENIZER, TOKENIZER.vocab_size)
    assert rows.corpus is not None
    text = TOKENIZER.decode(rows.corpus.read(0, rows.corpus.size).tolist())
    documents = re.split(r"<\|\w+\|>", text)
    assert [one for one in documents if one] == [CLONE[name] for name in CODE]
    found = [FoundFile(f"s3://b/c/{name}", name, len(CLONE[name])) for name in sorted(CLONE)]
    code = choose(found, Place("s3://b/c/", reader="source"))
    assert code.files == tuple(f"s3://b/c/{name}" for name in CODE)


def test_a_folder_of_packed_code_is_text(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.py.gz").write_bytes(gzip.compress(f"text {number}\n".encode()))
    files = [Path(name) for name in listed(tmp_path).files]
    assert [one.text for one in iter_records(files)] == [f"text {n}\n" for n in range(3)]


def test_code_beside_text_is_passed_over_and_a_format_chooses_it(tmp_path: Path) -> None:
    files = {
        "package.json": '{"text": "1"}\n',
        "a/test_b.js": "let b\n" * 9,
        "c.ts": "let c\n" * 9,
        "guide.rst": "guide\n",
        "train/d.md": "d",
    }
    folder = write(tmp_path, files)
    listing = listed(folder, "auto")
    assert names(listing, folder) == ["package.json"]
    code = 'source code, which data.format = "source" reads'
    assert listing.passed_over == {
        code: ("a/test_b.js", "c.ts"),
        "documentation": ("guide.rst", "train/d.md"),
    }
    assert f"a/test_b.js, c.ts ({code})" in listing.describe()
    listing = listed(folder)
    assert names(listing, folder) == ["a/test_b.js", "c.ts", "guide.rst", "train/d.md"]
    assert listing.passed_over == {"not of format source": ("package.json",)}
    assert listed(f"{folder}/**/*.js", "auto").warning() is None
    for name in ("package.json", "guide.rst", "train/d.md"):
        (folder / name).unlink()
    with pytest.raises(DataError, match=f"holds no text .there are {code}: a/test_b.js, c.ts"):
        listed(folder, "auto")


def test_keys_choose_a_format_for_training_and_validation(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.py": "x = 1\n", "b.txt": "text\n", "c.md": "text\n"})
    data = Data(format="source", shuffle=False)
    reader = TextReader(data, TOKENIZER, TOKENIZER.vocab_size)
    train = reader.train(Training(dataset_path=str(folder), seq_len=4))
    validation = Validation(dataset_path=str(folder), format="text")
    (folder / "c.md").unlink()
    held_out = reader.held_out(validation, 4)[""]
    assert train.listing is not None
    assert held_out.listing is not None
    assert train.listing.kinds == {"source code": 1, "Markdown": 1}
    assert held_out.listing.kinds == {"plain text": 1}


def test_the_page_lists_the_suffixes() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    section = page.partition("## Source code\n")[2].partition("\n##")[0]
    listed = max(re.findall(r"`([^`]*)`", section), key=len).split()
    assert listed == sorted({*SOURCE_SUFFIXES})
