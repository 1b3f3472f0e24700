"""`titanlite prove`: real runs of a tiny copy, the faults that it must find, and its page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.ranks import train
from tests.support.tiny import KEPT_TOKENS
from titanlite.cli.main import main
from titanlite.config.load import read
from titanlite.contrib.evidence import page
from titanlite.contrib.evidence.checks import FAILS, FOUND, HOLDS, IDLE, MISSED, NOT_RUN, Check
from titanlite.contrib.evidence.child_runs import Bench
from titanlite.contrib.evidence.tiny import tiny_copy

CONTROLS = ["moment", "generator", "weight", "batch", "rounding"]
CHECKS = ["repeat", "kill", "resume", "layout", "ranks", "evaluation", "export"]
#: The states of a proof in which all is well.
PROVED = dict.fromkeys(CHECKS, HOLDS) | dict.fromkeys(CONTROLS, FOUND)
FLAGS = [KEPT_TOKENS, "--job.dump_folder=run"]


class Forked(Bench):
    """Runs whose ranks are copies of a process that has imported torch, which takes most of the
    time of others. Torchrun starts the run that is killed, as in any proof.
    """

    def finish(self, name: str, words: Sequence[str], ranks: int = 0) -> str:
        if name == "killed":
            return super().finish(name, words, ranks)
        console = self._console(name)
        codes, output = train(words, ranks or self.ranks, console, main="titanlite.cli.main")
        assert not any(codes), output
        return output


BENCH = "titanlite.contrib.evidence.child_runs.Bench"


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a proof of the debug model, with its runs."""
    folder = tmp_path_factory.mktemp("proof")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BENCH, Forked)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        words = ["prove", "debug_model.toml", *FLAGS, "--folder", str(folder), "--keep"]
        assert main(words) == 0
    return folder


def states(folder: Path) -> dict[str, str]:
    checks = json.loads((folder / "proof.json").read_text())["checks"]
    return {check["name"]: check["state"] for check in checks}


@pytest.mark.slow
def test_the_debug_model_is_proved_and_each_fault_is_found(proof):
    assert states(proof) == PROVED
    found = json.loads((proof / "proof.json").read_text())
    assert found["verdict"] == "proved" and found["ranks"] == 2
    assert found["versions"]["torch"] == torch.__version__
    by_name = {check["name"]: check for check in found["checks"]}
    for name in ("repeat", "kill", "resume"):
        assert by_name[name]["left"] == by_name[name]["right"] != ""
    # Each fault is where it was put, and a run from there is of other bits.
    notes = {name: by_name[name]["note"] for name in CONTROLS}
    assert "rng.torch" in notes["generator"] and "1 of" in notes["generator"]
    assert "batch of step 8" in notes["batch"]
    assert "loss of step 8" in notes["weight"] and "loss of step 8" in notes["moment"]
    (runs,) = proof.glob("runs-*")
    attempts = (runs / "killed" / "attempts.jsonl").read_text().splitlines()
    starts = [json.loads(line) for line in attempts if '"start"' in line]
    assert [start["after"] for start in starts] == [None, "killed"]
    assert starts[1]["began"].startswith("resumed from step ")


class Finished(Bench):
    """The runs of a proof that was made before."""

    def killed(self, name: str, steps: int) -> Path:
        return self.folder / name

    def go_on(self, source: str, step: int, name: str, *flags: str, ranks: int = 0) -> Path:
        return self.folder / name

    def finish(self, name: str, words: Sequence[str], ranks: int = 0) -> str:
        return (self.folder / name / "console.log").read_text()


def judge(
    proof: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, like: str, *flags: str
) -> tuple[int, str]:
    """Judge the runs of a proof again, with one run in place of another; return code and page."""
    (runs,) = proof.glob("runs-*")
    shutil.copytree(runs, folder / "runs")
    shutil.rmtree(folder / "runs" / "export")
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    shutil.copytree(runs / like, folder / "runs" / name)

    def kept(runs: Path, *rest: object) -> Bench:
        return Finished(folder / "runs", *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(BENCH, kept)
    code = main(["prove", "debug_model.toml", *FLAGS, *flags, "--folder", str(folder)])
    return code, (folder / "proof.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "like", "said"),
    [
        # A fault that nothing finds, and rounding that hides all.
        ("moment", "resume", "void"),
        ("batch", "resume", "void"),
        ("rounding", "batch", "void"),
        # A run that differs from the reference, and one on a rank alone.
        ("resume", "weight", "failed"),
        ("alone", "reference", "proved"),
        ("ranks", "batch", "failed"),
    ],
)
def test_a_proof_with_a_run_in_place_of_another(proof, tmp_path, monkeypatch, name, like, said):
    code, page = judge(proof, tmp_path, monkeypatch, name, like)
    assert (code == 0) == (said == "proved")
    assert f'<span class="{said}">{said}</span>' in page
    assert ("prove nothing" in page) == (said == "void")
    # No tolerance is small enough for a fault that changes nothing.
    changed = {"void": {name: MISSED, "rounding": MISSED}, "failed": {name: FAILS}, "proved": {}}
    assert states(tmp_path) == PROVED | changed[said]


@pytest.mark.slow
@pytest.mark.parametrize(("like", "state"), [("reference", HOLDS), ("weight", FAILS)])
def test_layouts_in_bfloat16_are_compared_in_float32(proof, tmp_path, monkeypatch, like, state):
    flag = "--training.mixed_precision_param=bfloat16"
    judge(proof, tmp_path, monkeypatch, "float32", like, flag)
    assert states(tmp_path) == {**PROVED, "layout": state, "ranks": state}


@pytest.mark.parametrize(
    ("controls", "others", "left_out", "expected"),
    [
        ([FOUND], [HOLDS, IDLE], [], "proved"),
        ([FOUND], [HOLDS], ["training.compile"], "incomplete"),
        ([FOUND], [HOLDS, NOT_RUN], [], "incomplete"),
        ([FOUND], [FAILS, NOT_RUN], [], "failed"),
        ([FOUND, MISSED], [FAILS], [], "void"),
        ([NOT_RUN], [HOLDS], [], "void"),
    ],
)
def test_the_verdict_and_its_page(tmp_path, controls, others, left_out, expected):
    checks = [Check("a", "<claim>", state=state, note="a < b") for state in others]
    checks += [Check("b", "fault", True, state) for state in controls]
    run = SimpleNamespace(mesh=SimpleNamespace(world_size=2))
    copy = SimpleNamespace(left_out=set(left_out), changes={"a.b": "1 -> 2"}, run=run)
    text, code = page.report(tmp_path, "x", checks, copy)  # type: ignore[arg-type]
    assert (code == 0) == (expected == "proved")
    assert text == f"{expected}; written: {tmp_path / 'proof.html'}"
    html = (tmp_path / "proof.html").read_text()
    assert f"<title>x: {expected}</title>" in html and "&lt;claim&gt;" in html
    assert all(f"<code>{key}</code>" in html for key in left_out)
    assert "http" not in html


#: Config and flags → ranks of the copy, and some of its values.
COPIES = [
    ("llama3_8b_level4_float8_all_gather.toml", [], 2, {"float8.emulate": True}),
    ("deepseek_v3_16b.toml", [], 4, {"parallelism.expert_parallel_degree": 2}),
    ("llama3_1_405b.toml", ["--training.tensor_parallel_degree=8"], 4, {}),
    ("gemma3_4b.toml", [], 2, {"activation_checkpoint.selective_ac_option": "op"}),
    ("debug_model.toml", ["--experimental.pipeline_parallel_degree=4"], 4, {}),
    ("hf_debug.toml", ["--checkpoint.async_mode=async"], 2, {"checkpoint.async_mode": "async"}),
    ("llama3_1_8b_lora.toml", ["--data.source=[{name='c4'}]"], 2, {"training.loss_chunks": 8}),
]


@pytest.mark.parametrize(("file", "flags", "ranks", "values"), COPIES)
def test_a_tiny_copy_has_the_features_of_its_config(file, flags, ranks, values):
    config, _ = read([f"--job.config_file={file}", *flags])
    found = tiny_copy(config, 4, "/runs")
    assert found.run.mesh.world_size == ranks and found.left_out == set()
    assert {key: found.config.value(key) for key in values} == values
    assert found.run.spec.count_parameters(found.run.model_args(2304)) < 4_000_000
    assert found.run.steps == 12 and found.run.batch.seq_len == 64
    for name in ("dump_folder", "description"):
        assert found.config.value(f"job.{name}") == config.value(f"job.{name}")
    assert found.run.batch.accumulation == 2
    assert "model.overrides.dim" in found.changes or "model.overrides.hidden_size" in found.changes


def test_changes_have_no_secrets():
    flags = ["--launch.environment.HF_TOKEN=hf_secret", "--training.dataset_path=s3://a:b@c/d"]
    config, _ = read(["--job.config_file=debug_model.toml", *flags])
    found = tiny_copy(config, 4, "/runs").changes
    assert "launch.environment.HF_TOKEN" in found and "training.dataset_path" in found
    assert "hf_secret" not in str(found) and "a:b" not in str(found)


def test_a_feature_of_gpus_is_named():
    flags = ["--experimental.enable_async_tensor_parallel", "--training.compile"]
    words = ["--job.config_file=debug_model.toml", "--training.tensor_parallel_degree=2", *flags]
    found = tiny_copy(read(words)[0], 4, "/runs")
    assert found.left_out == {"experimental.enable_async_tensor_parallel"}
    assert found.run.mesh.tensor == 2 and found.run.training.compile
