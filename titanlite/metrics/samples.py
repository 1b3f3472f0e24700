"""Fixed prompts that the model continues while it trains: in the log, in samples.jsonl and in
TensorBoard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.callbacks import Callback
from titanlite.config.errors import unfit
from titanlite.config.run_sections import Sample
from titanlite.data.tokenizer import Tokenizer
from titanlite.models.generate import Sampling, generate
from titanlite.runs.jsonl import MetricsLog
from titanlite.step import do_nothing
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer

FILE = "samples.jsonl"


class PromptSampler(Callback):
    """Samples the prompts of `[sample]` every `freq` steps.

    All ranks run the model together; rank 0 writes.

    limit: the longest sequence in tokens. multiple: tensor-parallel ranks. folder: where
    samples.jsonl is written. Raises ConfigError for a prompt that is too long.
    """

    def __init__(
        self, section: Sample, tokenizer: Tokenizer, limit: int, multiple: int, folder: Path
    ) -> None:
        self._section, self._tokenizer, self._limit, self._multiple = (
            section,
            tokenizer,
            limit,
            multiple,
        )
        #: Takes a step and texts by tag.
        self.show: Callable[[int, Mapping[str, str]], object] = do_nothing
        self._log = MetricsLog(folder / FILE, verbatim=True)
        self._prompts = [tokenizer.encode(prompt, bos=True) for prompt in section.prompts]
        most = max(map(len, self._prompts)) + section.max_tokens + multiple - 1
        if most > limit:
            message = (
                f"the longest prompt and sample.max_tokens need {most} tokens, and the model's "
                f"sequence has {limit}"
            )
            raise unfit("sample.prompts", message, "shorten them, or lower sample.max_tokens")

    def on_start(self, trainer: Trainer) -> None:
        """Continue after the last step of the checkpoint, or begin a new file."""
        if trainer.parts.world.rank == 0:
            self._log.path.parent.mkdir(parents=True, exist_ok=True)
            self._log.truncate_after(trainer.step)

    def on_rollback(self, trainer: Trainer) -> None:
        self.on_start(trainer)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        step, parts = trainer.step, trainer.parts
        if step % self._section.freq and step < trainer.steps:
            return
        trainer.phase("sample")
        written: list[list[int]] = [[] for _ in self._prompts]
        ends = self._tokenizer.stop_ids
        for ids in generate(
            parts.model,
            self._prompts,
            max_tokens=self._section.max_tokens,
            limit=self._limit,
            sampling=Sampling(self._section.temperature, seed=self._section.seed),
            stop_ids=ends,
            head=parts.run.spec.head,
            vocab=self._tokenizer.vocab_size,
            multiple=self._multiple,
            together=True,
        ):
            for row, new in zip(written, ids, strict=True):
                row += [] if new is None else [new]
        trainer.phase("log")
        if parts.world.rank == 0:
            self._write(step, written, ends)

    def _write(self, step: int, written: list[list[int]], ends: Collection[int]) -> None:
        shown: dict[str, str] = {}
        for number, (prompt, ids) in enumerate(zip(self._section.prompts, written, strict=True), 1):
            stopped = ids[-1] in ends
            text = self._tokenizer.decode(ids[: len(ids) - stopped])
            row: dict[str, Any] = {"step": step, "prompt": prompt, "text": text, "tokens": len(ids)}
            self._log.write({**row, "finish": "stop" if stopped else "length"})
            logger.info(f"sample at {step}: {prompt!r} → {text!r}")
            shown[f"samples/{number}"] = f"**{prompt}**{text}"
        self.show(step, shown)
