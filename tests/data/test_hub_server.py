"""The test hub speaks to the real `datasets` and huggingface_hub, and its faults are what they say."""

from __future__ import annotations

import gzip
import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.hub_server import HubServer

C4_CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
  - split: validation
    path: en/c4-validation.*.json.gz
---
# C4
"""


def write_c4(repo: Path, shards: int, texts_per_shard: int) -> list[str]:
    """Write a repository in the form of allenai/c4 and return its training texts."""
    texts = [f"text {i}" for i in range(shards * texts_per_shard)]
    (repo / "en").mkdir(parents=True)
    (repo / "README.md").write_text(C4_CARD)
    for k in range(shards):
        records = [json.dumps({"text": t, "url": "u"}) for t in texts[k * texts_per_shard : (k + 1) * texts_per_shard]]
        data = gzip.compress("\n".join(records).encode())
        (repo / f"en/c4-train.{k:05d}-of-{shards:05d}.json.gz").write_bytes(data)
    (repo / "en/c4-validation.00000-of-00001.json.gz").write_bytes(gzip.compress(b'{"text": "held out", "url": "u"}'))
    return texts


CLIENT = """
import json
from datasets import load_dataset, load_dataset_builder
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download

def refusal(**options):
    try:
        load_dataset_builder("me/secret", **options)
    except Exception as error:
        return type(error).__name__

c4 = load_dataset("allenai/c4", "en", split="train", streaming=True)
print(json.dumps({
    "c4": [row["text"] for row in c4],
    "shards": c4.num_shards,
    "shard 2": [row["text"] for row in c4.shard(num_shards=3, index=2)],
    "old": [row["text"] for row in load_dataset("allenai/c4", "en", split="train", streaming=True, revision="old")],
    "parquet": [row["text"] for row in load_dataset("me/plain", split="train", streaming=True)],
    "no token": refusal(token=False),
    "token": refusal(),
    "files": HfFileSystem().glob("datasets/allenai/c4/**/*train*"),
    "sizes": [f.size for f in HfApi().get_paths_info("allenai/c4", ["README.md"], repo_type="dataset")],
    "model": open(hf_hub_download("me/model", "tokenizer.json")).read(),
    "user": HfApi().whoami()["name"],
}))
"""


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets")
def test_datasets_reads_repositories_from_the_test_hub(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path / "hub"
    texts = write_c4(root / "datasets/allenai/c4", shards=3, texts_per_shard=5)
    old = write_c4(root / "datasets/allenai/c4@old", shards=1, texts_per_shard=2)
    for repo, name in (("datasets/me/plain", "train-00000.parquet"), ("datasets/me/secret", "train.parquet")):
        (root / repo).mkdir(parents=True)
        pq.write_table(pa.table({"text": [f"of {repo}"] * 3}), root / repo / name)
    (root / "models/me/model").mkdir(parents=True)
    (root / "models/me/model/tokenizer.json").write_text("{}")
    with HubServer(root, page_size=2, gated={"me/secret": "hf_right"}) as hub:
        hub.fail("*00001-of-00003*", status=503, retry_after=0)
        environment = os.environ | hub.environment(tmp_path / "home", token="hf_right")
        run = subprocess.run(
            [sys.executable, "-c", CLIENT], env=environment, capture_output=True, text=True, timeout=120
        )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["c4"] == texts and result["shards"] == 3 and result["shard 2"] == texts[10:]
    assert result["old"] == old and result["parquet"] == ["of datasets/me/plain"] * 3
    assert result["no token"] == "DatasetNotFoundError" and result["token"] is None
    assert result["files"] == [f"datasets/allenai/c4/en/c4-train.{k:05d}-of-00003.json.gz" for k in range(3)]
    assert result["sizes"] == [len(C4_CARD)] and result["model"] == "{}" and result["user"] == "tester"
    assert [r.status for r in hub.of("*/resolve/*/en/c4-train.00001-of-00003.json.gz")][:2] == [503, 206]
    assert {r.authorized for r in hub.of("*/me/secret/*", "HEAD")} == {False, True}
    size = (root / "datasets/allenai/c4/en/c4-train.00002-of-00003.json.gz").stat().st_size
    assert [(r.range, r.sent) for r in hub.of("*00002-of-00003*")][0] == ((0, size - 1), size)


def ask(hub: HubServer, path: str, timeout: float = 5, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=timeout)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_plain_files_ranges_and_faults(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    data = bytes(range(256)) * 1000
    (tmp_path / "files/x y.bin").write_bytes(data)
    url = "/files/x%20y.bin"
    with HubServer(tmp_path) as hub:
        assert ask(hub, url)[2] == data
        status, headers, body = ask(hub, url, Range="bytes=1000-1099")
        assert (status, headers["Content-Range"], body) == (206, f"bytes 1000-1099/{len(data)}", data[1000:1100])
        assert ask(hub, url, Range="bytes=255000-")[2] == data[255000:]
        assert ask(hub, url, Range=f"bytes={len(data)}-")[0] == 416
        assert b'href="x%20y.bin"' in ask(hub, "/files/")[2] and ask(hub, "/files/nothing")[0] == 404

        hub.fail("*x y*", status=429, retry_after=7, times=2)
        answers = [ask(hub, url) for _ in range(3)]
        assert [a[0] for a in answers] == [429, 429, 200] and answers[0][1]["Retry-After"] == "7"
        hub.fail("*x y*", cut=100)
        with pytest.raises(http.client.IncompleteRead) as cut:
            ask(hub, url)
        assert cut.value.partial == data[:100]
        hub.fail("*x y*", cut=100, declared=True)
        assert ask(hub, url)[2] == data[:100]
        hub.fail("*x y*")
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            ask(hub, url)
        hub.fail("*x y*", stall=60, stall_after=10)
        start = time.monotonic()
        with pytest.raises(socket.timeout):
            ask(hub, url, timeout=0.3)
        assert 0.2 < time.monotonic() - start < 20
        with hub.refused(), pytest.raises(ConnectionRefusedError):
            ask(hub, url)
        assert ask(hub, url)[2] == data
        hub.fail("*", status=500, times=None)
        assert [ask(hub, url)[0] for _ in range(3)] == [500] * 3
        assert [r.status for r in hub.of("/files/x y.bin")][:4] == [200, 206, 206, 416]
        assert [r.sent for r in hub.requests][:3] == [len(data), 100, len(data) - 255000]


def test_a_plain_folder_that_wants_a_token(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private/x").write_text("secret")
    with HubServer(tmp_path, gated={"private": "t"}) as hub:
        answers = [
            ask(hub, "/private/x", **h)[0] for h in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer t"})
        ]
    assert answers == [401, 403, 200]
