"""Logins and signatures in URLs: a run works with them, and nothing that it or a command writes
holds them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from tests.support.hub_server import HubServer
from tests.support.processes import titanlite
from tests.support.refusals import refusal, refusals
from tests.support.tiny import TWO_LAYERS
from tests.support.words import listening
from titanlite.checkpoint.manifest import read_manifest
from titanlite.cli.launch import prepare, write
from titanlite.cli.main import main
from titanlite.config.data_sections import Data, DataSource
from titanlite.config.errors import ConfigError
from titanlite.config.key_types import inner_section, members
from titanlite.config.sections import Config
from titanlite.config.urls import public_name, public_names
from titanlite.config.value_types import HOME, Section
from titanlite.data import DataError
from titanlite.data.dataset_builder import TextReader
from titanlite.data.mixtures.mixed_rows import open_mixture
from titanlite.data.remote import open_file
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, load_tokenizer
from titanlite.launch import kubernetes as launch_kubernetes
from titanlite.runs import provenance
from titanlite.runs.read import read_run
from titanlite.utils import append_line, is_hidden, logger, public, public_tree

#: In the user, the password, the signature and the key of the tests.
PLANTED = "planted"
HIDDEN = {
    "https://user:pass@host/f": "https://(removed)@host/f",
    "https://user:p@ss@host:80/f?dl=1": "https://(removed)@host:80/f?dl=1",
    "https://user:pa/ss?@host/f": "https://(removed)@host/f",
    "https://host/f?X-Amz-Signature=1f&versionId=3": "https://host/f?versionId=3&(removed)",
    "https://host/f?TOKEN": "https://host/f?(removed)",
    "('https://host/f?sig=a&dl=1'), and": "('https://host/f?dl=1&(removed)'), and",
    "https://host/f#access_token=1": "https://host/f#(removed)",
    "s3://key:secret@bucket/f": "s3://(removed)@bucket/f",
    "s3://bucket/f?versionId=a.b&x=1": "s3://bucket/f?versionId=a.b&(removed)",
    "az://store/f?sv=1&sig=2;dl=1": "az://store/f?(removed)",
    "https://host/f?versionId=3%20&x": "https://host/f?(removed)",
    "https://host/f;token=1/g": "https://host/f;(removed)",
    "https://host/f;token=1?dl=1": "https://host/f;(removed)",
    "https://host/f#1f": "https://host/f#(removed)",
    'path = "https://host/f#1f"': 'path = "https://host/f#(removed)"',
    "https:/user:pass@host/f": "https:/(removed)@host/f",
    "https:user:pass@host:80/f": "(removed)@host:80/f",
    "user:pass@host/f?X-Amz-Signature=1f&dl=1": "(removed)@host/f?(removed)&dl=1",
    "bucket/f;access_token=1f#sig=2": "bucket/f;(removed)#(removed)",
}
PLAIN = [
    "s3://bucket/part-?.jsonl",
    "s3://bucket/part-[0-9]*.jsonl",
    "http://host:8080/a@b/f",
    "hf://datasets/owner/name@main/f",
    "hf://gpt2@main",
    "abfss://container@account.dfs.core.windows.net/f",
    "me@host: see https://host/page#part, ok?",
    "https://[::1]:80/f?dl=1",
    "name@host",
    "owner/image:1.2@sha256:abcdef",
    "git@github.com:owner/name.git",
    "see (https://host/page#part): done; key=value",
    "s3://bucket/c#/a;b.jsonl",
]


@pytest.mark.parametrize("text", HIDDEN)
def test_logins_and_queries_are_hidden_once(text):
    assert public(text) == HIDDEN[text] == public(HIDDEN[text])
    assert is_hidden(HIDDEN[text]) == ("(removed)" in HIDDEN[text])


@pytest.mark.parametrize("text", PLAIN)
def test_what_holds_no_secret_stays(text):
    assert public(text) == text
    assert not is_hidden(text)


WORD = st.text(st.sampled_from("ab1%:@/?#&=+~.-_!$'()*,;é"), max_size=8)


@settings(deadline=None)
@given(WORD, WORD, st.sampled_from([" ", '"', ", ", "\n", "'", ")"]))
def test_no_password_and_no_signature_is_left_and_json_stays_json(before, after, end):
    login = f"u:{before}SECRET{after}".replace("/", "").replace("?", "").replace("#", "")
    for url in (
        f"https://{login}@host/f",
        f"https://host/f?s={before}SECRET{after}",
        f"https://host/f?{before}SECRET",
    ):
        text = f"a {url}{end}b"
        assert "SECRET" not in public(text)
        assert public(public(text)) == public(text)
        as_json = public(json.dumps({"a": [text], text: 1}))
        assert "SECRET" not in as_json
        assert isinstance(json.loads(as_json), dict)
        assert "SECRET" not in json.dumps(public_tree({"a": [text], text: 1}))


def test_a_log_record_and_a_line_of_a_record_hold_no_secret(tmp_path):
    url = f"https://u:{PLANTED}@host/f?sig={PLANTED}"
    with listening() as said:
        logger.warning("%s cannot be read: %d", url, 3)
    assert said == ["https://(removed)@host/f?(removed) cannot be read: 3"]
    append_line(tmp_path / "x.jsonl", {"reason": url, "all": [url, {url: url}]})
    assert PLANTED not in (tmp_path / "x.jsonl").read_text()
    try:
        raise OSError(url)
    except OSError:
        with listening() as said:
            logger.exception("failed")
    assert said == ["failed"]
    assert logging.getLogger("titanlite") is logger


def test_a_kept_config_tells_what_is_hidden_where_it_is_used_again(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(
        """training.dataset_path = "https://(removed)@host/f.jsonl"
validation.sources = [{path = "https://host/g.jsonl?(removed)", name = "g"}]
launch.gpus_per_node = 1
"""
    )
    flags = [f"--job.config_file={file}"]
    hidden, source = (str(problem) for problem in refusals(flags))
    assert "training.dataset_path: its login or signature is hidden in this file" in hidden
    assert "--training.dataset_path URL" in hidden
    assert "validation.sources: its login or signature is hidden in this file" in source
    with pytest.raises(ConfigError, match="is hidden in this file"):
        prepare(flags)
    assert len(refusals([*flags, "--training.dataset_path=https://u:p@host/f"])) == 1
    with pytest.raises(
        DataError, match=r"was hidden where it was kept. Give the whole URL again.*\$\{NAME\}"
    ):
        open_file("https://(removed)@host/f")


@pytest.mark.parametrize("scheme", ["s3", "hf"])
def test_a_login_in_the_url_of_a_store_is_refused(scheme):
    """Its client takes it for a part of the bucket's name, which its errors show."""
    url = f"{scheme}://user:{PLANTED}@bucket/x"
    said = str(refusal(["--job.config_file=debug_model.toml", f"--training.dataset_path={url}"]))
    assert "training.dataset_path: has a login, which its store does not read" in said
    assert PLANTED not in said
    with pytest.raises(DataError, match="has a login") as failed:
        open_file(url)
    assert PLANTED not in str(failed.value)


def test_a_manifest_has_no_secret_of_a_url_and_a_job_of_ones_own_keeps_it(tmp_path):
    url = f"https://u:{PLANTED}@host/f?sig={PLANTED}"
    flags = [
        "--job.config_file=debug_model.toml",
        "--launch.gpus_per_node=1",
        f"--training.dataset_path={url}",
    ]
    flags += ["--training.dataset=jsonl", f"--job.dump_folder={tmp_path}/run", "--launch.image=i"]
    job = prepare([*flags, f'--launch.volumes={{"claim" = "{tmp_path}"}}'])
    with pytest.raises(ConfigError) as refused:
        launch_kubernetes.files(job)
    said = str(refused.value)
    assert "training.dataset_path: all readers of the manifest see" in said
    assert PLANTED not in said
    write(job, {})
    config = tmp_path / "run" / "launch" / "config.toml"
    assert url in config.read_text()
    assert config.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("ending", ["?sig=", ";token=", "#token=", "#", "?", ";a=1;b="])
def test_two_signatures_of_a_file_have_one_name(ending):
    for signature in ("1", "2"):
        name = public_name(f"https://u:p{signature}@host/f{ending}{signature}")
        assert name == "https://host/f"


def _places(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the keys below a section that take a path or URL; `[]` is a list of tables."""
    for field in fields(section):
        name = f"{prefix}{field.encode_name}"
        inner = inner_section(field.type)
        if inner is not None:
            is_list = any(get_origin(part) in (list, tuple) for part in members(field.type))
            yield from _places(inner, f"{name}[]." if is_list else f"{name}.")
        elif HOME in _metas(field.type):
            yield name


def _metas(type_: Any) -> list[Any]:
    """Return the limits of a type and of the types in it."""
    found = list(getattr(type_, "__metadata__", ()))
    for part in get_args(type_):
        if not isinstance(part, type) and get_args(part):
            found += _metas(part)
    return found


PATHS = list(_places(Config))
#: A URL, and what might be meant for one; the first one can be opened.
FORMS = [
    f"https://{PLANTED}-user:{PLANTED}-word@host/f?X-Amz-Signature={PLANTED}",
    f"https://host/f;token={PLANTED}",
    f"https://host/f#{PLANTED}",
    f"https:/{PLANTED}-user:{PLANTED}-word@host/f?sig={PLANTED}",
    f"{PLANTED}-user:{PLANTED}-word@host/f",
]


assert {"training.dataset_path", "data.source[].path", "job.dump_folder"} < {*PATHS}


@pytest.mark.parametrize("key", PATHS)
def test_no_key_that_takes_a_path_or_url_shows_its_secrets(key, tmp_path, capsys):
    table, _, name = key.rpartition(".")
    head = f"[[{table[:-2]}]]" if table.endswith("[]") else f"[{table}]"
    file = tmp_path / "run.toml"
    said = ""
    for form in FORMS:
        file.write_text(f"{head}\n{name} = {json.dumps(form)}\n")
        shown = provenance.public_config(file.read_text())
        said += shown + json.dumps(public_tree({form: [form]})) + public_name(form)
        assert "host/f" in shown
        for words in (["check", str(file)], ["explain", str(file)]):
            main(["config", *words])
        main(["config", "explain", table.replace("[]", ""), f"--job.config_file={file}"])
        with listening() as logged:
            logger.warning("%s cannot be read", form)
        said += "".join(capsys.readouterr()) + "".join(logged)
    assert PLANTED not in said, [line for line in said.splitlines() if PLANTED in line]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    root = tmp_path_factory.mktemp("served")
    (root / "files").mkdir()
    lines = (
        json.dumps({"text": f"Document {i} of the text behind a URL. " * 20}) + "\n"
        for i in range(200)
    )
    (root / "files" / "text.jsonl").write_text("".join(lines))
    with HubServer(root) as running:
        yield running


def _url(server: HubServer, name: str, number: int = 1) -> str:
    login = f"{PLANTED}-user:{PLANTED}-password{number}"
    return f"http://{login}@127.0.0.1:{server.port}/files/{name}?X-Amz-Signature={PLANTED}{number}&versionId=1"


def _config(server: HubServer, file: Path, run: Path, number: int) -> list[str]:
    """Write a config whose URLs have the signatures of a number; return its flags."""
    url = _url(server, "text.jsonl", number)
    file.write_text(
        f"""
training.steps = {2 * number}
training.batch_size = 2
metrics = {{ log_freq = 1, enable_tensorboard = true }}
checkpoint = {{ enable_checkpoint = true, interval = 2 }}
validation = {{ enable = true, dataset_path = "{url}", steps = 1 }}
launch.environment.API_KEY = "{PLANTED}-key"
[[data.source]]
path = "{url}"
[[data.source]]
name = "c4_test"
[[data.phase]]
step = 2
weights = {{ "{url}" = 3.0, c4_test = 1.0 }}
"""
    )
    flags = [
        f"--job.dump_folder={run}",
        "--job.print_config",
        f"--job.save_config_file={run}/saved.toml",
    ]
    return [str(file), *flags, *(flag for flag in TWO_LAYERS if "token_cache" not in flag)]


def _commands(config: list[str], run: Path) -> list[list[str]]:
    step = str(run / "checkpoint" / "step-2")
    return [
        ["config", "explain", config[0]],
        ["config", "check", *config[:1]],
        ["config", "check", str(run / "config.toml")],
        ["runs", str(run), "--json"],
        ["runs", str(run), "--attempts"],
        ["checkpoint", "ls", str(run)],
        ["checkpoint", "verify", step],
        ["plan", config[0], "--gpu=l4"],
        ["data", "peek", config[0], "--rows", "1"],
        ["data", "peek", str(run / "config.toml")],
        ["eval", step],
    ]


def test_a_checkpoint_with_whole_urls_as_names_is_refused_without_them(tmp_path):
    """They decided the order of a source, and titanlite 0.2.0 wrote them into its checkpoints."""
    whole = f"https://u:{PLANTED}@host/f?sig={PLANTED}"
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "a " * 90}))
    source = DataSource(name=whole, path=str(file))
    tokenizer = load_tokenizer(str(BUNDLED_TOKENIZER))
    reader = TextReader(Data(source=[source]), tokenizer, tokenizer.vocab_size)
    rows = open_mixture(reader, {"data.source[0]": source}, 64, {})
    assert rows.names == ["https://host/f"]
    with pytest.raises(DataError, match="mixture has https://host/f. Keep it") as caught:
        rows.load_state_dict({**rows.state_dict(), "names": [whole]}, 6)
    assert PLANTED not in str(caught.value)
    order = f"seed 3, sources ['{whole}', 'plain'], packing split"
    assert public_names(order) == "seed 3, sources ['https://host/f', 'plain'], packing split"


@pytest.mark.slow
def test_no_byte_of_a_run_and_of_the_commands_holds_a_secret(server, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    run = tmp_path / "out" / "run"
    said = ""
    for number in (1, 2):  # the second start resumes with other signatures
        config = _config(server, tmp_path / "run.toml", run, number)
        done = titanlite("train", f"--job.config_file={config[0]}", *config[1:])
        said += done.stdout + done.stderr
        assert done.returncode == 0, said
    assert [one["began"] for one in read_run(run).attempts] == ["fresh", "resumed from step 2"]
    changes = read_run(run).attempts[1]["config_changes"].keys()
    assert not changes & {"data.source", "validation.dataset_path"}
    capfd.readouterr()
    for words in _commands(config, run):
        if words[0] == "eval":  # it ends its process
            done = titanlite(*words)
            said += done.stdout + done.stderr
        else:
            main(words)
        said += "".join(capfd.readouterr())
    for source in (_url(server, "text.jsonl"), public(_url(server, "text.jsonl"))):
        main(["data", "prepare", source, "--out", str(run / "prepared"), "--tokenizer=bundled"])
        said += "".join(capfd.readouterr())
    missing = f"--training.dataset_path={_url(server, 'nothing')}"
    flags = ["--data.retry_seconds=0", f"--job.dump_folder={run}-2", "debug_model.toml"]
    done = titanlite("train", missing, *flags)
    assert done.returncode
    assert "nothing" in done.stderr
    said += done.stdout + done.stderr
    assert "was hidden where it was kept" in said
    assert "is hidden in this file" in said
    assert "(removed)" in said
    assert PLANTED not in said, [line for line in said.splitlines() if PLANTED in line][:20]
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    written += [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]
    assert len(written) > 15
    assert [path for path in written if PLANTED.encode() in path.read_bytes()] == []
    assert [path for path in written if PLANTED in path.name] == []
    name = f"http://127.0.0.1:{server.port}/files/text.jsonl"
    manifest = read_manifest(run / "checkpoint" / "step-4")
    assert manifest.train["data"]["rows"]["names"] == [name, "c4_test"]
