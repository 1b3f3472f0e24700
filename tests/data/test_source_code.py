"""Source code and markup as text: which folders of them are one text."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.same_batches import check_ranks_and_resumes
from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.errors import ConfigError
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.choose import choose
from titanlite.data.kinds import SOURCE_SUFFIXES
from titanlite.data.listing import FoundFile, Listing, Place
from titanlite.data.local_files import list_text
from titanlite.data.text import TextReader, build_dataset
from titanlite.data.text_files import iter_records
from titanlite.data.tokenizer import load_tokenizer
from titanlite.resolve.load import load_config

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


def listed(folder: Path | str, reader: str = "auto", split: str | None = None) -> Listing:
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
    rows = build_dataset(training, Data(shuffle=False), TOKENIZER, TOKENIZER.vocab_size)
    assert rows.corpus is not None
    text = TOKENIZER.decode(rows.corpus.read(0, rows.corpus.size).tolist())
    documents = re.split(r"<\|\w+\|>", text)
    assert [one for one in documents if one] == [CLONE[name] for name in CODE]


@pytest.mark.parametrize(
    "suffix", [".md", ".rst", ".py", ".TOML", ".tex", ".html", ".rs", ".py.gz"]
)
def test_a_folder_of_one_suffix_is_text(tmp_path: Path, suffix: str) -> None:
    pack = gzip.compress if suffix.endswith(".gz") else bytes
    for number in range(3):
        (tmp_path / f"{number}{suffix}").write_bytes(pack(f"text {number}\n".encode()))
    assert [one.text for one in iter_records(tmp_path)] == [f"text {n}\n" for n in range(3)]


def test_scripts_beside_data_are_passed_over_and_named(tmp_path: Path) -> None:
    """As in a data set of the hub with its loading script."""
    record = '{"text": "%s"}\n' % ("x" * 500)
    folder = write(tmp_path, {"c4.py": "a = 1\n", "data/a.json": record, "tools/b.sh": "ls\n"})
    listing = listed(folder)
    assert names(listing, folder) == ["data/a.json"]
    assert listing.passed_over == {"source code beside the text": ("c4.py", "tools/b.sh")}
    assert "c4.py, tools/b.sh (source code beside the text)" in listing.describe()
    write(folder, {"tools/b.sh": "x" * 60})
    with pytest.raises(DataError, match="holds text of several kinds"):
        listed(folder)


def test_code_beside_records_is_refused_and_a_format_chooses(tmp_path: Path) -> None:
    files = {
        "package.json": '{"text": "1"}\n',
        "a/b.js": "let b\n" * 9,
        "c.ts": "let c\n" * 9,
        "guide.rst": "guide\n",
    }
    folder = write(tmp_path, files)
    with pytest.raises(DataError) as caught:
        listed(folder)
    assert str(caught.value).splitlines() == [
        f"training.dataset_path: the folder {folder} holds text of several kinds and on two levels",
        "  1 file of source code, in subfolders: a/b.js",
        "  1 file of source code: c.ts",
        "  1 file of JSON lines: package.json",
        f'  choose by data.split or data.format, or give a pattern, as "{folder}/**/*.txt"',
    ]
    listing = listed(folder, "source")
    assert names(listing, folder) == ["a/b.js", "c.ts", "guide.rst"]
    assert listing.passed_over == {"not of format source": ("package.json",)}


def test_splits_and_levels_of_data_in_a_code_base_are_apart_from_its_code(tmp_path: Path) -> None:
    files = {"train.py": "x" * 50, "a/validation.go": "y" * 50, "a/guide.md": "z"}
    data = {"data/train.jsonl": '{"text": "a"}\n', "data/test.jsonl": '{"text": "b"}\n'}
    folder = write(tmp_path, files | data)
    with pytest.raises(DataError, match="of several splits and of several kinds"):
        listed(folder)
    code = ["a/guide.md", "a/validation.go", "train.py"]
    assert names(listed(folder, "source"), folder) == code
    listing = listed(folder, split="train")
    assert names(listing, folder) == ["data/train.jsonl"]
    assert listing.passed_over["without a split"] == ("a/validation.go", "train.py")


def test_a_pattern_reads_a_folder_of_other_names(tmp_path: Path) -> None:
    folder = write(tmp_path / "a[b", {"x.log": "one", "y/z.log": "two", "k.bin": "\x00"})
    with pytest.raises(DataError, match="holds no text .there are other kinds of files: k.bin, "):
        listed(folder)
    found = iter_records(tmp_path / "a[[]b/**/*.log")
    assert [one.text for one in found] == ["one", "two"]


def test_markup_of_two_kinds_is_one_text_as_source(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.md": "a", "b.rst": "b", "c/d.md": "d"})
    with pytest.raises(DataError, match="several kinds and on two levels"):
        listed(folder)
    assert names(listed(folder, "source"), folder) == ["a.md", "b.rst", "c/d.md"]


def test_folders_of_splits_divide_code_and_words_in_names_do_not(tmp_path: Path) -> None:
    folder = write(tmp_path, {"train/test_a.py": "a", "train/b/c.go": "c", "valid/train.py": "d"})
    with pytest.raises(DataError, match="several splits"):
        listed(folder)
    assert names(listed(folder, split="train"), folder) == ["train/b/c.go", "train/test_a.py"]
    assert names(listed(folder, split="validation"), folder) == ["valid/train.py"]
    write(folder, {"setup.py": "e"})
    assert len(listed(folder).files) == 4
    assert listed(f"{folder}/**/*.py").warning() is None


def test_stores_have_the_same_rules() -> None:
    found = [FoundFile(f"s3://b/c/{name}", name, len(CLONE[name])) for name in sorted(CLONE)]
    code = choose(found, Place("s3://b/c/"))
    assert code.files == tuple(f"s3://b/c/{name}" for name in CODE)
    data = FoundFile("s3://b/c/a.jsonl", "a.jsonl", 10)
    with pytest.raises(DataError, match="several kinds"):
        choose([*found, data], Place("s3://b/c/"))
    assert choose([*found, data._replace(size=9999)], Place("s3://b/c/")).kinds == {"JSON lines": 1}


def test_keys_choose_a_format_for_training_and_validation(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.py": "x = 1\n", "b.txt": "text\n"})
    data = Data(format="source", shuffle=False)
    reader = TextReader(data, TOKENIZER, TOKENIZER.vocab_size)
    train = reader.train(Training(dataset_path=str(folder), seq_len=4))
    validation = Validation(dataset_path=str(folder), format="text")
    held_out = reader.held_out(validation, 4)[""]
    assert train.listing is not None
    assert held_out.listing is not None
    assert train.listing.kinds == {"source code": 1}
    assert held_out.listing.kinds == {"plain text": 1}
    flags = ["--training.seq_len=4", "--training.epochs=1"]
    with pytest.raises(ConfigError, match=r"(?s)several kinds.*data\.format"):
        load_config("debug_model.toml", 1, [f"--training.dataset_path={folder}", *flags])
    run = load_config(
        "debug_model.toml",
        1,
        [f"--training.dataset_path={folder}", "--data.format=source", *flags],
    )
    assert run.data.format == "source"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("streaming", [False, True])
def test_ranks_and_resumes_see_the_same_batches(tmp_path: Path, streaming: bool) -> None:
    files = {f"{n % 3}/{n}.{'py' if n % 2 else 'md'}": f"# {n}\n" * (n + 5) for n in range(30)}
    folder = write(tmp_path, files)
    data = Data(streaming=streaming, lanes=4 if streaming else None, shuffle_buffer=12)
    training = Training(dataset_path=str(folder), seq_len=8)
    check_ranks_and_resumes(lambda: build_dataset(training, data, TOKENIZER, TOKENIZER.vocab_size))


def test_a_source_of_a_mixture_may_be_code(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a/b.py": "x = 1\n", "c.toml": "y = 2\n"})
    data = Data(source=[DataSource(path=str(folder), name="code"), DataSource(name="c4_test")])
    rows = build_dataset(Training(seq_len=8), data, TOKENIZER, TOKENIZER.vocab_size)
    listing = rows.texts()["code"].listing
    assert listing is not None
    assert listing.kinds == {"source code": 2}


def test_the_page_lists_the_suffixes() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    section = page.partition("## Source code\n")[2].partition("\n##")[0]
    listed = max(re.findall(r"`([^`]*)`", section), key=len).split()
    assert listed == sorted({*SOURCE_SUFFIXES})
