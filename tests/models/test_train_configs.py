"""Every shipped TOML is accepted, builds its model, and says the truth about it in its comments."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from tests.parallel.test_scale import fake_world
from titanlite.config.load import load_file
from titanlite.config.not_implemented import not_implemented
from titanlite.derive import RunConfig
from titanlite.fit import fitted
from titanlite.loss import cross_entropy_sum
from titanlite.models import LlamaArgs, count_parameters, get_spec
from titanlite.parallel.activation_checkpoint import ActivationStats, apply_ac, is_by_op, trace_block
from titanlite.parallel.fsdp import DTYPES, apply_fsdp, set_gradient_sync
from titanlite.parallel.wrapping import choose_groups

FOLDER = Path(__file__).parents[2] / "train_configs"
SIZES = {
    "llama2_7b": ("llama2", "7B"),
    "llama2_13b": ("llama2", "13B"),
    "llama2_70b": ("llama2", "70B"),
    "llama3_8b": ("llama3", "8B"),
    "llama3_70b": ("llama3", "70B"),
    "llama3_1_8b": ("llama3", "3.1-8B"),
    "llama3_1_70b": ("llama3", "3.1-70B"),
    "llama3_1_405b": ("llama3", "3.1-405B"),
    "llama3_2_1b": ("llama3", "3.2-1B"),
    "llama3_2_3b": ("llama3", "3.2-3B"),
}
CPU = torch.device("cpu")


def resolved(path: Path, ranks: int) -> RunConfig:
    config = load_file(path)
    assert not_implemented(config) == []
    run = fitted(config, ranks)
    assert run.warnings == ()
    return run


@dataclass(frozen=True)
class Memory:
    """What one GPU needs, in bytes, counted from shapes; where FSDP divides nothing by another kind of parallelism."""

    run: RunConfig
    args: LlamaArgs

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.run.batch.micro_batch_size * self.run.batch.seq_len

    @cached_property
    def kept(self) -> ActivationStats:
        """One block, as traced. The kernels of CUDA keep for attention what the CPU's does: q, k, v, the output, one
        number per token and head."""
        spec, one = get_spec(self.run.model.name), replace(self.args, n_layers=1)
        with torch.device("meta"):
            model = spec.build(one)
        tokens = (self.run.batch.micro_batch_size, self.run.batch.seq_len)
        dtype = DTYPES[self.run.training.mixed_precision_param]
        return trace_block(model, spec.block_names(one), self.run.activation_checkpoint, tokens, CPU, dtype)

    @property
    def state(self) -> float:
        """Weights, gradients and both moments of AdamW, in fp32."""
        return 16 * count_parameters(self.args) / self.run.mesh.weight_shards

    @property
    def activations(self) -> int:
        return self.args.n_layers * self.kept.block_bytes

    @property
    def logits(self) -> int:
        """Three fp32 tensors: log-probabilities, and the gradients before and behind the log-softmax."""
        return 12 * self.args.n_vocab * self.tokens

    @property
    def peak(self) -> float:
        """The larger of two moments: the loss's backward, and the last block's."""
        args = self.args
        hidden = 2 * args.dim * self.tokens
        head = args.n_vocab * args.dim
        block = (count_parameters(args) - count_parameters(replace(args, n_layers=1))) // max(args.n_layers - 1, 1)
        # The last block and the head stay gathered; the last norm keeps its input and output.
        loss = self.activations + self.logits + 2 * hidden + 2 * (block + head)
        # In bf16 the block, its gradients and the block before, in fp32 the gradients on their way; ten gradients and
        # recomputed tensors of the model's width.
        backward = self.activations - self.kept.block_bytes + 10 * block + 10 * hidden
        return self.state + max(loss, backward)


def test_there_is_one_file_for_each_size_and_the_debug_model() -> None:
    assert set(SIZES) | {"debug_model"} <= {path.stem for path in FOLDER.glob("*.toml")}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_the_model_builds_with_the_counted_parameters(path: Path) -> None:
    run = resolved(path, ranks=2)
    args = run.model_args(tokenizer_size=2048)
    with torch.device("meta"):
        module = get_spec(run.model.name).build(args)
        logits = module(torch.zeros(1, run.max_seq_len, dtype=torch.int64))
    assert sum(p.numel() for p in module.parameters()) == count_parameters(args)
    assert logits.shape == (1, run.max_seq_len, args.n_vocab)


def described(name: str) -> tuple[RunConfig, LlamaArgs, str]:
    """A file's run on the hardware it names, its model, and its comments as one line."""
    path = FOLDER / f"{name}.toml"
    comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    gpus = re.search(r"Hardware: (\d+|one) GPUs? of", comments)
    assert gpus
    run = resolved(path, ranks=1 if gpus[1] == "one" else int(gpus[1]))
    return run, run.model_args(), comments


def number(pattern: str, comments: str) -> float:
    found = re.search(pattern, comments)
    assert found, pattern
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize("name", SIZES)
def test_a_files_name_model_and_stated_numbers_agree(name: str) -> None:
    run, args, comments = described(name)
    assert (run.model.name, run.model.flavor) == SIZES[name]
    assert run.job.dump_folder == f"./outputs/{name}"
    assert f"{count_parameters(args):,} parameters" in comments
    batch = run.batch
    assert f"{batch.global_batch_size} * {batch.seq_len:,} = {batch.tokens_per_step:,} tokens" in comments


@pytest.mark.parametrize("name", SIZES)
def test_the_stated_memory_is_that_of_the_traced_block(name: str) -> None:
    run, args, comments = described(name)
    activations = run.activation_checkpoint
    assert activations.mode == "full" if args.dim >= 8192 else is_by_op(activations)
    # Whole gradients in fp32 on every GPU, which are not counted, would often not fit.
    assert run.training.gradient_sync == "every" or run.mesh.weight_shards == 1

    memory = Memory(run, args)
    per_token: dict[str, float] = {
        r"a token's activations take ([\d.]+) MB": memory.activations,
        r"its logits ([\d.]+) MB": memory.logits,
        r"keeps ([\d.]+) of [\d.]+ MB": memory.activations,
        r"keeps [\d.]+ of ([\d.]+) MB": args.n_layers * memory.kept.plain_bytes,
    }
    for pattern, size in per_token.items():
        assert number(pattern, comments) == pytest.approx(size / memory.tokens / 1e6, rel=0.02), pattern
    total: dict[str, float] = {
        r"([\d.,]+) GB of weights, gradients": 16 * count_parameters(args),
        rf"so {memory.tokens:,} tokens ([\d.]+) GB": memory.activations + memory.logits,
        r"at most about ([\d.]+) GB": memory.peak,
    }
    if run.mesh.world_size > 1:
        total[rf"over {run.mesh.world_size} GPUs is ([\d.]+) GB each"] = memory.state
    for pattern, size in total.items():
        assert number(pattern, comments) == pytest.approx(size / 1e9, rel=0.02), pattern
    available = number(r"GPUs? of (\d+) GB", comments)
    assert memory.peak / 1e9 < 0.85 * available


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(SIZES) - {"llama3_1_8b", "llama3_1_70b"}))  # shapes of their own
def test_the_memory_of_sharded_steps_is_what_the_files_count_on(name: str) -> None:
    """Four layers of each model, two micro-batches on tensors without data, the fake ranks of the file's hardware."""
    run, args, _ = described(name)
    args = replace(args, n_layers=4)
    spec, ranks = get_spec(run.model.name), run.mesh.world_size
    with fake_world(0, ranks) as world:
        with torch.device("meta"):
            model = spec.build(args)
        apply_ac(model, spec.block_names(args), run.activation_checkpoint, CPU)
        training, mesh = run.training, run.mesh
        groups = choose_groups(model, training.fsdp_units, training.fsdp_min_params, spec.fsdp_units(args))
        assert training.reshard_after_forward == "default" and mesh.weight_shards == mesh.dp_shard
        apply_fsdp(
            model,
            groups,
            world.build_mesh(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard),
            param_dtype=DTYPES[training.mixed_precision_param],
            reduce_dtype=DTYPES[training.mixed_precision_reduce],
            prefetch=training.prefetch,
        )
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device=CPU)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

            def step(micro_batches: int) -> None:
                for index in range(micro_batches):
                    tokens = torch.zeros(run.batch.micro_batch_size, run.batch.seq_len, dtype=torch.int64)
                    set_gradient_sync(model, run.training.gradient_sync == "every" or index == micro_batches - 1)
                    cross_entropy_sum(model(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()

            step(1)  # the optimizer's state appears
            tracker = FSDPMemTracker(model, optimizer)
            with tracker:
                step(2)
    peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert Memory(run, args).peak == pytest.approx(peak, rel=0.03)
