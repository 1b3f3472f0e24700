#!/usr/bin/env python
"""Count words, long sentences and the reading grade of README and docs, page by page.

usage: python scripts/words.py [REPOSITORY]

Words are those that `wc -w` counts: code and tables too. Sentences are those of `prose.py`, without
code and tables. A long one has more than 25 words. The grade is the school year of Flesch and
Kincaid: 0.39 words per sentence + 11.8 syllables per word - 15.59 (Kincaid et al., 1975,
"Derivation of new readability formulas for Navy enlisted personnel"). Code counts as one syllable.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import prose

#: Pages to look things up in, by their names.
REFERENCE = {"config-keys.md", "cli.md", "metrics.md", "model-shapes.md", "api.md"}
#: Pages of the past, for maintainers.
NO_PAGES = {"log.md", "CHANGELOG.md"}
MOST_WORDS = 52_500


@dataclass
class Count:
    """Sums over one page or several."""

    words: int = 0
    sentences: int = 0
    long: int = 0
    spoken: int = 0
    syllables: int = 0

    def add(self, other: Count) -> None:
        self.words += other.words
        self.sentences += other.sentences
        self.long += other.long
        self.spoken += other.spoken
        self.syllables += other.syllables

    @property
    def grade(self) -> float:
        """The school year that a reader needs, by Flesch and Kincaid."""
        if not self.sentences:
            return 0.0
        per_sentence = self.spoken / self.sentences
        return 0.39 * per_sentence + 11.8 * self.syllables / self.spoken - 15.59

    def row(self, name: str) -> str:
        share = 100 * self.long / max(1, self.sentences)
        counts = f"{self.words:8,} {self.sentences:10,} {self.long:6,} {share:6.1f} %"
        return f"{name:34} {counts} {self.grade:6.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repository", nargs="?", type=Path, default=Path("."))
    repository = parser.parse_args().repository.resolve()
    guides = Count()
    reference = Count()
    print(f"{'page':34} {'words':>8} {'sentences':>10} {'long':>6} {'share':>8} {'grade':>6}")
    for page in pages(repository):
        count = count_page(page.read_text(encoding="utf-8"))
        (reference if page.name in REFERENCE else guides).add(count)
        print(count.row(page.relative_to(repository).as_posix()))
    print(reference.row("reference"))
    print(guides.row("the rest"))
    if guides.words > MOST_WORDS:
        print(f"the rest has more than {MOST_WORDS:,} words")


def pages(repository: Path) -> list[Path]:
    """Return README and the pages of docs/, those with most words first."""
    found = [repository / "README.md", *(repository / "docs").rglob("*.md")]
    found = [page for page in found if page.name not in NO_PAGES]
    return sorted(found, key=lambda page: -len(page.read_text(encoding="utf-8").split()))


def count_page(text: str) -> Count:
    count = Count(words=len(text.split()))
    for paragraph in prose.prose_of_page(text):
        for sentence in prose.split(paragraph):
            words = re.findall(r"[A-Za-z][A-Za-z'’]*", sentence)
            count.sentences += 1
            count.long += prose.count_words(sentence) > prose.MOST_WORDS
            count.spoken += len(words)
            count.syllables += sum(syllables(word) for word in words)
    return count


def syllables(word: str) -> int:
    """Count groups of vowels; a silent e at the end is none."""
    if word == "CODE":  # what prose.py puts in place of code
        return 1
    word = word.lower()
    groups = len(re.findall(r"[aeiouy]+", word))
    is_silent = re.search(r"[^aeiouyl]e$|[^aeiouytd]ed$", word)
    return max(1, groups - bool(is_silent))


if __name__ == "__main__":
    main()
