"""Seeds faults into a copy of titanlite, one after the other, and tells whether the quick tests catch each.

    python tests/seeded_faults.py [NAME ...] [--list] [--all-tests]

A fault that no test catches is a missing quick test. Exit code 1: at least one survived. About ten seconds a fault.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: Seconds for the tests of one fault; a fault that makes ranks wait for each other forever counts as caught.
TIMEOUT = 300.0
HANGS = -1


class Fault(NamedTuple):
    """One fault: text of a file of titanlite that is replaced."""

    name: str
    #: Below `titanlite/`.
    file: str
    #: (old text, new text); each old text occurs once in the file.
    edits: tuple[tuple[str, str], ...]
    #: Quick tests that catch it, below `tests/`.
    tests: tuple[str, ...]


def _fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, file, ((old, new),), tests)


FAULTS = (
    # The step
    _fault(
        "loss-divided-by-local-tokens",
        "step.py",
        "self.loss_sum(batch) / tokens",
        "self.loss_sum(batch) / count_valid(batch.labels)",
        "training/test_grid.py::test_a_cell_trains_as_transformers_does",
    ),
    _fault(
        "tokens-not-reduced",
        "step.py",
        "dist.all_reduce(counts)",
        "counts = counts.clone()",
        "training/test_grid.py::test_a_cell_trains_as_transformers_does",
    ),
    _fault(
        "norm-not-reduced",
        "step.py",
        "loss, norm = sums[0], sums[1].sqrt()",
        "loss, norm = sums[0], square.sqrt()",
        "training/test_layer_norms.py",
    ),
    _fault(
        "norm-of-shared-weights-counted-twice",
        "optim/gradients.py",
        ".square() / copies for",
        ".square() for",
        "training/test_layer_norms.py",
    ),
    _fault(
        "clip-does-nothing",
        "optim/gradients.py",
        "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "torch.ones_like(norm)",
        "optim/test_optim.py",
    ),
    _fault(
        "gradients-accumulate-over-steps",
        "step.py",
        "self.optimizer.zero_grad(set_to_none=True)",
        "pass",
        "training/test_grid.py::test_another_row_trains_as_transformers_does",
    ),
    _fault(
        "stop-flag-not-combined",
        "step.py",
        "counts[0], counts[1] > 0",
        "counts[0], torch.full_like(counts[1], stop) > 0",
        "training/test_stop.py::test_a_signal_to_one_rank_stops_all_at_the_same_step_and_nothing_is_lost",
    ),
    _fault("bad-step-updates-weights", "optim/optimizer.py", "elif bool(ok):", "else:", "optim/test_optim.py"),
    _fault(
        "bad-step-updates-weights-fused",
        "optim/optimizer.py",
        "(~ok).to(torch.float32)",
        "torch.zeros_like(ok, dtype=torch.float32)",
        "optim/test_optim.py",
    ),
    _fault(
        "skips-without-a-budget",
        "guard.py",
        "if len(self._spent) > self.max_skips:",
        "if False:",
        "training/test_guard.py",
    ),
    _fault(
        "validation-of-one-rank",
        "step.py",
        "model.train()\n    dist.all_reduce(sums)",
        "model.train()",
        "parallel/test_tensor.py::test_validation_and_norms_by_layer_are_those_of_one_rank",
    ),
    _fault(
        "padding-counts-as-tokens",
        "loss.py",
        "return (labels != IGNORE).sum()",
        "return torch.tensor(labels.numel(), device=labels.device)",
        "training/test_grid.py::test_another_row_trains_as_transformers_does",
    ),
    # The optimizer
    _fault(
        "weight-decay-off",
        "optim/optimizer.py",
        "weight_decay=settings.weight_decay",
        "weight_decay=0.0",
        "optim/test_optim.py",
    ),
    _fault(
        "learning-rate-of-the-step-before",
        "optim/learning_rate.py",
        "step - self.began)",
        "step - self.began - 1)",
        "optim/test_optim.py",
    ),
    _fault("warm-up-ignored", "optim/schedule.py", "if done < warmup:", "if done < 0:", "optim/test_optim.py"),
    # The model
    _fault(
        "no-causal-mask",
        "models/layers.py",
        "q, k, v, is_causal=True",
        "q, k, v, is_causal=False",
        "models/test_llama.py",
    ),
    _fault(
        "document-mask-ignored",
        "models/layers.py",
        "return document_mask(doc_ids)",
        "return document_mask(torch.zeros_like(doc_ids))",
        "models/test_document_attention.py",
    ),
    _fault(
        "positions-run-on-over-documents",
        "models/layers.py",
        "return index - (index * document_begins(doc_ids)).cummax(1).values",
        "return index.expand_as(doc_ids)",
        "models/test_document_attention.py",
    ),
    _fault(
        "last-token-predicts-another-document",
        "data/best_fit.py",
        "last = min(end + 1, int(corpus.offsets[document + 1]))",
        "last = end + 1",
        "data/test_best_fit.py",
    ),
    _fault(
        "rope-frequencies",
        "models/layers.py",
        "dtype=torch.float32) / head_dim)",
        "dtype=torch.float32) / (head_dim + 2))",
        "models/test_llama.py",
    ),
    _fault("rope-not-scaled", "models/layers.py", "* plain / scaling.factor", "* plain", "models/test_llama.py"),
    _fault(
        "norm-without-eps",
        "models/layers.py",
        ".add_(eps).rsqrt_()",
        ".rsqrt_()",
        "models/test_ops.py",
        "models/test_llama.py",
    ),
    _fault(
        "flops-without-attention",
        "models/llama.py",
        "- embedding) + attention",
        "- embedding)",
        "models/test_shapes.py",
    ),
    _fault(
        "weights-depend-on-sharding",
        "parallel/init.py",
        "_block_seed(seed, name, block))",
        "_block_seed(seed, name, block - first // ROWS))",
        "parallel/test_init.py",
    ),
    # Parallelism
    _fault(
        "gradients-not-reduced",
        "step.py",
        "self.sync_every or index == len(batches) - 1",
        "self.sync_every and index == len(batches) - 1",
        "training/test_step_effects.py",
    ),
    _fault(
        "parameters-not-cast",
        "parallel/fsdp.py",
        "        param_dtype=param_dtype,",
        "        param_dtype=None,",
        "training/test_step_effects.py",
    ),
    _fault(
        "gradients-reduced-in-the-parameters-type",
        "parallel/fsdp.py",
        "reduce_dtype=reduce_dtype",
        "reduce_dtype=param_dtype",
        "training/test_step_effects.py",
    ),
    _fault(
        "tensor-plan-of-one-linear",
        "models/llama.py",
        '"feed_forward.w3": "colwise"',
        '"feed_forward.w3": "rowwise"',
        "parallel/test_tensor.py",
    ),
    _fault(
        "labels-of-another-part-of-the-sequence",
        "parallel/context.py",
        "cp_rank.part(batch.labels), batch",
        "batch.labels.chunk(cp_rank.degree, 1)[cp_rank.rank], batch",
        "parallel/test_context.py",
    ),
    _fault(
        "sequence-parts-in-wrong-order", "parallel/context.py", "*reversed(tails)", "*tails", "parallel/test_context.py"
    ),
    _fault(
        "pipeline-stages-in-wrong-order",
        "parallel/pipeline_split.py",
        "stages = tuple(tuple(names[first:last]) for first, last in itertools.pairwise(bounds))",
        "stages = tuple(tuple(names[first:last]) for first, last in itertools.pairwise(bounds))[::-1]",
        "parallel/test_pipeline.py",
    ),
    _fault(
        "pipeline-divides-twice",
        "parallel/pipeline.py",
        "scale_grads=False",
        "scale_grads=True",
        "training/test_grid.py::test_a_cell_trains_as_transformers_does",
    ),
    _fault(
        "recomputation-draws-other-numbers",
        "parallel/activation_checkpoint.py",
        '"preserve_rng_state": preserve_rng_state',
        '"preserve_rng_state": False',
        "parallel/test_activation_checkpoint.py",
    ),
    _fault(
        "float8-scales-stale",
        "parallel/float8.py",
        "wrapper._precomputed_scale = scale",
        "wrapper._precomputed_scale = scale if wrapper._precomputed_scale is None else wrapper._precomputed_scale",
        "parallel/test_float8.py",
    ),
    _fault(
        "float8-filter-ignored",
        "parallel/float8_choice.py",
        "for part in filters if matches(part, name)]",
        "for part in filters if not part]",
        "parallel/test_float8.py",
    ),
    # The data
    _fault(
        "labels-not-shifted",
        "data/packing.py",
        "= window[1:]",
        "= window[:-1]",
        "data/test_packing.py",
    ),
    _fault(
        "epochs-in-one-order",
        "data/packing.py",
        "_mix_int((epoch + 1) * _GAMMA",
        "_mix_int(_GAMMA",
        "data/test_packing.py",
    ),
    _fault(
        "all-ranks-read-the-same",
        "data/loader.py",
        "(self.rank - step[0]) % self.dp_degree ::",
        "-step[0] % self.dp_degree ::",
        "data/test_loader.py",
    ),
    _fault(
        "position-off-by-one",
        "data/loader.py",
        "self._position = self._loaded = position",
        "self._position = self._loaded = position + 1",
        "data/test_loader.py",
    ),
    _fault(
        "skip-ranges-ignored",
        "data/loader.py",
        "self.skip = skip_ranges.merged(skip)",
        "self.skip = ()",
        "data/test_loader.py",
    ),
    _fault(
        "no-bos",
        "data/tokenizer/__init__.py",
        "[[self.bos_id], ids, [self.eos_id]]",
        "[ids, [self.eos_id]]",
        "data/test_packing.py",
    ),
    _fault(
        "prefetch-reorders-batches",
        "data/prefetch.py",
        "return step.batches",
        "return step.batches[::-1]",
        "data/test_prefetch.py",
    ),
    # Checkpoints
    Fault(
        "manifest-before-shards",
        "checkpoint/manager.py",
        (
            (
                '                with dcp_errors(f"saving {folder}"):',
                "                on_rank_0(self._world, lambda: self._publish(folder, manifest, False), group)\n"
                '                with dcp_errors(f"saving {folder}"):',
            ),
            (
                "on_rank_0(self._world, lambda: self._publish(folder, manifest, proven), group)",
                "on_rank_0(self._world, lambda: [(folder / 'manifest.json').unlink(), "
                "self._publish(folder, manifest, proven)], group)",
            ),
        ),
        ("failures/test_durable.py", "checkpoint/test_save_load.py"),
    ),
    _fault(
        "hash-not-checked",
        "checkpoint/manifest.py",
        "if digest is not None and (found",
        "if digest is None and (found",
        "checkpoint/test_save_load.py::test_one_flipped_bit_anywhere_leads_to_the_older_one",
    ),
    _fault(
        "momentum-not-restored",
        "checkpoint/storage.py",
        'state.update(_strip(tensors, "optimizer."))',
        'state = {name: value.mul_(0) if name.endswith("exp_avg") else value for name, value in state.items()}',
        "checkpoint/test_save_load.py",
    ),
    _fault(
        "generators-not-restored",
        "checkpoint/load.py",
        "set_rng_state(rng, self.world.device)",
        "pass",
        "checkpoint/test_save_load.py",
    ),
    _fault(
        "parts-read-from-wrong-places",
        "checkpoint/storage.py",
        "_StorageInfo(p.file, p.start, p.length)",
        "_StorageInfo(p.file, 0, p.length)",
        "checkpoint/test_save_load.py",
    ),
    _fault(
        "checkpoint-of-another-run-accepted",
        "checkpoint/load.py",
        "if manifest.fingerprints.get(name) != value\n        }",
        "if not name\n        }",
        "training/test_run.py::test_other_text_tokenizer_order_or_model_is_refused",
    ),
    _fault(
        "suspect-checkpoint-stays",
        "checkpoint/manager.py",
        "quarantine(step_folder(self.root, step), reason)",
        "pass",
        "training/test_guard_runs.py::test_a_checkpoint_with_bad_weights_is_left_for_the_one_before",
    ),
    Fault(
        "rollback-keeps-the-moments",
        "checkpoint/manager.py",
        (
            (
                "        loaded = loaded or self._loader.load(model, optimizer, rollback=True)",
                "        moments = copy.deepcopy(optimizer.state_dict())\n"
                "        loaded = loaded or self._loader.load(model, optimizer, rollback=True)\n"
                "        optimizer.load_state_dict(moments)",
            ),
        ),
        ("training/test_guard_runs.py::test_a_rollback_is_the_run_that_left_the_stretch_out",),
    ),
    Fault(
        "retention-deletes-the-newest",
        "checkpoint/retention.py",
        (
            ("sorted(steps)[: -config.keep_latest_k]", "sorted(steps)[config.keep_latest_k :]"),
            ("*sorted(valid)[-latest:]", "*sorted(valid)[:latest]"),
        ),
        ("checkpoint/test_retention.py",),
    ),
    _fault(
        "async-save-copies-too-late",
        "checkpoint/async_save.py",
        "copied = None if self._overlap else copy()",
        "copied = None",
        "checkpoint/test_async_save.py",
    ),
    _fault(
        "update-does-not-wait-for-the-copy",
        "checkpoint/async_save.py",
        "self._copied.wait()",
        "pass",
        "checkpoint/test_async_save.py",
    ),
    _fault("lock-ignored", "runs/lock.py", "if self._is_alive(path, holder):", "if False:", "runs/test_lock.py"),
    # Config and process
    _fault(
        "unknown-key-accepted",
        "config/entries.py",
        "problems.append(unknown(name, source",
        "(unknown(name, source",
        "config/test_errors.py",
    ),
    _fault(
        "upper-layer-ignored",
        "config/load.py",
        "self.values.update(layer)",
        "self.values = {**layer, **self.values}",
        "config/test_layers.py",
    ),
    _fault(
        "alias-of-another-key",
        "config/aliases.py",
        '"training.local_batch_size": "training.batch_size"',
        '"training.local_batch_size": "training.global_batch_size"',
        "config/test_names.py",
    ),
    _fault(
        "accumulation-ignored",
        "derive.py",
        "max(wanted // at_once, 1)",
        "1",
        "config/test_derive.py",
    ),
    _fault(
        "exit-code-swallowed",
        "main.py",
        "os._exit(code)",
        "os._exit(0)",
        "training/test_run.py::test_wrong_config_exits_2_before_torch_is_imported",
    ),
    _fault(
        "exit-code-of-another-worker",
        "torchrun.py",
        "return min(codes - {exit_codes.LOST_PEER, exit_codes.ERROR} or codes, default=None)",
        "return max(codes, default=None)",
        "scripts/test_torchrun.py",
    ),
)


def problems_of(fault: Fault, root: Path = ROOT) -> list[str]:
    """Return why a fault cannot be seeded: an old text that is not there exactly once, or a test file that is gone."""
    found = [f"no tests/{test}" for test in fault.tests if not (root / "tests" / test.partition("::")[0]).is_file()]
    path = root / "titanlite" / fault.file
    if not path.is_file():
        return [*found, f"no titanlite/{fault.file}"]
    text = path.read_text()
    counts = ((old, text.count(old)) for old, _ in fault.edits)
    return found + [f"titanlite/{fault.file} holds {count} times: {old}" for old, count in counts if count != 1]


@contextmanager
def seeded(fault: Fault, root: Path) -> Iterator[None]:
    """Seed a fault into the tree `root` inside."""
    path = root / "titanlite" / fault.file
    before = path.read_text()
    text = before
    for old, new in fault.edits:
        text = text.replace(old, new)
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def copy_tree(target: Path) -> None:
    """Copy all files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def run_tests(root: Path, tests: list[str]) -> tuple[int, str]:
    """Run quick tests in the tree `root` up to the first failure; return pytest's exit code and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow and not soak", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=root,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return HANGS, ""
    return done.returncode, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to seed; none: all")
    parser.add_argument("--list", action="store_true", help="list the faults and their tests")
    parser.add_argument("--all-tests", action="store_true", help="run all quick tests, not only the expected ones")
    options = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no fault {', '.join(unknown)}")
    faults = [known[name] for name in options.names] or list(FAULTS)
    if options.list:
        for fault in faults:
            print(f"{fault.name:42} {fault.file:36} {' '.join(fault.tests)}")
        return 0
    if problems := [f"{fault.name}: {problem}" for fault in faults for problem in problems_of(fault)]:
        print("\n".join(problems), file=sys.stderr)
        return 2
    survived = []
    with tempfile.TemporaryDirectory(prefix="titanlite-faults-") as folder:
        root = Path(folder)
        copy_tree(root)
        for fault in faults:
            started = time.monotonic()
            tests = ["tests"] if options.all_tests else [f"tests/{test}" for test in fault.tests]
            with seeded(fault, root):
                code, output = run_tests(root, tests)
            failed = re.search(r"^(?:FAILED|ERROR) (\S+?\[.*?\](?= - |$)|\S+)", output, re.MULTILINE)
            if code == HANGS:
                result = f"caught: the tests did not end within {TIMEOUT:.0f} s"
            elif failed is None:
                result = f"SURVIVED: pytest ended with {code}"
            elif run_tests(root, [failed[1]])[0] == 1:
                result = f"SURVIVED: {failed[1]} fails without the fault too"
            else:
                result = f"caught by {failed[1]}"
            if result.startswith("SURVIVED"):
                survived.append(fault.name)
            print(f"{fault.name:42} {time.monotonic() - started:4.0f} s  {result}", flush=True)
    print(f"{len(faults) - len(survived)} of {len(faults)} faults caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
