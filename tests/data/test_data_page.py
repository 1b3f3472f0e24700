"""The TOML files of the pages about data lead to text: each is read in a folder with the files that
it names.
"""

from __future__ import annotations

import json
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.support.foreign_tokens import joined, make_documents, write_raw
from tests.support.hub_server import HubServer
from tests.support.processes import ROOT, python
from tests.support.shards import LINES, TEXTS, write_c4
from tests.support.texts import LLAMA3
from titanlite.data.tokenizer import BUNDLED_TOKENIZER

PAGES = ROOT / "docs/data.md", ROOT / "docs/token-files.md"
PEEK = """
import sys
from titanlite.cli.main import main
sys.exit(max(main(["data", "peek", *flags.split()]) for flags in sys.argv[1:]))
"""


@pytest.mark.slow
def test_each_example_is_read(tmp_path):
    pytest.importorskip("datasets")
    chat = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day."}]
    record = {"prompt": "Question: 1\nAnswer:", "completion": " 2", "messages": chat}
    ranks = BUNDLED_TOKENIZER.read_bytes()
    for name, content in {
        "chats.jsonl": json.dumps(record).encode() + b"\n",
        "assets/tokenizer.model": ranks,
        "assets/Llama-3.1-8B-Instruct/tokenizer.model": ranks,
        "assets/Llama-3.1-8B-Instruct/chat_template.jinja": LLAMA3.encode(),
        "web/a.jsonl.zst": zstandard.compress(LINES),
        "papers/a.jsonl": LINES.replace(b'"text"', b'"body"'),
        "held-out/wiki.jsonl": LINES,
        "datasets/HuggingFaceFW/fineweb-edu/a.jsonl": LINES,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for name in ("mine", "bucket/corpus", "dolma"):
        (tmp_path / name).mkdir(parents=True)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "mine/a.parquet")
    shutil.copy(tmp_path / "mine/a.parquet", tmp_path / "bucket/corpus")
    write_raw(tmp_path / "dolma/part-0.npy", joined(make_documents()), "<u4")
    write_c4(tmp_path, 2)
    pages = "".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"```toml\n(.*?)```", pages, re.DOTALL)
    mixture = next(block for block in blocks if block.startswith("[[data.source]]"))
    flags = []
    with HubServer(tmp_path) as hub:
        for number, block in enumerate(blocks):
            text = mixture + block if block.startswith("[[data.phase]]") else block
            (tmp_path / f"{number}.toml").write_text(text.replace("s3://", f"{hub.url}/"))
            flags.append(
                f"{number}.toml --rows=1" + " --validation" * block.startswith("[validation]")
            )
        done = python("-c", PEEK, *flags, env=hub.environment(tmp_path / "home"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert len(blocks) == 10
    assert done.stdout.count("sequence 0: ") == 10
    assert "[[Question: 1\nAnswer:]] 2<|end_of_text|>" in done.stdout
    assert "Hello?]][[<|eot_id|>" in done.stdout
    assert "]]Good day.<|eot_id|>" in done.stdout
