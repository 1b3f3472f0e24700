"""Files with the keys and values of torchtitan's own give its models, schedules and batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from titanlite.config.dialect import LATER_MODELS
from titanlite.config.errors import ConfigError
from titanlite.config.load import read_text
from titanlite.models import LlamaArgs
from titanlite.models.llama import LLAMA3
from titanlite.optim.schedule import learning_rate
from titanlite.resolve.load import check_config, resolve
from titanlite.run.config import RunConfig

HERE = Path("run.toml")


@dataclass(frozen=True)
class Original:
    """What a file trains in torchtitan."""

    family: str
    flavor: str
    dim: int
    layers: int
    rope_factor: float | None
    gpus: int
    batch: int
    seq_len: int
    lr: float
    warmup: int
    steps: int
    tensor: int = 1
    decay: int | None = None

    def rate(self, step: int, *, later: bool) -> float:
        """Learning rate of a step, counted from 1, as torchtitan computes it from the steps
        before.
        """
        before = step - 1
        total = self.steps
        warmup = self.warmup
        if not later:  # train.py of autumn 2024: linear_warmup_linear_decay
            if before < warmup:
                return self.lr * (before + 1) / (warmup + 1)
            left = (total - warmup) - (before - warmup)
            return self.lr * (1 - ((total - warmup) - left) / (total - warmup))
        # 0.2.2, components/lr_scheduler.py: linear_warmup_stable_decay, with a virtual step after
        # the last
        decay = total - warmup if self.decay is None else min(self.decay, total - warmup)
        held = warmup + (total + 1 - warmup - decay)
        if before < warmup:
            return self.lr * (before + 1) / warmup
        return self.lr * (1.0 if before < held else 1 - (before + 1 - held) / decay)


AUTUMN = {
    "debug_model": Original("llama3", "debugmodel", 256, 8, None, 8, 8, 2048, 8e-4, 2, 10),
    "llama2_70b": Original("llama2", "70B", 8192, 80, None, 64, 16, 4096, 1.5e-4, 200, 1000, 8),
    "llama3_405b": Original("llama3", "405B", 16384, 126, None, 128, 2, 8192, 8e-5, 600, 3000, 8),
}
LATER = {
    "debug_model": Original("llama3", "debugmodel", 256, 6, 8.0, 8, 8, 2048, 8e-4, 2, 10, decay=8),
    "llama3_405b": Original("llama3", "405B", 16384, 126, 8.0, 128, 2, 8192, 8e-5, 600, 3000, 8),
}
CELLS = [("2024", name) for name in AUTUMN] + [("0.2.x", name) for name in LATER]


def original(version: str, name: str) -> Original:
    return AUTUMN[name] if version == "2024" else LATER[name]


def text(version: str, name: str) -> str:
    """A file as that version shipped it."""
    o = original(version, name)
    float8 = name.endswith("405b")
    fields = {
        **vars(o),
        "float8": str(float8).lower(),
        "converters": '["float8"]' if float8 else "[]",
        "decay_ratio": "" if o.decay is None else f"decay_ratio = {o.decay / o.steps}",
        "mode": "none" if o.layers < 10 else "full",
    }
    return (
        (Path(__file__).parent / "snapshots" / f"torchtitan_{version}.toml")
        .read_text()
        .format(**fields)
    )


def shown(text: str) -> str:
    """What `titanlite config show --changed` prints of a file."""
    return read_text(text, HERE)[0].to_toml(defaults=False)


def run_of(toml: str, gpus: int) -> RunConfig:
    config, problems = read_text(toml, HERE)
    assert problems == []
    return resolve(config, gpus)[1]


def trained(run: RunConfig) -> tuple[object, ...]:
    """What must not depend on a file's spelling."""
    return run.model, run.batch, run.schedule, run.optimizer, run.mesh, run.profiling, run.float8


@pytest.mark.parametrize(("version", "name"), CELLS)
def test_a_file_of_torchtitan_gives_its_model_schedule_and_batch(version: str, name: str) -> None:
    o = original(version, name)
    later = version != "2024"
    run = run_of(text(version, name), o.gpus)
    args = run.model_args()
    assert (args.dim, args.n_layers) == (o.dim, o.layers)
    scaling = LLAMA3.flavors["3.1-8B"].rope_scaling if o.rope_factor else None
    if (version, name) == (
        "2024",
        "llama3_405b",
    ):  # on purpose: published with scaling
        assert args.rope_scaling is not None
        without = text(version, name).replace("[model]", '[model]\nrope_scaling = "none"')
        args = run_of(without, o.gpus).model_args()
    assert args.rope_scaling == scaling
    assert args.rope_theta == (1e4 if o.family == "llama2" else 5e5)
    assert run.batch.global_batch_size == o.batch * o.gpus // o.tensor
    assert run.batch.tokens_per_step == run.batch.global_batch_size * o.seq_len
    for step in (1, o.warmup, o.warmup + 1, o.warmup + 2, o.steps // 2, o.steps):
        rate = learning_rate(run.schedule, run.optimizer.lr, step)
        assert rate == pytest.approx(o.rate(step, later=later), rel=1e-12), step
    for again in (run.toml, shown(text(version, name))):
        assert trained(run_of(again, o.gpus)) == trained(run), "the saved config and the shown one"


def test_a_run_from_a_later_file_says_at_its_start_what_that_means() -> None:
    notes = "\n".join(note.text for note in run_of(text("0.2.x", "debug_model"), 8).notes)
    assert (
        'model.flavor "debugmodel" of torchtitan 0.2.x is "3.1-debugmodel": 6 layers and RoPE '
        "scaled by 8"
    ) in notes
    assert (
        'the warm-up of torchtitan 0.2.x is n / W at step n: lr_scheduler.style = "titan-0.2"'
        in notes
    )
    assert not any("0.2.x" in note.text for note in run_of(text("2024", "debug_model"), 8).notes)


def model_text(name: str, flavor: str, rest: str = "") -> str:
    """A file of torchtitan 0.2.x for a model."""
    model = f'[model]\nname = "{name}"\nflavor = "{flavor}"\n'
    return f"{model}[training]\nlocal_batch_size = 1\n{rest}"


def test_models_of_the_later_dialect_are_what_their_notes_say() -> None:
    for (name, there), later in LATER_MODELS.items():
        config, problems = read_text(model_text(name, there), HERE)
        assert not problems
        notes = "\n".join(note.text for note in config.notes)
        assert f'model.flavor "{there}" of torchtitan 0.2.x is "{later.flavor}"' in notes
        assert later.difference in notes
        for key, value in later.settings.items():
            assert dict(config.entries())[key] == value
            assert config.source(key).kind == "dialect"
            assert key in notes


@pytest.mark.parametrize("flavor", ["debugmodel_flex_attn", "8B_varlen"])
def test_a_flavor_with_masked_attention_is_the_plain_one_within_documents(flavor: str) -> None:
    text = model_text("llama3", flavor)
    run = run_of(text, 1)
    plain = run_of(model_text("llama3", flavor.partition("_")[0]), 1)
    assert run.model_args() == plain.model_args()
    assert run.data.mask_documents
    assert not plain.data.mask_documents
    assert trained(run_of(shown(text), 1)) == trained(run)
    own = run_of(f"{text}[data]\nmask_documents = false\n", 1)
    assert not own.data.mask_documents
    with pytest.raises(ConfigError, match=f'llama3 has no flavor "{flavor}"'):
        run_of(text.replace("local_batch_size", "batch_size"), 1)


def test_what_a_person_says_of_the_model_wins_over_the_file_s_dialect(tmp_path: Path) -> None:
    def args(model: str, *flags: str) -> LlamaArgs:
        (tmp_path / "run.toml").write_text(f'[job]\ndialect = "2026"\n[model]\n{model}\n')
        argv = [f"--job.config_file={tmp_path / 'run.toml'}", *flags]
        return check_config(argv, training=False)[1].model_args()

    assert args('rope_scaling = "none"\noverrides.n_layers = 8') == args(
        'name = "llama3"\nflavor = "debugmodel"\nrope_scaling = "none"\noverrides.n_layers = 8'
    )
    assert args('rope_scaling = "none"').rope_scaling is None
    assert args("overrides.n_layers = 8").n_layers == 8
    assert args("", "--model.flavor=8B") == args('flavor = "8B"') == args('flavor = "3.1-8B"')
    assert args('name = "llama2"').n_layers == 8


def test_a_later_file_over_an_older_one_keeps_its_model_when_it_is_shown(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('[model]\nflavor = "8B"\n')
    top = 'job.extends = ["base.toml"]\n[training]\nlocal_batch_size = 4\n'
    config, _ = read_text(top, tmp_path / "run.toml")
    assert config.value("model.flavor") == "3.1-8B"
    text = config.to_toml(defaults=False)
    assert 'flavor = "3.1-8B"' in text
    assert read_text(text, tmp_path / "run.toml")[0].value("model.flavor") == "3.1-8B"
