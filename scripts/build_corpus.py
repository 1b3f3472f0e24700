"""Build the bundled corpus: public-domain English prose from Debian packages, in C4's record
format.

    python scripts/build_corpus.py [--debs FOLDER]

Needs Debian (or a container of it) with `apt-get`, `dpkg-deb` and libreadline8. With `--debs` the
packages
are taken from that folder instead of being downloaded. The output is the same byte for byte each
time:
package versions and hashes are pinned here, document order is by hash, gzip stores no time.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "titanlite" / "data" / "assets"

#: File name in the Debian archive (bookworm) -> (package=version for apt-get, sha256 of the file).
PACKAGES = {
    "bible-kjv_4.38_amd64.deb": (
        "bible-kjv=4.38",
        "75a49c032a6efa9faa2beb4a9acb70974380122906329d0e100de36cc88ff02d",
    ),
    "bible-kjv-text_4.38_all.deb": (
        "bible-kjv-text=4.38",
        "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a",
    ),
    "dict-devil_1.0-13.1_all.deb": (
        "dict-devil=1.0-13.1",
        "6a535684def2a1f70cd42da16d12d43f0e9dc3e54e4a329178eebab3170e3154",
    ),
    "r-cran-janeaustenr_1.0.0-1_all.deb": (
        "r-cran-janeaustenr=1.0.0-1",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    ),
}

#: One in so many documents of each source is held out.
HELD_OUT_EVERY = 20
TRAIN_SHARDS = 4
#: C4 stores when a page was crawled; books have no such time, so every record has the same one.
TIMESTAMP = "2000-01-01T00:00:00Z"

Document = tuple[str, str]  # (url, text)


def fetch(folder: Path) -> None:
    """Download the pinned packages into `folder`."""
    wanted = [spec for spec, _ in PACKAGES.values()]
    subprocess.run(["apt-get", "download", *wanted], cwd=folder, check=True)


def unpack(debs: Path, into: Path) -> None:
    """Check each package against its hash and extract all of them into one tree."""
    for name, (_, sha256) in PACKAGES.items():
        found = hashlib.sha256((debs / name).read_bytes()).hexdigest()
        if found != sha256:
            raise SystemExit(f"{debs / name}: sha256 is {found}, expected {sha256}")
        subprocess.run(["dpkg-deb", "-x", str(debs / name), str(into)], check=True)


def bible(root: Path) -> Iterator[Document]:
    """The King James Version, one document per chapter: its heading, then one verse per line."""
    printed = subprocess.run(
        [root / "usr/bin/bible", "-p", root / "usr/lib", "-l", "1000000"],
        input="Gen1:1-Rev22:21\n",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # The program greets and prints Genesis 1:1 before its first prompt.
    body = printed.split("]> ", 1)[1]
    heading, verses = "", []
    for line in body.splitlines():
        verse = re.match(r"^ +\d+ (.+)$", line)
        if verse:
            verses.append(tidy(verse[1]))
        elif re.match(r"^[1-3]?[A-Z ][A-Za-z ]* \d+$", line):
            if verses:
                yield bible_chapter(heading, verses)
            heading, verses = line.strip(), []
    yield bible_chapter(heading, verses)


def bible_chapter(heading: str, verses: list[str]) -> Document:
    book, number = heading.rsplit(" ", 1)
    return f"debian:bible-kjv/{book.replace(' ', '-')}/{number}", "\n".join([heading, *verses])


def austen(root: Path) -> Iterator[Document]:
    """Jane Austen's six completed novels, one document per chapter, a paragraph per line."""
    for lines in r_string_vectors(root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"):
        title = lines[0].title().replace(" And ", " and ")
        number = 0
        chapter: list[str] = []
        for line in lines:
            if line == "A NOTE ON THE TEXT":  # a modern editor's words, not Austen's
                break
            if re.fullmatch(r"chapter ([ivxlc]+|\d+)", line.strip(), re.IGNORECASE):
                if number:
                    yield novel_chapter(title, number, chapter)
                number, chapter = number + 1, []
            elif not re.match(
                r"\s*(VOLUME [IVX]+$|FINIS$|THE END$|\[At this point|\[End volume)",
                line,
                re.IGNORECASE,
            ):
                chapter.append(line)
        yield novel_chapter(title, number, chapter)


def novel_chapter(title: str, number: int, lines: list[str]) -> Document:
    url = f"debian:r-cran-janeaustenr/{title.replace(' ', '-')}/{number}"
    return url, f"{title}, Chapter {number}\n{reflow(lines)}"


def devil(root: Path) -> Iterator[Document]:
    """Ambrose Bierce's Devil's Dictionary, one document per entry."""
    dictd = root / "usr/share/dictd"
    content = gzip.decompress((dictd / "devil.dict.dz").read_bytes())
    entries: dict[tuple[int, int], str] = {}
    for line in (dictd / "devil.index").read_text().splitlines():
        word, offset, length = line.split("\t")
        if not word.startswith("00database"):
            entries.setdefault((base64_number(offset), base64_number(length)), word)
    for (start, size), word in sorted(entries.items()):
        text = reflow(content[start : start + size].decode("utf-8").splitlines())
        yield f"debian:dict-devil/{word.replace(' ', '-')}@{start}", text


def base64_number(digits: str) -> int:
    """A number as dictd's index writes it: base 64, most significant digit first."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    value = 0
    for digit in digits:
        value = value * 64 + alphabet.index(digit)
    return value


def r_string_vectors(path: Path) -> Iterator[list[str]]:
    """The character vectors in an R lazy-load database (zlib-compressed XDR serialisations, version
    3).
    """
    rest = path.read_bytes()
    while rest:
        inflate = zlib.decompressobj()
        blob = inflate.decompress(rest[4:])
        if len(blob) != struct.unpack(">I", rest[:4])[0]:
            raise SystemExit(f"{path}: a record of unexpected length")
        rest = inflate.unused_data
        at = blob.index(b"UTF-8") + 5
        kind, count = struct.unpack_from(">II", blob, at)
        if kind & 0xFF != 16:
            raise SystemExit(
                f"{path}: an object of R type {kind & 0xFF} where a character vector was expected"
            )
        at += 8
        strings = []
        for _ in range(count):
            length = struct.unpack_from(">i", blob, at + 4)[0]
            strings.append(blob[at + 8 : at + 8 + length].decode("utf-8"))
            at += 8 + length
        yield strings


def reflow(lines: Iterable[str]) -> str:
    """Hard-wrapped lines to one line per paragraph; an indented line (verse, a signature) starts
    its own.
    """
    paragraphs: list[str] = []
    open_paragraph = False
    for line in lines:
        if not line.strip():
            open_paragraph = False
        elif open_paragraph and not line.startswith(" "):
            paragraphs[-1] += " " + line.strip()
        else:
            paragraphs.append(line.strip())
            open_paragraph = True
    return "\n".join(tidy(paragraph) for paragraph in paragraphs)


def tidy(text: str) -> str:
    """Typists' double spaces to one."""
    return re.sub(r" {2,}", " ", text.strip())


def by_hash(documents: list[Document]) -> list[Document]:
    """A fixed mixed order, so that each shard, and each beginning of one, is a fair sample of all
    sources.
    """
    return sorted(documents, key=lambda document: hashlib.sha256(document[0].encode()).hexdigest())


def write(path: Path, documents: list[Document]) -> None:
    """One gzip file of JSON lines with no time and no name inside."""
    lines = [
        json.dumps({"text": text, "timestamp": TIMESTAMP, "url": url}, ensure_ascii=False)
        for url, text in documents
    ]
    payload = ("\n".join(lines) + "\n").encode("utf-8")
    path.write_bytes(gzip.compress(payload, compresslevel=9, mtime=0))
    print(
        f"{path.name}: {len(documents)} documents, {len(payload):,} bytes, "
        f"{path.stat().st_size:,} compressed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--debs", type=Path, help="folder that holds the packages (default: download them)"
    )
    parser.add_argument("--out", type=Path, default=ASSETS)
    arguments = parser.parse_args()

    training: list[Document] = []
    held_out: list[Document] = []
    with tempfile.TemporaryDirectory() as scratch:
        debs = arguments.debs or Path(scratch)
        if arguments.debs is None:
            fetch(debs)
        root = Path(scratch) / "root"
        unpack(debs, root)
        for source in (bible, austen, devil):
            documents = list(source(root))
            characters = sum(len(text) for _, text in documents)
            print(f"{source.__name__}: {len(documents)} documents, {characters:,} characters")
            held_out += documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
            training += [
                d for i, d in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1
            ]

    arguments.out.mkdir(parents=True, exist_ok=True)
    training = by_hash(training)
    for shard in range(TRAIN_SHARDS):
        name = f"train-{shard:05d}-of-{TRAIN_SHARDS:05d}.json.gz"
        write(arguments.out / "train" / name, training[shard::TRAIN_SHARDS])
    write(arguments.out / "validation" / "validation-00000-of-00001.json.gz", by_hash(held_out))


if __name__ == "__main__":
    main()
