"""Commands and configs on folders that leave a choice of text, and texts that are read too
often.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import Command
from tests.support.texts import CLONE, TOKENIZER, write_files
from titanlite.config.errors import ConfigError
from titanlite.data.dataset_builder import TextReader
from titanlite.data.sequences import PackedDataset
from titanlite.data.text_report import file_lines, file_warnings, pass_warnings
from titanlite.resolve.load import load_config


def test_configs_and_commands_refuse_before_any_work(tmp_path: Path, command: Command) -> None:
    clone = write_files(tmp_path / "clone", *CLONE)
    keys = [
        f"--training.dataset_path={clone}",
        "--validation.enable=true",
        f"--validation.dataset_path={clone}",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config("debug_model.toml", 1, keys)
    assert [problem.key for problem in caught.value.problems] == [
        "training.dataset_path",
        "validation.dataset_path",
    ]
    assert all(problem.code == "unclear-text" for problem in caught.value.problems)
    chosen = ["--data.split=train", "--validation.split=test"]
    run = load_config("debug_model.toml", 1, [*keys, *chosen])
    held_out = TextReader(run.data, TOKENIZER, 2304).held_out(run.validation, 8)[""]
    assert isinstance(held_out, PackedDataset)
    assert held_out.listing is not None
    assert [Path(name).name for name in held_out.listing.files] == [Path(CLONE[-1]).name]
    source = f"--data.source=[{{path='{clone}'}}]"
    with pytest.raises(ConfigError, match=r"data\.source\[0\]\.path"):
        load_config("debug_model.toml", 1, [source])
    prepare = ["prepare", clone, "--out", tmp_path / "out"]
    for words in (["peek", keys[0]], prepare):
        code, printed = command(*words)
        assert code == 2
        assert "of several splits" in printed
        assert "2 files of parquet, split train" in printed
    code, printed = command(*prepare, "--split=train", "--workers=1")
    assert code == 0
    assert "2 files of parquet" in printed
    assert "LICENSE.txt, README.md (documentation)" in printed
    assert "2 documents" in printed


def test_the_start_report_names_files_and_warns(tmp_path: Path) -> None:
    clone = write_files(tmp_path / "clone", *CLONE)
    keys = [f"--training.dataset_path={clone}/data/*.parquet", "--training.seq_len=8"]
    run = load_config("debug_model.toml", 1, keys)
    train = TextReader(run.data, TOKENIZER, 2304).train(run.training)
    assert next(iter(file_lines(train))).startswith("3 files of parquet (")
    warnings = [*file_warnings(train, "mine"), *pass_warnings(train, "mine", 1000)]
    assert warnings[0].startswith("mine: the pattern finds files of several splits")
    assert "test (1 file)" in warnings[0]
    assert warnings[1].startswith("mine: the run reads this text ")
    assert len(warnings) == 2
    assert list(pass_warnings(train, "mine", 8 * train.sequences_per_epoch)) == []
