"""`titanlite parity`: one batch and the same weights through titanlite and another program."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from titanlite import exit_codes
from titanlite.checkpoint.hf_files import holds_weights
from titanlite.cli.argument_parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.contrib.evidence.tiny import tiny_copy
from titanlite.plan.memory import with_vocabulary
from titanlite.resolve.load import check_config

#: Exit status where a tensor differs.
DIFFERENT = 1
#: How far two programs may be apart: the largest difference as a share of the largest value.
#: Numbers in float32 are 1.2e-7 apart, and the programs sum them in other orders. Over the variants
#: of tests/models/test_families.py that makes 2.1e-6 of activations and 3.2e-6 of gradients.
TOLERANCE = 1e-5
#: Sequences, and tokens of each.
_BATCH = (2, 64)


def add_command(commands: Commands) -> None:
    """Add `parity` to argparse."""
    parser = new_command(
        commands,
        _run,
        "parity",
        "compare a model with that of transformers or torchtitan, module by module",
        "Run one batch of random tokens through titanlite and through another program, with the "
        "same weights in float32. What each module gets and returns, the loss and the gradients "
        "are compared, and the first tensor that differs is named.",
        f"{FLAGS} Exit status: {exit_codes.DONE} if all are equal up to rounding, {DIFFERENT} if "
        "not.",
    )
    add_files(parser)
    weights = (
        "a Hugging Face folder or a checkpoint (default: random weights of the config's model, "
        "made small)"
    )
    parser.add("--weights", weights, "FOLDER", type=Path)
    python = (
        "compare with torchtitan 0.2.2, by Python of an environment that has it (default: compare "
        "with transformers)"
    )
    parser.add("--torchtitan", python, "PYTHON")


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    import torch

    from titanlite.cli.hub.compare_checkpoints import read_transformers
    from titanlite.cli.hub.export_weights import convert
    from titanlite.contrib.evidence import module_differences as programs

    config, run = check_config([*files_of(arguments), *arguments.flags], training=False)
    if not arguments.weights:
        run = tiny_copy(config, 1, "").run
    spec = run.spec
    args = with_vocabulary(run).model_args()
    # Without losses of routers both programs have the same one.
    off = {name: 0.0 for name in ("aux_loss", "z_loss") if name in vars(args)}
    args = replace(args, **off)
    with tempfile.TemporaryDirectory(prefix="titanlite-parity-") as scratch:
        work = Path(scratch)
        folder = arguments.weights or work / "weights"
        if not arguments.weights:
            programs.write_random(spec, args, folder)
        elif not holds_weights(folder):
            folder = convert(folder, work / "weights", "hf")
        model = programs.read_model(folder, spec, args)
        shape = _BATCH[0], min(_BATCH[1], args.max_seq_len)
        tokens = torch.randint(args.vocab_size, shape, generator=torch.Generator())
        ours = programs.trace_ours(model, tokens)
        names: dict[str, str] = {}
        if arguments.torchtitan:
            program, theirs = programs.trace_torchtitan(
                arguments.torchtitan, model, spec, args, tokens, work
            )
        else:
            program = f"transformers {version('transformers')}"
            other = read_transformers(folder)
            names = programs.module_pairs(spec, args, other)
            theirs = programs.trace_transformers(other, spec, args, tokens, work / "gradients")
    found = programs.compare(ours, theirs)
    lines = [f"{spec.name} in titanlite and {program}, {list(shape)} tokens, float32:"]
    for kind, differences in found.items():
        worst = max(differences)
        lines.append(
            f"  {len(differences)} {kind}: largest difference {worst.absolute:.1e}, "
            f"{worst.relative:.1e} of the largest value, in {worst.name}"
        )
    before = ""
    for one in chain(*found.values()):
        if one.relative > TOLERANCE:
            module, comma, word = one.name.partition(",")
            lines += [
                f"first difference: {one.name}, there {names.get(module, module)}{comma}{word}",
                f"  {one.ours} here, {one.theirs} there, largest difference {one.absolute:.1e}, "
                f"{one.relative:.1e} of the largest value",
                f"  equal just before: {before or 'nothing'}",
            ]
            return "\n".join(lines), DIFFERENT
        before = one.name
    lines.append(f"equal: no difference above {TOLERANCE:.0e} of the largest value")
    return "\n".join(lines), exit_codes.DONE
