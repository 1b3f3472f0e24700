"""Which files of a folder are its text: by name, kind, level and split; and source code."""

from __future__ import annotations

import gzip
import itertools
import re
import shutil
from pathlib import Path

import pytest

from tests.support.hub_server import HubServer
from tests.support.processes import ROOT
from tests.support.texts import CLONE, TOKENIZER, write_files
from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.choose_files import choose
from titanlite.data.dataset_builder import TextReader
from titanlite.data.file_kinds import SOURCE_SUFFIXES, why_no_text
from titanlite.data.listing import FoundFile, Listing, Place
from titanlite.data.local_files import list_text
from titanlite.data.sequences import PackedDataset
from titanlite.data.split_names import split_of
from titanlite.data.stream_files import url_text
from titanlite.data.text_files import iter_records


def read(folder: Path | str, **keys: object) -> list[str]:
    """Return the names below the folder of the files that training reads."""
    source = DataSource(path=str(folder), **keys)  # type: ignore[arg-type]
    rows = TextReader(Data(), TOKENIZER, TOKENIZER.vocab_size).open(
        source, "data.source[0]", 8, None
    )
    assert isinstance(rows, PackedDataset)
    assert rows.listing is not None
    places = itertools.pairwise(rows.corpus.offsets.tolist())
    return [TOKENIZER.decode(rows.corpus.read(*place)[1:-1].tolist()) for place in places]


def refused(
    folder: Path | str, key: str = "training.dataset_path", split: str | None = None
) -> list[str]:
    """Return the lines of the error."""
    with pytest.raises(DataError) as caught:
        list_text(Place(str(folder), key, split))
    return str(caught.value).splitlines()


TRAIN = CLONE[-3:-1]


def test_a_clone_of_a_data_set_trains_on_the_split_that_is_named(tmp_path):
    clone = write_files(tmp_path / "clone", *CLONE)
    assert refused(clone) == [
        f"training.dataset_path: the folder {clone} holds text of several splits",
        f"  1 file of parquet, split test, in subfolders: {CLONE[-1]}",
        f"  2 files of parquet, split train, in subfolders: {', '.join(TRAIN)}",
        f'  choose by data.split or data.format, or give a pattern, as "{clone}/**/*.txt"',
    ]
    assert read(clone, split="train") == read(f"{clone}/data/train*.parquet") == TRAIN
    assert read(clone, split="all") == [CLONE[-1], *TRAIN]
    assert read(clone, split="eval") == CLONE[-1:]
    assert refused(clone, split="dev") == [
        f'training.dataset_path: {clone} has no split "dev"; it has test, train'
    ]
    listing = list_text(Place(str(clone), split="train"))
    assert listing.kinds == {"parquet": 2}
    assert listing.passed_over == {
        "documentation": ("LICENSE.txt", "README.md"),
        "hidden": (".gitattributes", "data/_SUCCESS"),
        "about the data": ("dataset_infos.json",),
        "split test": ("data/test-00000-of-00001.parquet",),
    }
    # As datasets does it: a licence beside data of one split is no text.
    (clone / CLONE[-1]).unlink()
    assert read(clone) == TRAIN


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["train.jsonl", "validation.jsonl", "test.jsonl"], "of several splits"),
        (["a.parquet", "b.parquet", "sample.jsonl"], "of several kinds"),
        (["a.txt", "b.txt", "below/c.txt", "below/deeper/d.txt"], "on two levels"),
        (
            ["a.jsonl", "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
            "of several splits and",
        ),
        (
            ["my [corpus]/x-test.txt", "my [corpus]/x-train.txt", "my [corpus]/y-train.txt"],
            "of several splits",
        ),
    ],
)
def test_a_folder_of_several_texts_is_refused_with_its_candidates(tmp_path, names, why):
    folder = write_files(tmp_path / "a*b's", *names)
    first, *groups, last = refused(folder, "data.source[0].path")
    assert first.startswith(f"data.source[0].path: the folder {folder} holds text {why}")
    assert len(groups) > 1
    listed = [name for line in groups for name in line.partition(": ")[2].split(", ")]
    assert sorted(listed) == sorted(names)
    assert "choose by data.source[0].split or data.source[0].format" in last
    assert "choose by --split or --format" in refused(folder, "SOURCE")[-1]


def test_files_known_by_name_are_no_text(tmp_path):
    known = ["LICENSE.txt", "README.txt", "LICENCE-MIT.txt", "license.md", "NOTICE.txt"]
    known += ["dataset_info_en.json", "state.json", "requirements.txt", "cache-0123abcd.arrow"]
    known += ["_SUCCESS", ".hidden.jsonl", "_delta_log/0.json", "x.zip"]
    folder = write_files(
        tmp_path / "a", "history.txt", "notice of death.txt", "testament.txt", *known
    )
    assert read(folder) == ["history.txt", "notice of death.txt", "testament.txt"]
    assert all(why_no_text(Path(name).name) for name in known if name != "_delta_log/0.json")
    # A file that is named itself, or by a pattern, is text whatever its name.
    assert read(folder / "LICENSE.txt") == ["LICENSE.txt"]
    assert read(folder / "[LR]*.txt") == ["LICENCE-MIT.txt", "LICENSE.txt", "README.txt"]
    (folder / "only").mkdir()
    shutil.copy(folder / "LICENSE.txt", folder / "only")
    assert "holds no text (there are documentation: LICENSE.txt)" in refused(folder / "only")[0]


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.jsonl", "train"),
        ("data/train_sft-00000-of-00003.parquet", "train_sft"),
        ("data/part-00000-of-00003.parquet", None),
        ("x_dev.2.txt", "validation"),
        ("evaluation/train.txt", "test"),
        ("latest.txt", None),
        ("devices/valid8.txt", "validation"),
    ],
)
def test_splits_are_whole_words_of_names(path, split):
    assert split_of(path) == split


def test_splits_are_those_of_datasets(tmp_path):
    """The oracle finds the files of each split by its own patterns."""
    data_files = pytest.importorskip("datasets.data_files")
    for names in (
        ["train.jsonl", "validation.jsonl", "test.jsonl"],
        ["dev/a.jsonl", "train/a.jsonl", "eval/a.jsonl"],
        ["data/train_sft-00000-of-00001.jsonl", "data/test_gen-00000-of-00001.jsonl"],
    ):
        folder = write_files(tmp_path / names[0], *names)
        patterns = data_files.get_data_patterns(str(folder))
        found = data_files.DataFilesDict.from_patterns(patterns, base_path=str(folder))
        assert len(found) > 1
        for split, files in found.items():
            ours = [str(folder / name) for name in read(folder, split=str(split))]
            assert sorted(ours) == sorted(files)


def test_a_pattern_reads_what_it_finds_with_a_warning_for_several_splits_and_empty_files(
    tmp_path, logged
):
    folder = write_files(tmp_path, "train.jsonl", "test.jsonl", "LICENSE.txt")
    (tmp_path / "train-2.jsonl").touch()
    assert len(list_text(Place(f"{folder}/train*")).files) == 2
    assert "train-2.jsonl: empty files add nothing to the text" in logged()
    (tmp_path / "train-2.jsonl").unlink()
    listing = list_text(Place(f"{folder}/*.jsonl"))
    assert read(f"{folder}/*.jsonl") == ["test.jsonl", "train.jsonl"]
    assert listing.warning() == (
        "the pattern finds files of several splits, which are read together: test (1 file), train "
        "(1 file)"
    )
    assert read(f"{folder}/*.jsonl", split="train") == ["train.jsonl"]
    assert list_text(Place(f"{folder}/*.jsonl", split="train")).warning() is None


def test_stores_have_the_same_rules(tmp_path):
    pytest.importorskip("aiohttp")
    write_files(tmp_path / "files", *CLONE, "more/train.txt")
    with HubServer(tmp_path) as server:
        url = f"{server.url}/files/data/"
        with pytest.raises(DataError) as caught:
            url_text(Place(url))
        lines = str(caught.value).splitlines()
        assert lines[0] == f"training.dataset_path: the folder {url} holds text of several splits"
        assert lines[2].startswith("  2 files of parquet, split train: ")
        found = url_text(Place(f"{url}train*.parquet"))
        assert found.files == url_text(Place(url, split="train")).files
        assert [Path(name).name for name in found.files] == [Path(name).name for name in TRAIN]


def test_an_unchanged_folder_has_its_old_fingerprint(tmp_path):
    """Computed by the version before these rules: a resume compares it."""
    folder = tmp_path / "text"
    write_files(folder, "a.jsonl", "b.jsonl", "README.md")
    training = Training(dataset_path=str(folder), seq_len=8)
    for data, old in (
        (Data(), "b67fb3e3ba8849bc"),
        (Data(streaming=True, lanes=1), "fdf153888909e1cd"),
    ):
        rows = TextReader(data, TOKENIZER, TOKENIZER.vocab_size).train(training)
        assert rows.fingerprint[:16] == old


# Source code and markup as text


#: A repository of code, as it is cloned.
REPOSITORY = {
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


def write_all(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def listed(folder: Path | str, reader: str = "source") -> Listing:
    return list_text(Place(str(folder), reader=reader))  # type: ignore[arg-type]


def names(listing: Listing, folder: Path) -> list[str]:
    return [Path(file).relative_to(folder).as_posix() for file in listing.files]


def test_a_code_base_is_one_text_of_all_its_languages_and_levels(tmp_path):
    folder = write_all(tmp_path / "code", REPOSITORY)
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
    rows = TextReader(data, TOKENIZER, TOKENIZER.vocab_size).train(training)
    assert rows.corpus is not None
    text = TOKENIZER.decode(rows.corpus.read(0, rows.corpus.size).tolist())
    documents = re.split(r"<\|\w+\|>", text)
    assert [one for one in documents if one] == [REPOSITORY[name] for name in CODE]
    found = [
        FoundFile(f"s3://b/c/{name}", name, len(REPOSITORY[name])) for name in sorted(REPOSITORY)
    ]
    code = choose(found, Place("s3://b/c/", reader="source"))
    assert code.files == tuple(f"s3://b/c/{name}" for name in CODE)


def test_a_folder_of_packed_code_is_text(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.py.gz").write_bytes(gzip.compress(f"text {number}\n".encode()))
    files = [Path(name) for name in listed(tmp_path).files]
    assert [one.text for one in iter_records(files)] == [f"text {n}\n" for n in range(3)]


def test_code_beside_text_is_passed_over_and_a_format_chooses_it(tmp_path):
    files = {
        "package.json": '{"text": "1"}\n',
        "a/test_b.js": "let b\n" * 9,
        "c.ts": "let c\n" * 9,
        "guide.rst": "guide\n",
        "train/d.md": "d",
    }
    folder = write_all(tmp_path, files)
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


def test_keys_choose_a_format_for_training_and_validation(tmp_path):
    folder = write_all(tmp_path, {"a.py": "x = 1\n", "b.txt": "text\n", "c.md": "text\n"})
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


def test_the_page_lists_the_suffixes():
    page = (ROOT / "docs/cli.md").read_text()
    section = page.partition("## Source code\n")[2].partition("\n##")[0]
    listed = max(re.findall(r"`([^`]*)`", section), key=len).split()
    assert listed == sorted({*SOURCE_SUFFIXES})
