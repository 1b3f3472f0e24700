"""Sections of the config for text: training data and validation."""

from typing import Annotated, Literal

from msgspec import Meta

from titanlite.config.urls import public_name
from titanlite.config.value_types import (
    Count,
    CountOrRest,
    Day,
    Location,
    Name,
    Natural,
    NonNegative,
    Positive,
    Section,
    Seed,
)

StepRange = Annotated[
    str, Meta(pattern=r"^[1-9][0-9]*-[1-9][0-9]*$", extra={"words": 'steps as "200-250"'})
]
"""First and last step, both included."""

TokenType = Literal["uint8", "uint16", "uint32", "uint64", "int32", "int64"]
"""Type of the ids in a file, little-endian."""


def steps_of(item: int | str) -> tuple[int, int]:
    """Return first and last step of an item of data.skip_steps."""
    first, _, last = str(item).partition("-")
    return int(first), int(last or first)


Format = Literal["auto", "json", "parquet", "arrow", "text", "source"]
"""A reader of `titanlite.data.formats`."""

TextFormat = Literal[Format, "tokens"]


class DataSource(Section, frozen=True):
    """One `[[data.source]]`: text, and its share of the mixture.

    Without one, [training] and [data] name the text.
    """

    name: Name | None = None
    """Text by name, as for training.dataset, but no dotted path; beside a path, its name in the
    log. None: the path, of a URL without login and signature.
    """
    path: Location | None = None
    """Files of text, as for training.dataset_path."""
    subset: Name | None = None
    """Part of a data set of the hub (its config). None: the default one."""
    split: Name | None = None
    """Split of a dataset of the hub (None: train), or of local files and URLs by their names.

    With None a folder must have one split alone. "all" takes all splits.
    """
    format: TextFormat = "auto"
    """Kind of file. auto: by content. text: each file is one document. source: so is each file of
    source code or markup.
    """
    token_dtype: TokenType | None = None
    """Type of ids in token files that do not tell it. None: data.token_dtype."""
    text_key: Name | None = None
    """Field of a record that holds the text. None: data.text_key."""
    prompt_key: Name | None = None
    """Field that the model reads and is not trained on. None: data.prompt_key."""
    completion_key: Name | None = None
    """Field that follows the prompt and is trained on. None: data.completion_key."""
    messages_key: Name | None = None
    """Field that holds a conversation. None: data.messages_key."""
    weight: Positive = 1.0
    """Share of the mixture in tokens, relative to the other sources."""
    epochs: Count | None = None
    """Most passes over this source. None: no limit."""
    license: Name | None = None
    """Its licence, for the statement beside exported weights. None: data.license."""

    @property
    def title(self) -> str:
        """Its name in a mixture and in records; of a URL without login and signature."""
        return public_name(self.name or self.path or "")


class DataPhase(Section, frozen=True):
    """One `[[data.phase]]`: other shares of the sources, another batch or another learning rate,
    from a step or token on.
    """

    step: Annotated[int, Meta(ge=2)] | None = None
    """First step of the phase. Excludes tokens."""
    tokens: Count | None = None
    """Tokens of the run before the phase. Excludes step."""
    weights: dict[str, NonNegative] = {}
    """Source → share from here on; a source that is not named gets none. Empty: as before."""
    lr: Positive | None = None
    """Peak of the learning rate from here on, in place of optimizer.lr. Excludes lr_factor."""
    lr_factor: NonNegative = 1.0
    """The learning rate is the schedule's times this, within this phase."""
    global_batch_size: Count | None = None
    """Sequences per step over all ranks from here on. None: as before."""
    seq_len: Count | None = None
    """Tokens per sequence from here on. None: as before. It divides the longest of the run."""


class Data(Section, frozen=True):
    """The order in which text is read, and how."""

    seed: Seed = 0
    """Seed of the order, apart from training.seed."""
    shuffle: bool = True
    """A new order in each epoch; false: the order of the files."""
    packing: Literal["split", "best-fit"] = "split"
    """How documents fill sequences: split at the end of one, or fitted whole."""
    mask_documents: bool = False
    """Attention stays within a document."""
    source: list[DataSource] = []
    """Array of tables: a mixture of sources instead of one dataset."""
    phase: list[DataPhase] = []
    """Array of tables: changes of course during the run."""
    token_dtype: Literal["auto"] | TokenType = "auto"
    """Type of ids in token files without a header. auto: uint16, or uint32 for vocabularies over
    65,536; an error where another type could be meant.
    """
    text_key: Name | None = None
    """Field of a record that holds the text. None: that of a registered name, else text."""
    prompt_key: Name | None = None
    """Field that the model reads and is not trained on. Needs completion_key."""
    completion_key: Name | None = None
    """Field that follows the prompt; the loss is on its tokens alone. Needs prompt_key."""
    messages_key: Name | None = None
    """Field that holds a conversation, a list of {role, content}. The loss is on the assistant's
    turns alone.
    """
    chat_template: Location | None = None
    """Jinja file that renders conversations, or "plain". None: that of chat_template.jinja or
    tokenizer_config.json.
    """
    template_date: Day | None = None
    """Day that a chat template writes, as "2025-01-31": strftime_now has it (gpt-oss, Mistral).
    None: the template has no such function.
    """
    license: Name | None = None
    """Licence of the text, as of a source. None: not stated."""
    subset: Name | None = None
    """Part of a data set of the hub (its config). None: the default one."""
    split: Name | None = None
    """Split of a dataset of the hub (None: train), or of local files and URLs by their names.

    With None a folder must have one split alone. "all" takes all splits.
    """
    format: TextFormat | None = None
    """Kind of the files of training.dataset_path, as format of a source. None: by content."""
    streaming: Literal["auto"] | bool = "auto"
    """Read text while training. auto: data sets of the hub, URLs, local text above 4 GB. false:
    tokenize it first.
    """
    lanes: Count | None = None
    """Parts of a stream; they fix its order. None: chosen at the first start and stored in
    checkpoints.
    """
    shuffle_buffer: Count = 10_000
    """Documents of a stream shuffled together, over all lanes."""
    retry_seconds: NonNegative = 300.0
    """Time for a source that cannot be read to come back; on several ranks at most half of
    comm.train_timeout_seconds. Then the run saves a checkpoint and ends.
    """
    num_workers: Natural | None = None
    """Threads per rank that tokenize text. None: the cores of the node per rank, at most 8. 0: the
    main thread.
    """
    token_cache: Location = "auto"
    """Folder of tokenized text, shared by the ranks of a node and by later runs; best on a local
    disk. "auto": titanlite-tokens-UID in the folder of temporary files, for 1 MB and more. "off":
    each rank tokenizes alone.
    """
    prefetch: Natural = 2
    """Steps that a background thread keeps ready. 0: prepared when needed."""
    pin_memory: bool = True
    """On GPUs, that thread puts batches into page-locked memory, so that copies do not wait."""
    skip_steps: list[Count | StepRange] = []
    """Steps of the data order to leave out, as [120, "200-250"]: those of an undisturbed run of
    this global batch.
    """


class Validation(Section, frozen=True):
    """Loss on held-out text during training."""

    enable: bool = False
    """Validate every freq steps and after the last."""
    freq: Count = 100
    """Steps between validations."""
    first: bool = False
    """Also before the first step, so that curves of the loss begin at step 0."""
    ema: bool = False
    """Validate with the average of the weights (optimizer.ema_decay), also in `titanlite eval`.
    """
    steps: CountOrRest = -1
    """Batches of a validation, of each source. -1: one full pass."""
    batch_size: Count | None = None
    """Sequences per data-parallel rank. None: training.batch_size."""
    seq_len: Count | None = None
    """Tokens per sequence. None: training.seq_len."""
    dataset: Name = "c4_validation"
    """Text by name: the bundled held-out part, or a name, hub id or dotted path as for
    training.dataset. c4, slimpajama and wikitext stand for their validation split here.
    """
    dataset_path: Location | None = None
    """Text of your own to validate on, as for training.dataset_path."""
    split: Name | None = None
    """Split of dataset or dataset_path, as data.split. None: that of a registered name, else as
    there.
    """
    format: TextFormat | None = None
    """Kind of the files of dataset_path, as format of a source. None: by content."""
    sources: list[DataSource] = []
    """Array of tables: several texts, each with a name and its own loss, instead of dataset and
    dataset_path.
    """
