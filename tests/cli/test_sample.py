"""`titanlite sample`: the text of runs and of Hugging Face folders, as text and as JSON."""

from __future__ import annotations

import io
import json
import shutil
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.checkpoints import write_weights
from tests.support.hf import hf_folder
from titanlite import exit_codes, generate
from titanlite.cli.hub.export_weights import open_source
from titanlite.cli.main import main
from titanlite.config.errors import ConfigError
from titanlite.data import DataError
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, load_tokenizer
from titanlite.metrics.console import console_handler
from titanlite.models import get_spec
from titanlite.models.args import as_record


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture
def sample(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; return its output, with --json as an object."""

    def run(*words: object, code: int = 0) -> Any:
        assert main(["sample", *map(str, words), "--device=cpu"]) == code
        out, err = capsys.readouterr()
        return json.loads(out) if "--json" in words else (out, err)

    return run


def test_a_hugging_face_folder_continues_as_transformers_does(hf, sample):
    prompts = ["Once upon a time", "A naïve question:"]
    found = sample(hf, *prompts, "--temperature=0", "--max-tokens=64", "--json")
    model = LlamaForCausalLM.from_pretrained(hf).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(hf)
    for prompt, one in zip(prompts, found["samples"], strict=True):
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(prompt)]])
        theirs = model.generate(
            ids, do_sample=False, max_new_tokens=64, eos_token_id=tokenizer.eos_token_id
        )
        assert one["ids"] == theirs[0, ids.size(1) :].tolist()
        assert one["prompt_tokens"] == ids.size(1)
        assert one["text"] == tokenizer.decode(one["ids"])
        assert one["finish"] == "length"
    out, err = sample(hf, *prompts, "--temperature=0", "--max-tokens=64")
    assert out == "\n".join(one["prompt"] + one["text"] + "\n" for one in found["samples"])
    assert "128 tokens, " in err


def test_chat_renders_the_template_and_ends_with_the_turn(hf, sample, tmp_path):
    (one,) = sample(hf, "Hello", "--chat", "--json", "--max-tokens=80", "--seed=1")["samples"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(hf)
    message = [{"role": "user", "content": "Hello"}]
    wanted = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert one["prompt_tokens"] == len(wanted)
    assert one["finish"] == "context"
    assert one["prompt_tokens"] + len(one["ids"]) == 96
    # Weights without a run have today's date, which transformers writes.
    dated = hf_folder(tmp_path / "dated")
    (dated / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}")
    (one,) = sample(dated, "Hello", "--chat", "--json", "--max-tokens=1")["samples"]
    today = load_tokenizer(str(hf)).encode(str(date.today()))
    assert one["prompt_tokens"] == len(today)
    # Its first token ends a turn.
    (one,) = sample(dated, "Hello", "--temperature=0", "--json", "--max-tokens=3")["samples"]
    first = one["ids"][0]
    (dated / "generation_config.json").write_text(json.dumps({"eos_token_id": [first]}))
    (one,) = sample(dated, "Hello", "--temperature=0", "--json")["samples"]
    assert (one["ids"], one["text"], one["finish"]) == ([first], "", "stop")


def test_python_gets_the_text_of_the_command(hf, sample):
    options = {"max_tokens": 9, "top_k": 40, "top_p": 0.9, "temperature": 0.8, "seed": 5}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    for more in ({}, {"chat": True}):
        (one,) = sample(hf, "Once upon", "--json", *words, *["--chat" for _ in more])["samples"]
        console = console_handler()
        assert generate(hf, "Once upon", device="cpu", **options, **more) == one["text"]  # type: ignore[arg-type]
    with pytest.raises(DataError, match="expected max-tokens >= 1, temperature >= 0"):
        generate(hf, "x", temperature=float("nan"))
    with pytest.raises(ConfigError, match="--dtype: expected one of float32, .* got int8"):
        generate(hf, "x", dtype="int8")
    assert console_handler() is console, "the log of a program stays as it is"


@pytest.mark.slow
def test_prompts_of_a_run_are_drawn_by_the_seed(golden, sample, monkeypatch):
    words = ["--max-tokens=7", "--top-k=40", "--top-p=0.9", "--json"]
    prompts = [f"{number} and" for number in range(9)]
    found = sample(golden.folder, *prompts, *words)
    assert [one["prompt"] for one in found["samples"]] == prompts
    assert found["step"] == 24
    again = sample(golden.folder / "checkpoint" / "step-24", *prompts[:2], *words)
    assert again["samples"] == found["samples"][:2], "the same seed, whatever is in a batch"
    assert sample(golden.folder, *prompts, *words, "--seed=1")["samples"] != found["samples"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("0 and\n"))
    assert sample(golden.folder, *words)["samples"] == found["samples"][:1]


def test_a_checkpoint_without_a_config_is_sampled_with_the_tokenizer_that_it_names(
    hf, sample, tmp_path
):
    source = open_source(hf)
    model = get_spec(source.family).build(source.args)
    model.load_state_dict({name: source.read(name) for name in source.empty})
    shutil.copytree(hf, tmp_path / "tokenizer")
    tokenizer = {"path": str(tmp_path / "tokenizer")}
    record = as_record(source.family, source.args)
    step = write_weights(tmp_path, model, {"model": record, "tokenizer": tokenizer})
    words = ["Once upon", "--temperature=0", "--max-tokens=3", "--json"]
    assert sample(step, *words)["samples"] == sample(hf, *words)["samples"]
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    assert "holds no tokenizer.json" in sample(step, "x", code=exit_codes.CONFIG)[1]
    assert sample(step, *words, "--tokenizer", hf)["samples"]


def test_what_cannot_be_sampled_is_refused(golden, hf, sample, tmp_path, monkeypatch):
    long = "word " * 200
    for words, code, message in (
        ([tmp_path, "x"], exit_codes.CHECKPOINT, "no checkpoints"),
        (
            [golden.folder, "x", "--tokenizer", BUNDLED_SENTENCEPIECE],
            exit_codes.CHECKPOINT,
            "another tokenizer",
        ),
        ([golden.folder, "x", long], exit_codes.CONFIG, "prompt 2 has"),
        ([golden.folder, "x", "--chat"], exit_codes.CONFIG, "data.chat_template: the tokenizer"),
        ([golden.folder, "x", "--training.steps=3"], exit_codes.CONFIG, "takes no --section.key"),
    ):
        assert message in sample(*words, code=code)[1]
    for option in ("--top-p=1.5", "--temperature=-1", "--max-tokens=0", "--temperature=nan"):
        assert "error: expected max-tokens >= 1, " in sample(hf, "x", option, code=2)[1]
