"""Files of somebody else, each with code that would leave a mark: for `test_trust`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.golden_run import MORE, GoldenRun
from titanlite.checkpoint.manifest import FILE, read_manifest

#: What the evil code prints when it runs.
SAYS = "the evil code runs"
SECRET = "secret-of-the-environment"
VARIABLE = "TITANLITE_TEST_SECRET"
#: Breaks out of a template that is not sandboxed.
TEMPLATE = "{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}"

_EVIL = """
import sys
open({mark!r}, "w").close()
print({says!r}, file=sys.stderr, flush=True)
import titanlite
from titanlite.models import get_spec
SPEC = get_spec("llama3")
class Spy(titanlite.Callback):
    pass
def loss(logits, labels):
    raise RuntimeError
def optimizer(parameters, settings, device):
    raise RuntimeError
def texts():
    return [f"document {{n}} of somebody else" for n in range(200)]
"""
#: Keys of a config, and what of the evil file each names.
CODE = {
    "model.name": "SPEC",
    "job.callbacks": "Spy",
    "training.loss": "loss",
    "optimizer.name": "optimizer",
    "training.dataset": "texts",
    "validation.dataset": "texts",
}


@dataclass(frozen=True)
class Evil:
    """A file of Python, the file that it makes when it runs, and a folder in which it is a module,
    too.
    """

    file: Path
    mark: Path

    def named(self, name: str, way: str = "file") -> str:
        """Return a dotted path: of the file, of the file beside the checkpoint, or of the
        module.
        """
        lead = {"file": str(self.file), "beside": f"./{self.file.name}", "module": self.file.stem}
        return f"{lead[way]}:{name}"

    @property
    def ran(self) -> bool:
        return self.mark.exists()


def make_evil(folder: Path) -> Evil:
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "mark"
    file = folder / f"evil_{abs(hash(str(folder)))}.py"
    file.write_text(_EVIL.format(mark=str(mark), says=SAYS))
    return Evil(file, mark)


def run_folder(golden: GoldenRun, folder: Path) -> Path:
    """Copy a run with one checkpoint; return that."""
    golden.copy(folder)
    for step in (folder / "checkpoint").glob("step-*"):
        if step.name != f"step-{MORE}":
            for file in step.iterdir():
                file.unlink()
            step.rmdir()
    return folder / "checkpoint" / f"step-{MORE}"


def put(toml: str, key: str, value: Any) -> str:
    """Return a TOML text with another value of a key."""
    section, _, name = key.partition(".")
    head, mark, rest = toml.partition(f"[{section}]\n")
    body, next_head, tail = rest.partition("\n[")
    body = re.sub(rf"(?m)^{name} = .*\n?", "", body)
    line = f"{name} = {json.dumps(value)}\n"
    return f"{head}{mark}{line}{body}{next_head}{tail}" if mark else f"{toml}\n[{section}]\n{line}"


def poison(
    step: Path, config: dict[str, Any] | None = None, family: str = "", same_text: bool = False
) -> None:
    """Write other values into the config of a run and of its checkpoint, and another family of its
    model.
    """
    manifest = read_manifest(step)
    prints = dict(manifest.fingerprints)
    if not same_text:
        prints.pop("data", None)
    changed = dict(manifest.config)
    for key, value in (config or {}).items():
        changed["toml"] = put(changed["toml"], key, value)
    if family:
        changed["model"] = {**changed["model"], "family": family}
    (step / FILE).write_text(replace(manifest, config=changed, fingerprints=prints).to_json())
    (step.parents[1] / "config.toml").write_text(changed["toml"])


def code_config(evil: Evil, way: str) -> dict[str, Any]:
    """Return values of all keys that take dotted paths, and a folder of compiled code."""
    values: dict[str, Any] = {key: evil.named(name, way) for key, name in CODE.items()}
    values["job.callbacks"] = [values["job.callbacks"]]
    return {**values, "compile.cache_dir": str(evil.file.parent / "compiled")}


class Pickled:
    """Makes a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (open, (str(self.mark), "w"))


def poison_hf(folder: Path, evil: Evil) -> None:
    """Let all files of a Hugging Face folder name code: its own, kernels of the hub, and a
    template's.
    """
    (folder / "modeling_evil.py").write_text(evil.file.read_text())
    remote = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    config = json.loads((folder / "config.json").read_text())
    names = ("attn_implementation", "_attn_implementation", "_experts_implementation")
    kernel = dict.fromkeys(
        names, "somebody/kernel"
    )  # transformers refuses such a config unless it has `kernels`
    config |= {"auto_map": remote, "trust_remote_code": True, **kernel}
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "tokenizer_config.json"
    tokenizer = json.loads(file.read_text()) if file.exists() else {}
    tokenizer |= {"auto_map": {"AutoTokenizer": ["modeling_evil.T", "modeling_evil.T"]}}
    file.write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE.format(mark=evil.mark))


def forget(evil: Evil) -> None:
    """Remove the evil module from this process."""
    for name in [name for name in sys.modules if evil.file.stem in name]:
        del sys.modules[name]
