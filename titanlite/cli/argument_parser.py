"""argparse for `titanlite`: words in any order, and errors that name the command and the nearest
word.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from titanlite.config.aliases import known_names
from titanlite.config.errors import bad_flag, nearest
from titanlite.config.unsupported_keys import NAMES

Commands = Any  # argparse._SubParsersAction[argparse.ArgumentParser]

BASE = "the weights under adapters (default: where the adapters say that they are)"
EMA = "use the average of the weights that a checkpoint holds (default: the weights themselves)"
FILES = "one or more TOML files, later ones over earlier ones; also looked up in train_configs/"
#: Help of a command that takes keys of the config.
FLAGS = (
    "Any further --section.key VALUE is laid over the file, as for train.py: --training.steps 100, "
    "--no-training.compile, --model.overrides.n_layers 4."
)
#: Keys that an error names at most.
_KEYS_SHOWN = 3


def add_files(parser: Parser) -> None:
    """Let a command take config files; `files_of` has them."""
    parser.add("files", FILES, "CONFIG", nargs="*")


def files_of(arguments: argparse.Namespace) -> list[str]:
    """Return the flag that names the config files of a command."""
    return ["--job.config_file", *arguments.files] if arguments.files else []


def no_flags(flags: Sequence[str]) -> None:
    """Refuse `--section.key` flags for a command that takes none."""
    if flags:
        raise bad_flag(flags[0], "this command takes no --section.key flags")


def new_command(
    commands: Commands,
    run: Callable[..., Any],
    name: str,
    help: str,
    description: str,
    epilog: str = "",
) -> Parser:
    """Add a command, which a function runs; return its parser.

    run: gets the arguments, with `flags` (`--section.key`) and `style`; returns the text to print,
    perhaps with an exit code.
    """
    parser: Parser = commands.add_parser(
        name, help=help, description=description, epilog=epilog, allow_abbrev=False
    )
    parser.set_defaults(run=run, takes_keys=parser.takes_keys)
    return parser


def add_group(commands: Commands, name: str, help: str) -> Commands:
    """Add a command with commands below it; return what takes those."""
    group = commands.add_parser(name, help=help, allow_abbrev=False)
    group.set_defaults(run=lambda _: group.format_help().rstrip())
    return group.add_subparsers(title="commands", metavar="COMMAND")


def add_to_group(
    actions: Commands, run: Callable[..., Any], help: str, more: str = "", epilog: str = ""
) -> Parser:
    """Add a function's command, under its name, to a group of `add_group`.

    Its description is the help and what `more` says.
    """
    name = run.__name__.strip("_").replace("_", "-")
    return new_command(actions, run, name, help, f"{help[0].upper()}{help[1:]}. {more}", epilog)


#: Commands and options of published versions → what does their work now.
GONE = {
    "completion": "editors complete keys by train_configs/titanlite.schema.json (docs/config.md)",
    "run": "`titanlite train CONFIG` trains on all GPUs of this machine",
    "compare": "docs/runs.md has a script that puts runs side by side",
    "drill": "`titanlite prove CONFIG` kills and resumes runs of a tiny copy, and compares them",
    "evaluate": "`titanlite eval CHECKPOINT [CONFIG]` measures held-out text",
    "help": "`titanlite COMMAND --help` shows the help of a command",
    "data fetch": (
        "`hf download ID --repo-type dataset --local-dir FOLDER` copies a data set; other URLs are "
        "copied by the client of their store"
    ),
    "data at-step": "`titanlite data peek CONFIG --bad-step N` ranks the documents by loss",
    "data stats": "`titanlite data peek CONFIG` begins with the figures of the text",
    "benchmark": (
        "`titanlite sweep` trains points that differ in training.compile or float8, and `titanlite "
        "runs` shows their speed and losses (docs/sweep.md)"
    ),
    "checkpoint convert": "`titanlite export` writes Hugging Face and PEFT folders",
    "checkpoint inspect": "`jq . step-N/manifest.json` prints step, tensors, files and config",
    "checkpoint ls --json": "the file manifest.json of each step has it",
    "checkpoint rm": "delete the folder step-N; a run passes over one that is half deleted",
    "convert": (
        "`titanlite export` writes Hugging Face and PEFT folders, and "
        "checkpoint.initial_load_path reads those and torchtitan's"
    ),
    "config diff": "`diff` compares what `titanlite config show` prints of each file",
    "config explain --changed": "`titanlite config show --changed` prints them",
    "config show --aws-fsdp": "docs/from-aws-fsdp.md has the key of each argument",
    "data peek --rank": "--first N has the number of a sequence, as in guard.jsonl",
    "data peek --step": "--first N has the number of a sequence, as in guard.jsonl",
    "data verify": "`titanlite data prepare` with the same arguments checks and mends its folder",
    "doctor --json": "the exit status tells whether there are errors",
    "eval --nproc-per-node": "`torchrun --nproc_per_node 8 -m titanlite eval` starts several ranks",
    "import": (
        "`titanlite train --checkpoint.initial_load_path FOLDER` starts from weights of Hugging "
        "Face, PEFT or torchtitan as they are"
    ),
    "ladder --at": "name the config of the size",
    "ladder --gpu": "`titanlite plan` tells time and memory of a run",
    "ladder --gpus": "set training.global_batch_size",
    "ladder --json": "points.json has the results",
    "launch sagemaker": "docs/launch/sagemaker.md has a script for its SDK",
    "mup check --device": "CUDA_VISIBLE_DEVICES= chooses the CPU",
    "plan --allow": "give --float8.enable_float8_linear to plan --search",
    "plan --html": "the text and --json have the memory by part",
    "plan --price": "multiply the hours by the number of machines and your price",
    "plan --rank": "a plan is of the rank that needs most",
    "plan --tokens": "give the key --training.tokens N",
    "plan --write": "copy the file that --search prints",
    "push --base": "`titanlite export --base`, then push the folder",
    "push --step": "name the checkpoint, as RUN/checkpoint/step-N",
    "runs --out": "TensorBoard overlays the curves of runs",
    "sample --batch-size": "the texts of a command are sampled one after the other",
    "sample --chat-template": "set data.chat_template, or put chat_template.jinja by the tokenizer",
    "sample --greedy": "--temperature 0 takes the likeliest token",
    "sample --prompt-file": "`xargs -d '\\n' -a FILE titanlite sample CHECKPOINT` takes its lines",
    "sweep --json": "results.json has the results",
    "config schema": "it is the file train_configs/titanlite.schema.json, in the package too",
    "config template": "`titanlite config explain` has each key with its default and meaning",
    "config migrate": "`titanlite config show FILE` prints the config with titanlite's own names",
    "tokenizer": "`hf download OWNER/NAME --include 'tokenizer*' --local-dir FOLDER` fetches one",
    "lr": "`titanlite config check` names the schedule; metrics.jsonl has the rate of each step",
}


class Parser(argparse.ArgumentParser):
    """The parser of `titanlite`, of a group of its commands, or of one command.

    Options may stand before, between and behind the other words. An error shows the command's
    usage.
    """

    _inside = False

    def add(
        self, name: str, help: str | None = None, value: str | None = None, **more: Any
    ) -> None:
        """Add a word of the command line, or an option.

        value: what stands for it in the help. An option with a name and a help alone is a switch.
        more: for argparse.
        """
        if value is not None:
            more["metavar"] = value
        elif name.startswith("-") and not more:
            more["action"] = "store_true"
        self.add_argument(name, help=help, **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments; words that belong to nothing end the process with 2."""
        if self._inside:  # argparse calls this from below
            return super().parse_known_args(args, namespace)
        self._inside = True
        try:
            if self.commands():
                known, rest = super().parse_known_args(args, namespace)
            else:
                known, rest = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False
        if rest:
            self._refuse(rest)
        return known, rest

    def commands(self) -> dict[str, Parser]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    @property
    def takes_keys(self) -> bool:
        """Return whether the command takes `--section.key` flags; its help says so."""
        return FLAGS in f"{self.description} {self.epilog}"

    def _gone(self, word: str) -> str:
        """Return what replaces a word of earlier versions."""
        return GONE.get(f"{self.prog} {word}".removeprefix("titanlite "), "")

    def _refuse_gone(self, word: str) -> None:
        if instead := self._gone(word):
            self.error(f"`{self.prog} {word}` is gone: {instead}")

    def unknown_command(self, word: str, known: Sequence[str]) -> NoReturn:
        self._refuse_gone(word)
        if word.endswith(".toml"):
            hint = f"a config comes after a command, as in `{self.prog} train {word}`"
        elif close := nearest(word, known):
            hint = f"did you mean `{self.prog} {close[0]}`?"
        else:
            hint = f"commands: {', '.join(known)}"
        self.error(f"unknown command {word!r}: {hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self._refuse_gone(str(value))
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.unknown_command(str(value), list(action.choices))
        super()._check_value(action, value)

    def _refuse(self, words: Sequence[str]) -> NoReturn:
        options = [word for word in words if word.startswith("-") and word != "-"]
        if not options:
            self.error(f"unexpected words: {' '.join(words)}")
        self.error("\n  ".join(self._about_option(option) for option in options))

    def _about_option(self, word: str) -> str:
        option = word.partition("=")[0]
        if instead := self._gone(option):
            return f"{option} is gone: {instead}"
        name = option.lstrip("-").replace("-", "_")
        keys = sorted(key for key in known_names() if key.rpartition(".")[2] == name)
        if not keys and name in NAMES["other_trainers"]:
            keys = NAMES["other_trainers"][name].split(" and ")
        if self.takes_keys and keys:
            shown = " or ".join(f"--{key}" for key in keys[:_KEYS_SHOWN])
            return (
                f"unknown option {option}: a key of the config has its section before it, as "
                f"{shown}"
            )
        own = [known.lstrip("-") for known in self._option_string_actions]
        close = nearest(option.lstrip("-"), own)
        hint = (
            f"the nearest is --{close[0]}" if close else f"`{self.prog} --help` lists the options"
        )
        return f"unknown option {option}: {hint}"
