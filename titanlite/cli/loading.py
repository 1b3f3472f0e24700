"""Loads a checkpoint or a Hugging Face folder on one device, for `sample` and `eval`.

Torch is imported late.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.manifest import CheckpointError
from titanlite.checkpoint.store_paths import to_path
from titanlite.cli import at_least
from titanlite.cli.argument_parser import BASE, EMA, Parser
from titanlite.config import trust
from titanlite.config.dataset_registry import BUNDLED_TOKENIZER_NAME
from titanlite.config.errors import bad_flag
from titanlite.config.toml import loads
from titanlite.data import DataError
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.utils import human_count, parse_json

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titanlite.cli.hub.export_weights import Source
    from titanlite.models.generate import Sampling

CHECKPOINT = (
    "a run, its folder of checkpoints (the newest valid one), one step-N, or a Hugging Face folder"
)
_PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, on one device."""

    path: str
    #: Steps that it was trained for; 0: unknown.
    step: int
    #: Name of the linear that computes the logits.
    head: str
    model: nn.Module
    tokenizer: Tokenizer
    #: The longest sequence in tokens.
    limit: int
    device: torch.device
    #: `data.chat_template` of the run.
    chat_template: str | None
    #: `data.template_date` of the run; of weights without one today.
    template_date: str | None
    stop_ids: frozenset[int]
    #: A description for people: model, precision, device.
    summary: str

    def encode_chat(self, messages: Sequence[Mapping[str, str]], where: str) -> list[int]:
        """Return the ids up to the assistant's next message. Raises DataError."""
        from titanlite.data.chat import encode_chat, load_template

        template = load_template(self.chat_template, self.tokenizer, day=self.template_date)
        ids: list[int] = encode_chat(template.prompt(messages, where), self.tokenizer)[0].tolist()
        return ids

    def write(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling, number: int
    ) -> tuple[list[int], str]:
        """Return the new ids and their text. number: of the prompt, for its random draws."""
        from titanlite.models.generate import generate_ids, text_after

        ids = list(
            generate_ids(
                self.model,
                prompt,
                max_tokens=max_tokens,
                limit=self.limit,
                sampling=sampling,
                stop_ids=self.stop_ids,
                head=self.head,
                vocab=self.tokenizer.vocab_size,
                number=number,
            )
        )
        shown = [one for one in ids if one not in self.stop_ids]
        return ids, text_after(self.tokenizer, prompt, shown)


def add_arguments(parser: Parser) -> None:
    """Add CHECKPOINT and the options of `load_model`."""
    add = parser.add
    add("checkpoint", CHECKPOINT, "CHECKPOINT")
    add("--device", "cpu, cuda or cuda:N (default: a GPU if there is one)", "NAME")
    add("--ema", EMA)
    add("--base", BASE, "PATH", type=to_path)
    add(
        "--dtype",
        "precision of the weights (default: bfloat16 on a GPU, else float32)",
        choices=_PRECISIONS,
    )
    add(
        "--tokenizer",
        "tokenizer file or folder (default: that of the run, or in the folder)",
        "PATH",
    )
    add("--context", "longest sequence in tokens (default: the model's own)", "N", type=at_least(1))
    trust.add_argument(parser.add_argument)


def load_model(arguments: argparse.Namespace) -> LoadedModel:
    """Load the model that the options name; compare a checkpoint with its hashes first.

    Raises CheckpointError, DataError (tokenizer) and ConfigError (device, dtype, untrusted code).
    """
    import torch

    from titanlite.cli.hub.compare_checkpoints import empty_model, fill
    from titanlite.cli.hub.export_weights import open_source
    from titanlite.models import get_spec

    device = choose_device(arguments.device)
    precision = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if precision not in _PRECISIONS:
        raise bad_flag("--dtype", f"expected one of {', '.join(_PRECISIONS)}, got {precision}")
    dtype = getattr(torch, precision)
    path = to_path(arguments.checkpoint)
    source = open_source(
        path, ema=arguments.ema, trust_code=arguments.trust_code, base=arguments.base
    )
    spec = get_spec(source.family)
    args = source.args
    if arguments.context:
        args = replace(args, max_seq_len=arguments.context)
    tokenizer, data = _tokenizer(source, arguments.tokenizer)
    if tokenizer.vocab_size > args.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size:,} entries, and the model of {source.path} "
            f"only {args.vocab_size:,}: give the model's own as --tokenizer"
        )
    model = empty_model(spec, args, device)
    fill(model, model.state_dict(), source.read, dtype, device)
    stop_ids = set(tokenizer.stop_ids)
    generation = Path(str(source.path)) / "generation_config.json"
    if source.is_hf and generation.is_file():
        # A folder of Hugging Face's layout may name more.
        more = parse_json(generation.read_bytes()).get("eos_token_id")
        stop_ids |= {more} if isinstance(more, int) else set(more or [])
    size = human_count(sum(parameter.numel() for parameter in model.parameters()))
    step = f", step {source.step}" if source.step else ""
    return LoadedModel(
        path=str(source.path),
        step=source.step,
        head=spec.head,
        model=model,
        tokenizer=tokenizer,
        limit=args.max_seq_len,
        device=device,
        chat_template=data.get("chat_template"),
        template_date=data.get("template_date"),
        stop_ids=frozenset(stop_ids),
        summary=f"{source.path}: {source.family}{step}, {size} parameters in {str(dtype)[6:]} on "
        f"{device}, context {args.max_seq_len:,} tokens",
    )


def choose_device(given: str | None) -> torch.device:
    """Return a device by name, else a GPU if there is one. Raises ConfigError."""
    import torch

    name = given or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise bad_flag("--device", f"{name}: {reason}") from None


def _tokenizer(source: Source, path: str | None) -> tuple[Tokenizer, dict[str, Any]]:
    """Return also the section `data` of the weights' run.

    Raises DataError, and CheckpointError for a tokenizer that the weights were not trained with.
    """
    given = path
    data = {"template_date": str(date.today())}
    if source.manifest is not None:
        config = loads(str(source.manifest.config.get("toml", "")))
        given = given or config.get("model", {}).get("tokenizer_path")
        data = config.get("data", data)
    if given is None and (source.manifest is None or "toml" not in source.manifest.config):
        given = source.tokenizer
        if given is None:
            raise DataError(f"{source.path} names no tokenizer: give one as --tokenizer PATH")
    tokenizer = load_tokenizer(given or BUNDLED_TOKENIZER_NAME, source.family)
    trained = source.manifest and source.manifest.fingerprints.get("tokenizer")
    if trained and trained != tokenizer.fingerprint[:16]:
        raise CheckpointError(
            f"{source.path} was trained with another tokenizer than {given or 'the bundled one'}: "
            "give that one as --tokenizer PATH"
        )
    return tokenizer, data
