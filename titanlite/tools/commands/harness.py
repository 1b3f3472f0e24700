"""`titanlite eval`: EleutherAI's lm-evaluation-harness (package `lm_eval`) on a checkpoint, in this
process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from titanlite import exit_codes
from titanlite.checkpoint.paths import to_path
from titanlite.config.errors import ConfigError, Problem, bad_flag
from titanlite.tools import at_least
from titanlite.tools.cli import Commands, no_flags
from titanlite.tools.commands.checkpoint import check_weights
from titanlite.tools.commands.loading import LoadedModel, add_arguments, load_model
from titanlite.tools.commands.runs import to_json
from titanlite.utils import Style, escape

PACKAGE = "lm_eval"
#: New tokens of a task that names no number, as in the harness's own models.
_MAX_NEW = 256


def add_command(commands: Commands) -> None:
    """Add `eval` to argparse."""
    parser = commands.add_parser(
        "eval",
        help="run lm-evaluation-harness on a checkpoint",
        description="Run tasks of lm-evaluation-harness (pip install lm_eval) with the weights of "
        "a checkpoint, on one device. `titanlite evaluate` measures the loss on the "
        "held-out text of a config instead.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    add = parser.add_argument
    add(
        "--tasks",
        required=True,
        metavar="NAMES",
        help="tasks or groups, separated by commas: hellaswag,arc_easy",
    )
    add("--include-path", metavar="FOLDER", help="folder with task files (YAML) of your own")
    add(
        "--num-fewshot",
        type=at_least(0),
        metavar="N",
        help="examples before each question (default: the task's own)",
    )
    add(
        "--limit",
        type=at_least(1),
        metavar="N",
        help="only the first N documents of each task, to try things out",
    )
    add(
        "--batch-size",
        type=at_least(1),
        default=8,
        metavar="N",
        help="sequences at once (default: 8)",
    )
    add(
        "--json",
        action="store_true",
        help="print a JSON object with the results and versions of the tasks",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, flags: Sequence[str], _: Style) -> tuple[str, int]:
    no_flags(flags)
    check_weights(to_path(arguments.checkpoint))
    if importlib.util.find_spec(PACKAGE) is None:
        message = "lm-evaluation-harness is not installed: pip install lm_eval"
        raise ConfigError([Problem("command line", "--tasks", message, code="missing-package")])
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    manager, tasks = TaskManager(include_path=arguments.include_path), arguments.tasks.split(",")
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        message = (
            f"no task {', '.join(unknown)}: `lm_eval ls tasks` lists them, --include-path adds "
            "yours"
        )
        raise bad_flag("--tasks", message)
    loaded = load_model(arguments)
    print(escape(loaded.summary), file=sys.stderr)
    with contextlib.redirect_stdout(sys.stderr):  # it prints its progress
        found = simple_evaluate(
            model=harness_model(loaded, arguments.batch_size),
            tasks=manager.match_tasks(tasks),
            num_fewshot=arguments.num_fewshot,
            limit=arguments.limit,
            task_manager=manager,
            log_samples=False,
        )
    if arguments.json:
        about = {"checkpoint": loaded.path, "step": loaded.step, "limit": arguments.limit}
        return to_json(
            {**about, "results": found["results"], "versions": found["versions"]}
        ), exit_codes.DONE
    tables = [make_table(found), *([make_table(found, "groups")] if found.get("groups") else [])]
    return "\n".join(tables).rstrip(), exit_codes.DONE


def harness_model(loaded: LoadedModel, batch_size: int) -> Any:
    """Return the harness's `LM` over a model.

    A request that is too long loses tokens on the left, as in HFLM.
    """
    import torch
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import (
        handle_stop_sequences,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm

    from titanlite.training.generate import Sampling, TextStream, generate

    model, codec, limit = loaded.model, loaded.tokenizer, loaded.limit

    class TitanliteLM(TemplateLM):
        tokenizer_name = codec.fingerprint
        prefix_token_id = codec.bos_id
        eot_token_id = codec.eos_id
        max_length = limit

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return codec.encode(string, bos=add_special_tokens is not False)

        @torch.no_grad()
        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> Any:
            """Return for each (texts, ids before, ids) the log-likelihood of the ids, and whether
            greedy gives them.
            """
            found: dict[int, tuple[float, bool]] = {}
            for batch in _batches(
                [len(before) + len(ids) for _, before, ids in requests], batch_size, disable_tqdm
            ):
                rows = [(requests[n][1] + requests[n][2])[-limit - 1 :] for n in batch]
                tokens = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.int64)
                for at, row in enumerate(rows):
                    tokens[at, : len(row) - 1] = torch.tensor(row[:-1])
                logits = model(tokens.to(loaded.device))
                for at, (number, row) in enumerate(zip(batch, rows, strict=True)):
                    length = len(row) - 1
                    ids = torch.tensor(requests[number][2][-length:], device=loaded.device)
                    logs = logits[at, length - len(ids) : length].float().log_softmax(-1)
                    likely = logs.gather(1, ids.unsqueeze(1)).sum().item()
                    found[number] = likely, bool((logs.argmax(-1) == ids).all())
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
            return [found[number] for number in range(len(requests))]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """Return the log-likelihood of each text, in windows of the context; BOS counts as its
            first token.
            """
            windows, owner = [], []
            for number, (text,) in enumerate(request.args for request in requests):
                ids = self.tok_encode(text)
                for before, part in map(
                    make_disjoint_window, get_rolling_token_windows(ids, codec.bos_id, limit, 1)
                ):
                    windows.append((None, before, part))
                    owner.append(number)
            totals = [0.0] * len(requests)
            for number, (likely, _) in zip(
                owner, self._loglikelihood_tokens(windows, disable_tqdm), strict=True
            ):
                totals[number] += likely
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            texts: dict[int, str] = {}
            prompts = [self.tok_encode(request.args[0]) for request in requests]
            groups: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(number)
            for group in groups.values():
                options = normalize_gen_kwargs(requests[group[0]].args[1], _MAX_NEW)
                until = handle_stop_sequences(
                    options.get("until"), eos=codec.decode([codec.eos_id])
                )
                most = options["max_gen_toks"]
                if most >= limit:
                    message = f"the model has {limit} tokens, and a task writes {most}"
                    raise ConfigError([Problem("command line", "--context", message)])
                temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
                sampling = Sampling(temperature, options.get("top_k", 0), options.get("top_p", 1.0))
                for places in _batches(
                    [len(prompts[number]) for number in group], batch_size, disable_tqdm
                ):
                    batch = [group[place] for place in places]
                    rows = [prompts[number][-(limit - most) :] for number in batch]
                    for number, text in zip(
                        batch, written(rows, most, sampling, until), strict=True
                    ):
                        texts[number] = postprocess_generated_text(text, until, None)
                        self.cache_hook.add_partial(
                            "generate_until", requests[number].args, texts[number]
                        )
            return [texts[number] for number in range(len(requests))]

    def written(
        rows: list[list[int]], most: int, sampling: Sampling, until: list[str]
    ) -> list[str]:
        """Return the continuation of each row of ids; all end once every text holds a stop
        sequence.
        """
        hidden = {
            *loaded.stop_ids,
            *codec.special_tokens.values(),
        }  # as the harness' own models hide them
        streams, texts, done = (
            [TextStream(codec, row) for row in rows],
            [""] * len(rows),
            [False] * len(rows),
        )
        steps = generate(
            model,
            rows,
            max_tokens=most,
            limit=limit,
            sampling=sampling,
            stop_ids=loaded.stop_ids,
            head=loaded.head,
            vocab=codec.vocab_size,
        )
        for ids in steps:
            for row, one in enumerate(ids):
                ended = one is None or one in loaded.stop_ids
                seen = [] if one is None or one in hidden else [one]
                texts[row] += streams[row].add(seen, whole=ended)
                done[row] = ended or any(stop in texts[row] for stop in until)
            if all(done):
                steps.close()
        return [
            text + stream.add([], whole=True) for text, stream in zip(texts, streams, strict=True)
        ]

    def _batches(lengths: Sequence[int], size: int, quiet: bool) -> Iterator[list[int]]:
        """Yield the numbers of requests of like length, the longest first: what needs too much
        memory fails at once.
        """
        order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        for begin in tqdm(range(0, len(order), size), disable=quiet):
            yield order[begin : begin + size]

    return TitanliteLM()
