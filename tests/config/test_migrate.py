"""`titanlite config migrate` on files as people have them."""

from __future__ import annotations

import math
import os
import re
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from titanlite.cli import migrate as module
from titanlite.cli.aws_fsdp import migrate_arguments
from titanlite.cli.main import main
from titanlite.cli.migrate import migrate_file, migrate_text, write_in_place
from titanlite.config.errors import ConfigError
from titanlite.config.load import load_file, read_text
from titanlite.resolve.load import resolve

LLAMA_8B = (Path(__file__).parent / "snapshots" / "llama3_8b_of_2025.toml").read_text()


def migrated(text: str, path: Path = Path("run.toml")) -> str:
    return migrate_text(text, path).text


def test_a_file_of_2025_means_the_same_and_keeps_its_comments_beside_the_keys():
    migration = migrate_text(LLAMA_8B, Path("run.toml"))
    before, after = (read_text(text, Path("run.toml")) for text in (LLAMA_8B, migration.text))
    assert before[1] == after[1] == []
    ours, theirs = (
        replace(run, job=replace(run.job, dialect="2024"), toml="", notes=(), warnings=())
        for run in (resolve(before[0], 32)[1], resolve(after[0], 32)[1])
    )
    assert ours == theirs
    assert set(re.findall(r"# (\w.*)", LLAMA_8B)) <= set(re.findall(r"# (\w.*)", migration.text))
    assert '# from the hub\ntokenizer_path = "./assets/hf/Llama-3.1-8B"\n' in migration.text
    assert 'split_points = ["layers.1", "layers.3", "layers.4"]\n' in migration.text
    kinds = [change.kind for change in migration.changes]
    assert [
        kinds.count(kind) for kind in ("rewritten", "without equivalent", "defaults written out")
    ] == [16, 3, 3]
    lines = [int(change.where.removeprefix("run.toml:")) for change in migration.changes]
    assert lines == sorted(lines)
    assert len(migration.report("run.toml").splitlines()) == 1 + len(lines)


def test_file_without_later_names_is_left_to_the_letter():
    text = 'training.steps=3 # x\nmodel = { name="llama3" }\n\n\n[optimizer]\n\tlr   = 1e-3'
    migration = migrate_text(text, Path("run.toml"))
    assert migration.text == text
    assert migration.changes == ()


def test_dialect_2026_is_written_out():
    text = migrated('[job]\n# newer files\ndialect = "2026"\n[training]\nsteps = 3\n')
    assert "dialect =" not in text
    assert "# newer files" in text
    config, problems = read_text(text, Path("run.toml"))
    assert problems == []
    assert config.value("checkpoint.keep_latest_k") == 10
    assert config.value("job.dialect") == "2024"


def test_defaults_that_a_base_sets_are_not_written_over_it(tmp_path):
    (tmp_path / "base.toml").write_text(
        "[checkpoint]\nkeep_latest_k = 3\n[training]\nbatch_size = 6\n"
    )
    run = tmp_path / "run.toml"
    run.write_text(
        'job.extends = ["base.toml"]\nparallelism.pipeline_parallel_microbatch_size = 2\n'
    )
    _, migration = migrate_file(str(run))
    run.write_text(migration.text)
    config = load_file(run)
    assert "keep_latest_k" not in migration.text
    assert config.value("checkpoint.keep_latest_k") == 3
    assert config.value("experimental.pipeline_parallel_microbatches") == 3


def test_two_names_of_one_thing_become_one():
    text = migrated(
        '[job]\ndialect="2024"\n[training]\nbatch_size = 4\n# twice\nlocal_batch_size = 4 # as '
        "above\n"
    )
    assert text.count("batch_size") == 1
    assert "# twice\n# as above\n" in text


def test_variables_stay_in_a_rewritten_value(monkeypatch):
    monkeypatch.setenv("PART", "rng")
    monkeypatch.setenv("SIZE", "8B")
    text = migrated(
        '[model]\nflavor = "${SIZE}"\n[checkpoint]\nexclude_from_loading = "${PART},$${x}"\n'
    )
    assert 'flavor = "${SIZE}"' in text
    assert 'exclude_from_loading = ["${PART}", "$${x}"]' in text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[fault_tolerance]\nenable = true", "TorchFT is not part of titanlite"),
        ('[float8]\nscaling_type_input = "delayed"', "gone from torchao"),
        ('[model]\nconverters = ["nvfp4"]', 'no converter "nvfp4"'),
        ('[optimizer]\nname = "SGD"', "expected one of"),
        ("[training]\nfrobnicate = [1, # one\n2]", "unknown key"),
        ("[training]\nlogging_freq = 5", "here this is metrics.log_freq"),
        ("[flux]\nclip = 1\n[flux.deep]\nx = 1", "unknown section"),
        ("[[flux]]\nclip = 1", "unknown key"),
        ("flux = 3", "unknown key outside any section"),
    ],
)
def test_what_has_no_equivalent_becomes_a_comment_with_the_reason(line, reason):
    text = f"{line}  # why\n"
    migration = migrate_text(text, Path("run.toml"))
    assert read_text(migration.text, Path("run.toml"))[1] == []
    rows = migration.text.split("\n")
    assert any(row.startswith("# no equivalent: ") and reason in row for row in rows)
    assert "# why" in migration.text
    values = [
        part.partition("=")[2].split("#")[0].strip() for part in line.split("\n") if "=" in part
    ]
    assert all(any(row.startswith("#") and value in row for row in rows) for value in values)
    assert all(change.kind != "rewritten" for change in migration.changes)
    assert any(reason in change.text for change in migration.changes)


@pytest.mark.parametrize(
    ("text", "key", "code"),
    [
        (
            '[optimizer]\nlr = "3e-4"\n[training]\nlocal_batch_size = 4\n',
            "optimizer.lr",
            "wrong-type",
        ),
        (
            "[training]\nlocal_batch_size = 4\nbatch_size = 8\n",
            "training.batch_size",
            "given-twice",
        ),
        (
            "[training]\nlocal_batch_size = 0\n",
            "training.local_batch_size (training.batch_size)",
            "out-of-range",
        ),
        (
            "[parallelism]\npipeline_parallel_microbatch_size = 3\n",
            (
                "parallelism.pipeline_parallel_microbatch_size "
                "(experimental.pipeline_parallel_microbatches)"
            ),
            "does-not-fit",
        ),
        ("[training\n", "", "broken-toml"),
        ('job.extends = ["nowhere.toml"]\n', "job.extends", "unreadable"),
        ("training = 3\n", "training", "wrong-type"),
        ("[model]\ndim = 256\n[training]\nlocal_batch_size = 4\n", "model.dim", "unknown-key"),
    ],
)
def test_other_mistakes_are_errors(text, key, code):
    with pytest.raises(ConfigError) as caught:
        migrate_text(text, Path("run.toml"))
    assert [(problem.key, problem.code) for problem in caught.value.problems] == [(key, code)]


def test_a_text_that_would_mean_something_else_is_never_handed_out(monkeypatch):
    monkeypatch.setattr(module._Rewriter, "text", lambda self: "[training]\nbatch_size = 4\n")
    with pytest.raises(
        RuntimeError, match="without changing its meaning: .*optimizer.implementation"
    ):
        migrate_text("[training]\nlocal_batch_size = 4\n", Path("run.toml"))


def test_line_ends_and_byte_order_mark_stay(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[training]\r\nlocal_batch_size = 4 # x\r\n")
    _, migration = migrate_file(str(path))
    assert migration.text.startswith("\ufeff[training]\r\nbatch_size = 4 # x\r\n")
    assert "\n" not in migration.text.replace("\r\n", "")


def test_in_place_keeps_the_old_file_and_its_mode(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nlocal_batch_size = 4\n")
    path.chmod(0o640)
    assert main(["config", "migrate", str(path), "--check"]) == 1
    assert path.read_text() == "[training]\nlocal_batch_size = 4\n"
    assert main(["config", "migrate", str(path), "--in-place"]) == 0
    assert (tmp_path / "run.toml.orig").read_text() == "[training]\nlocal_batch_size = 4\n"
    assert path.read_text().startswith("[training]\nbatch_size = 4\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["run.toml", "run.toml.orig"]
    assert main(["config", "migrate", str(path), "--check"]) == 0
    assert main(["config", "migrate", str(path), "--in-place"]) == 0
    capsys.readouterr()
    path.write_text("[training]\nlocal_batch_size = 8\n")
    assert main(["config", "migrate", str(path), "--in-place"]) == 2
    assert f"{path}.orig" in capsys.readouterr().err
    assert path.read_text() == "[training]\nlocal_batch_size = 8\n"


def test_in_place_follows_a_link_and_leaves_nothing_behind_on_failure(tmp_path, monkeypatch):
    (tmp_path / "real.toml").write_text("a")
    (tmp_path / "link.toml").symlink_to("real.toml")
    assert write_in_place(tmp_path / "link.toml", "b") == tmp_path / "real.toml.orig"
    assert (tmp_path / "link.toml").is_symlink()
    assert (tmp_path / "real.toml").read_text() == "b"
    (tmp_path / "real.toml.orig").unlink()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match="No space left"):
        write_in_place(tmp_path / "real.toml", "c")
    assert (tmp_path / "real.toml").read_text() == "b"
    assert sorted(os.listdir(tmp_path)) == ["link.toml", "real.toml"]


def test_wrong_words_are_errors(tmp_path):
    (tmp_path / "run.toml").write_text("[metrics]\ndisable_color_printing = true\n")
    path = str(tmp_path / "run.toml")
    for words in (
        [],
        [f"{path}.none"],
        [path, "--training.steps", "3"],
        [path, "--check", "--in-place"],
    ):
        assert main(["config", "migrate", *words]) == 2
    assert main(["config", "migrate", path, "--aws-fsdp", "--lr=1"]) == 2


AWS_LLAMA2 = """
    --max_context_width=4096 --num_key_value_heads=8 # 70b: 8
    --intermediate_size=28672 --hidden_width=8192 \\
    --num_layers=80 --num_heads=64 --model_type=llama_v2 --vocab_size 32000
    --tokenizer="hf-internal-testing/llama-tokenizer" --checkpoint_freq=50 --validation_freq=500
    --max_steps=5000 --checkpoint_dir=./checkpoints --dataset='c4' --dataset_config_name='en'
    --resume_from_checkpoint=./checkpoints --train_batch_size=1 --val_batch_size=3
    --sharding_strategy="hybrid" --offload_activations=1 --limit_all_gathers=1 --resid_pdrop 0.1
    --lr_decay_style plateau --plateau 0.4 --min_lr 1e-6 --bogus 3
"""


def test_arguments_of_the_aws_samples_become_a_file_with_their_defaults(tmp_path):
    migration = migrate_arguments(AWS_LLAMA2)
    path = tmp_path / "aws.toml"
    path.write_text(migration.text)
    config = load_file(path)
    d = config.sections
    assert (d.model.name, d.model.vocab_size) == ("llama2", 32000)
    assert d.model.overrides == {
        "dim": 8192,
        "n_layers": 80,
        "n_heads": 64,
        "n_kv_heads": 8,
        "ffn_dim": 28672,
    }
    assert (d.training.seq_len, d.training.batch_size, d.training.steps, d.training.seed) == (
        4096,
        1,
        5000,
        12345,
    )
    assert (d.training.mixed_precision_param, d.training.mixed_precision_reduce) == (
        "bfloat16",
        "bfloat16",
    )
    assert (d.optimizer.lr, d.optimizer.weight_decay, d.optimizer.beta2) == (1e-4, 0.2, 0.95)
    s = d.lr_scheduler
    assert (s.style, s.decay_type, s.plateau_ratio, s.min_lr, s.warmup_ratio) == (
        "fsdp",
        "plateau",
        0.4,
        1e-6,
        0.0032,
    )
    v = d.validation
    assert (v.enable, v.freq, v.steps, v.batch_size) == (True, 500, 10, 3)
    assert (d.checkpoint.enable_checkpoint, d.checkpoint.folder, d.checkpoint.interval) == (
        True,
        "./checkpoints",
        50,
    )
    assert (d.activation_checkpoint.mode, d.activation_checkpoint.offload) == ("full", True)
    assert (d.metrics.log_freq, d.metrics.log_style) == (1, "aws_fsdp")
    schedule = resolve(config, 8)[1].schedule
    assert (schedule.total_steps, schedule.warmup_steps, schedule.plateau_steps) == (5000, 16, 2000)
    left = [
        change.text.split("=")[0]
        for change in migration.changes
        if change.kind == "without equivalent"
    ]
    names = (
        "tokenizer dataset_config_name resume_from_checkpoint sharding_strategy limit_all_gathers "
        "resid_pdrop bogus"
    )
    assert set(left) == {f"--{name}" for name in names.split()}
    assert "# --sharding_strategy=hybrid" in migration.text


def test_arguments_of_the_aws_samples_without_a_model_keep_titanlites():
    config, _ = read_text(
        migrate_arguments("--max_steps=30 --lr=1e-3 --bf16 0").text, Path("x.toml")
    )
    assert (config.value("model.flavor"), config.value("training.steps")) == ("debugmodel", 30)
    assert config.value("training.mixed_precision_param") == "float32"
    assert config.value("checkpoint.enable_checkpoint") is False
    assert math.isclose(config.value("optimizer.lr"), 1e-3)
    epochs, _ = read_text(migrate_arguments("--epochs 2").text, Path("x.toml"))
    assert epochs.value("training.epochs") == 2


@pytest.mark.parametrize(
    ("words", "key", "code"),
    [
        ("max_steps=3", "", "bad-flag"),
        ("--max_steps=many", "--max_steps", "bad-flag"),
        ("--lr 0.1x --warmup 0.5", "--lr", "bad-flag"),
        ("--tokenizer='x", "", "bad-flag"),
        ("--train_batch_size=0", "training.batch_size", "out-of-range"),
        ("--lr=1e-6 --min_lr=1e-5", "lr_scheduler.min_lr", None),
    ],
)
def test_wrong_arguments_are_errors(words, key, code):
    with pytest.raises(ConfigError) as caught:
        migrate_arguments(words)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert code in (None, problem.code)
