"""The model card: README.md with the facts of a run.

What people write outside of two marker lines stays when the card is written anew. So does metadata
that titanlite does not know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from titanlite.cli import render_page
from titanlite.cli.push import facts
from titanlite.cli.push.facts import Weights
from titanlite.cli.push.results import INDEX, index_of, merged_index
from titanlite.cli.push.subject import Subject
from titanlite.features.hub.branches import BEGIN, END, REGION
from titanlite.features.hub.contact import HubError
from titanlite.utils import human_count, public

#: The config of the run, beside the card.
CONFIG_FILE = "train.toml"
#: Beside these, metadata of an older card stays.
_LISTS = ("tags", "datasets")
#: A figure of a task in a card.
_FIGURE = re.compile(r"^\| (\S+)/(\S+) \| [-\d.]+ \|$", re.MULTILINE)
#: Characters that would begin another cell, a link, HTML or code.
_MARKUP = re.compile(r"[|<\[`]")


@dataclass(frozen=True)
class Place:
    """Where the weights go."""

    repository: str
    branch: str


@dataclass(frozen=True)
class Card:
    """A card without the text of people."""

    text: str
    data: Mapping[str, Any]
    run_id: str


def make_card(
    subject: Subject,
    weights: Weights | None,
    place: Place,
    comparison: tuple[str, ...],
    has_curve: bool,
) -> Card:
    """Return the card of some weights. weights: None before they are exported."""
    step, tasks = facts.task_figures(subject)
    text = render_page(
        "model-card.md.jinja",
        name=place.repository.partition("/")[2],
        sentence=_sentence(subject, weights),
        rows=[(name, _in_line(value)) for name, value in _rows(subject, weights)],
        texts=[replace(text, name=_in_line(text.name)) for text in facts.texts(subject)],
        tasks=tasks,
        tasks_step=step,
        curve=has_curve,
        usage=_usage(place, weights),
        comparison=[_in_line(line) for line in comparison],
        config=facts.shown_config(subject),
    )
    # A text of the run must not look like a marker: the next push would take it for one.
    text = public(text).replace("<!--", "<!- -").strip()
    return Card(text, _metadata(subject, weights, place, tasks), subject.run_id)


def merged(card: Card, readme: str, own: str = "") -> str:
    """Return README.md with a card in it.

    readme: that of the branch. own: that of the pushed folder. "": there is none. Raises HubError
    where they differ in what people wrote.
    """
    from huggingface_hub import CardData

    known = _read(readme)
    given = _read(own)
    _refuse_two(card, known, given)
    data = {**given.data, **known.data, **card.data}
    for name in _LISTS:
        every: list[Any] = []
        for one in (given.data, known.data, card.data):
            every += [item for item in _as_list(one.get(name)) if item not in every]
        data[name] = every or None
    index = merged_index(given.data.get(INDEX), known.data.get(INDEX))
    data[INDEX] = merged_index(index, card.data.get(INDEX), known.figures | given.figures)
    body = known.body if known.words or not given.body else given.body
    region = f"{BEGIN.format(run=card.run_id)}\n{card.text}\n{END}"
    if REGION.search(body):
        body = REGION.sub(lambda _: region, body, count=1)
    else:
        body = f"{body}\n\n{region}" if body else region
    return f"---\n{CardData(**data).to_yaml()}\n---\n\n{body}\n"


@dataclass(frozen=True)
class _Readme:
    """A README.md: its metadata, and the text below."""

    data: Mapping[str, Any]
    body: str

    @property
    def words(self) -> str:
        """What people wrote."""
        return REGION.sub("", self.body).strip()

    @property
    def figures(self) -> set[tuple[str, str]]:
        """Tasks and metrics that a push has written."""
        region = REGION.search(self.body)
        return set(_FIGURE.findall(region[0])) if region else set()


def _read(readme: str) -> _Readme:
    from huggingface_hub import RepoCard

    if not readme.strip():
        return _Readme({}, "")
    try:
        card = RepoCard(readme)
    # Of its YAML.
    except Exception:
        return _Readme({}, readme.strip())
    return _Readme(card.data.to_dict(), card.text.strip())


def _refuse_two(card: Card, known: _Readme, given: _Readme) -> None:
    """Raise HubError for two texts, or two values of a key: one of them would be lost."""
    differ = []
    if given.words and known.words and given.words != known.words:
        differ.append("the text")
    for key, value in given.data.items():
        if key not in (*card.data, *_LISTS, INDEX) and known.data.get(key, value) != value:
            differ.append(key)
    if differ:
        raise HubError(
            f"README.md of the folder and that of the branch differ in {', '.join(differ)}: make "
            "them the same, or move that of the folder away"
        )


def _as_list(value: object) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _in_line(text: str) -> str:
    """Return a text for one line of Markdown, in which nothing is a table, a link or HTML."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def _sentence(subject: Subject, weights: Weights | None) -> str:
    what = "A language model"
    if weights is not None and weights.is_adapters:
        what = "Adapters of a language model"
        if weights.base_name:
            what = f"Adapters of {weights.base_name}"
        if weights.base_model:
            what = f"Adapters of [{weights.base_model}]({_page(weights.base_model)})"
    step = "" if subject.step is None else f", after step {subject.step:,}"
    tokens = facts.tokens_seen(subject)
    seen = "" if tokens is None else f" and {human_count(tokens)} tokens"
    return f"{what}, trained with titanlite{step}{seen}."


def _page(repository: str) -> str:
    return f"https://huggingface.co/{repository}"


def _rows(subject: Subject, weights: Weights | None) -> list[tuple[str, str]]:
    """Return the table of facts, those that are known."""
    rows: list[tuple[str, str]] = []
    if weights is not None:
        rows.append(("architecture", weights.architecture))
        rows.append(("parameters", f"{weights.parameters:,}"))
        rows.append(("precision of the weights", ", ".join(weights.dtypes)))
    if subject.step is not None:
        steps = subject.run.steps if subject.run is not None else None
        rows.append(("step", f"{subject.step:,}" + (f" of {steps:,}" if steps else "")))
    tokens = facts.tokens_seen(subject)
    if tokens is not None:
        rows.append(("tokens of training", f"{tokens:,}"))
    loss = facts.validation_loss(subject)
    if loss is not None:
        rows.append(("loss on the held-out text", f"{loss:.4f} nats per token"))
        rows.append(("perplexity on the held-out text", f"{_perplexity(loss):.4g}"))
    rows += _origin(subject)
    return rows


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _origin(subject: Subject) -> list[tuple[str, str]]:
    """Return what wrote the weights."""
    rows = []
    manifest = subject.manifest
    if manifest is not None:
        rows.append(("ranks", f"{manifest.world_size:,}"))
        git = dict(manifest.git)
        versions: Mapping[str, Any] = manifest.versions
    else:
        attempt = subject.run.attempts[-1] if subject.run and subject.run.attempts else {}
        git = dict(attempt.get("git") or {})
        versions = attempt.get("versions") or {}
    if git.get("commit"):
        changed = ", with changes" if git.get("dirty") else ""
        rows.append(("commit of titanlite", f"{git['commit']}{changed}"))
    if versions:
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        rows.append(("versions", shown))
    return rows


def _usage(place: Place, weights: Weights | None) -> str:
    at = "" if place.branch == "main" else f', revision="{place.branch}"'
    if weights is not None and weights.is_adapters:
        base = weights.base_name or "BASE"
        return (
            "from peft import PeftModel\n"
            "from transformers import AutoModelForCausalLM\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
            f'model = PeftModel.from_pretrained(base, "{place.repository}"{at})'
        )
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{place.repository}"{at})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{place.repository}"{at})'
    )


def _metadata(
    subject: Subject, weights: Weights | None, place: Place, tasks: Mapping[str, float]
) -> dict[str, Any]:
    """Return the metadata of the card."""
    is_adapters = weights is not None and weights.is_adapters
    data: dict[str, Any] = {
        "library_name": "peft" if is_adapters else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["titanlite"],
    }
    datasets = [text.dataset for text in facts.texts(subject) if text.dataset]
    if datasets:
        data["datasets"] = datasets
    if weights is not None and weights.base_model:
        data["base_model"] = weights.base_model
    if tasks:
        data[INDEX] = index_of(place.repository.partition("/")[2], tasks)
    return data
