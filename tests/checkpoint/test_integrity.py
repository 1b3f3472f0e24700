"""Bytes that change after they were written: found on every rank, named, and an older checkpoint is used."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from tests.checkpoint.runs import RUN, flip, refusal, train
from tests.pool import Pools
from tests.training.harness import build_tiny
from tests.words import listening
from titanlite.checkpoint import Checkpointer, CheckpointError, comparing
from titanlite.checkpoint.integrity import check_file, digest_of, file_digest, share
from titanlite.checkpoint.manifest import FORMAT, find, read_manifest
from titanlite.checkpoint.storage import CheckedReader
from titanlite.parallel.dist_env import DistEnv
from titanlite.utils import human_bytes


@pytest.fixture(scope="module")
def three_and_six(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 3 and 6, written by 2 ranks."""
    folder = tmp_path_factory.mktemp("good")
    pool(2).run(train, RUN, str(folder), 1, 6, every=3)
    return folder


@pytest.fixture
def folder(three_and_six: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(three_and_six, tmp_path / "run")


def test_every_file_has_the_hash_of_what_lies_on_the_disk(three_and_six: Path) -> None:
    manifest = read_manifest(three_and_six / "step-6")
    on_disk = {path.name for path in (three_and_six / "step-6").iterdir()} - {"manifest.json"}
    assert manifest.hashes.keys() == manifest.files.keys() == on_disk == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    for name, digest in manifest.hashes.items():
        content = (three_and_six / "step-6" / name).read_bytes()
        algorithm, _, value = digest.partition(":")
        found = hashlib.sha256(content) if name == ".metadata" else xxhash.xxh3_128(content)
        assert (algorithm, value) == ("sha256" if name == ".metadata" else "xxh3", found.hexdigest())
        assert manifest.files[name] == len(content)


def test_nothing_is_summed_twice(three_and_six: Path) -> None:
    """Files of tensors carry no checksums of torch's; torch reads them all the same, as every other test here shows."""
    content = (three_and_six / "step-6" / "__0_0.distcp").read_bytes()
    entries = [match.start() for match in re.finditer(rb"PK\x01\x02", content)]  # of the directories of zip archives
    named = [at for at in entries if content[at + 46 :].partition(b"PK")[0].find(b"/data/0") > 0]
    assert named and not any(any(content[at + 16 : at + 20]) for at in named), "CRC-32 of a tensor's bytes"


def _load(world: DistEnv, folder: str, plan: CheckpointPlan) -> dict[str, Any]:
    """What a load does, and what it says, on this rank."""
    model, optimizer, _ = build_tiny(world, RUN)
    before = [p.detach().to_local().clone() for p in model.parameters()]  # type: ignore[operator]
    checkpointer = Checkpointer(
        replace(plan, enable=True, folder=folder), world, {"model": "m", "tokenizer": "t", "data": "d"}
    )
    try:
        loaded = checkpointer.load(model, optimizer)
    except CheckpointError as error:
        same = all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))  # type: ignore[operator]
        return {"error": str(error), "untouched": same}
    assert loaded is not None
    return {"step": loaded.step, "notices": loaded.notices}


def _loads(pool: Pools, folder: Path, ranks: int = 2, **plan: Any) -> dict[str, Any]:
    """The result of a load, which must be the same on all ranks."""
    results = pool(ranks).run(_load, str(folder), CheckpointPlan(**plan))
    assert all(result == results[0] for result in results), results
    return results[0]


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("where", [0.02, 0.5, 0.97])
def test_one_flipped_bit_anywhere_leads_to_the_older_one(pool: Pools, folder: Path, name: str, where: float) -> None:
    flip(folder / "step-6" / name, where)
    found = _loads(pool, folder)
    assert found["step"] == 3
    assert "step-6" in found["notices"][0] and name in found["notices"][0]
    assert f"titanlite checkpoint verify {folder}" in found["notices"][1]


def _load_aloud(world: DistEnv, folder: str) -> list[str]:
    comparing._TELL_SECONDS = 0.0
    try:
        with listening() as said:
            _load(world, folder, CheckpointPlan())
    finally:
        comparing._TELL_SECONDS = 10.0
    return [line for line in said if line.startswith("comparing ")]


def test_a_long_comparison_says_how_far_it_has_come(pool: Pools, three_and_six: Path) -> None:
    folder = three_and_six / "step-6"
    files = read_manifest(folder).files
    for rank, said in enumerate(pool(2).run(_load_aloud, str(three_and_six))):
        names = {*share(files, rank, 2), ".metadata"}
        size = human_bytes(sum(files[name] for name in names))
        assert len(said) == len(names)
        assert said[-1] == f"comparing {folder} with its hashes: {size} of {size} of this rank's part"


def test_the_rank_that_sees_the_damage_speaks_for_all(pool: Pools, folder: Path) -> None:
    """Only one rank reads a given file; without an agreement the other would load it."""
    manifest = read_manifest(folder / "step-6")
    shares = [share(manifest.files, rank, 2) for rank in range(2)]
    assert sorted(shares[0] + shares[1]) == sorted(manifest.files)
    for part in shares:
        broken = shutil.copytree(folder, folder.with_name(f"broken-{part[0]}"))
        name = next(name for name in part if name.endswith(".distcp"))
        flip(broken / "step-6" / name)
        assert _loads(pool, broken)["step"] == 3


def test_one_rank_reads_what_eight_wrote(pool: Pools, folder: Path) -> None:
    flip(folder / "step-6" / "__1_0.distcp")
    assert _loads(pool, folder, ranks=1)["step"] == 3


def test_size_alone_trusts_the_contents_but_not_the_index(pool: Pools, folder: Path) -> None:
    flip(folder / "step-6" / "__1_0.distcp", 0.501)
    assert _loads(pool, folder, verify="size")["step"] == 6, "this is what verify = hash is for"
    flip(folder / "step-6" / ".metadata")
    assert _loads(pool, folder, verify="size")["step"] == 3


def test_truncated_and_missing_files_lead_to_the_older_one(pool: Pools, folder: Path) -> None:
    os.truncate(folder / "step-6" / "__0_0.distcp", 1000)
    found = _loads(pool, folder)
    assert found["step"] == 3 and "has 1000 bytes, the manifest says" in found["notices"][0]
    (folder / "step-6" / "__0_0.distcp").unlink()
    assert "__0_0.distcp is missing" in _loads(pool, folder)["notices"][0]


def test_no_good_one_left_is_refused_and_nothing_is_changed(pool: Pools, folder: Path) -> None:
    """To begin a run anew where one was lost would look like success."""
    for step in (3, 6):
        flip(folder / f"step-{step}" / "__1_0.distcp")
    found = _loads(pool, folder)
    assert found["untouched"] and "has no valid checkpoint" in found["error"]
    assert all(f"step-{step}/__1_0.distcp" in found["error"] for step in (3, 6))
    assert "--job.dump_folder" in found["error"]


def test_a_demanded_step_is_never_replaced_by_another(pool: Pools, folder: Path) -> None:
    shutil.rmtree(folder / "step-6")
    flip(folder / "step-3" / "__0_0.distcp")
    found = _loads(pool, folder, load_step=3)
    assert found["untouched"] and "checkpoint.load_step = 3" in found["error"] and "__0_0.distcp" in found["error"]


def test_the_step_of_a_damaged_one_can_be_saved_again(pool: Pools, folder: Path) -> None:
    """Its sizes are right: without what the load has found it would count as valid, and the save would be refused."""
    flip(folder / "step-6" / "__1_0.distcp")
    damaged = (folder / "step-6" / "__1_0.distcp").read_bytes()
    pool(2).run(train, RUN, str(folder), 4, 6)
    assert _loads(pool, folder) == {"step": 6, "notices": []}
    assert (folder / "step-6.invalid-0" / "__1_0.distcp").read_bytes() == damaged


class _Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_a_changed_index_is_not_unpickled(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "unpickled"
    payload = pickle.dumps(_Touch(str(marker)))
    (folder / "step-6" / ".metadata").write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"\.metadata has changed since it was written"):
        CheckedReader(folder / "step-6", read_manifest_without_sizes(folder / "step-6")).read_metadata()
    assert not marker.exists()
    pickle.loads(payload).close()
    assert marker.exists(), "the payload would have worked"


def read_manifest_without_sizes(folder: Path) -> Any:
    from titanlite.checkpoint.manifest import parse_manifest

    return parse_manifest(folder)


def _save_over_a_bad_disk(world: DistEnv, folder: str) -> str:
    """A save where a file of rank 1 is cut after it was written and before the manifest is."""
    model, optimizer, _ = build_tiny(world, RUN)
    checkpointer = Checkpointer(CheckpointPlan(enable=True, folder=folder), world, {})
    written = checkpointer._sizes_and_hashes

    def after_damage(partial: Path, *rest: Any) -> Any:
        os.truncate(partial / "__1_0.distcp", 100)
        return written(partial, *rest)

    checkpointer._sizes_and_hashes = after_damage  # type: ignore[method-assign]
    try:
        checkpointer.save(1, model, optimizer, {})
    except CheckpointError as error:
        return str(error)
    return "published"


def test_what_did_not_reach_the_disk_is_not_published(pool: Pools, tmp_path: Path) -> None:
    said = pool(2).run(_save_over_a_bad_disk, str(tmp_path))
    assert "does not hold what was written to it (__1_0.distcp)" in said[0] and said[0] == said[1]
    assert find(tmp_path) == (None, []) and not list(tmp_path.glob("step-*"))


def test_manifest_says_where_it_comes_from(three_and_six: Path) -> None:
    manifest = read_manifest(three_and_six / "step-6")
    assert manifest.format == FORMAT
    assert manifest.versions["torch"] == torch.__version__.partition("+")[0] or manifest.versions["torch"]
    assert manifest.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(manifest.git.get("commit", "")) == 40 or "unknown" in manifest.git


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shares_cover_all_once_and_are_even(ranks: int) -> None:
    files = {f"f{i}": (i * 7919) % 1000 + 1 for i in range(40)}
    shares = [share(files, rank, ranks) for rank in range(ranks)]
    assert sorted(name for part in shares for name in part) == sorted(files)
    loads = [sum(files[name] for name in part) for part in shares]
    assert max(loads) - min(loads) <= 1000


def test_check_file_says_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * (9 << 20))  # more than is read at a time
    digests = {algorithm: file_digest(file, algorithm) for algorithm in ("xxh3", "sha256", "blake2b")}
    assert digests == {algorithm: digest_of(b"x" * (9 << 20), algorithm) for algorithm in digests}
    assert [check_file(file, 9 << 20, digest) for digest in digests.values()] == [None] * 3
    flip(file, 0.999)
    for algorithm, digest in digests.items():
        problem = check_file(file, 9 << 20, digest)
        assert problem is not None and digest[:20] in problem and file_digest(file, algorithm)[:20] in problem
    assert check_file(file, 9 << 20, None) is None
    assert "missing" in str(check_file(tmp_path / "none", 1, digest))
    assert "cannot be read" in str(check_file(tmp_path, os.stat(tmp_path).st_size, digest))


def test_refused_alike_on_all_ranks_when_resume_is_demanded(pool: Pools, folder: Path) -> None:
    for step in (3, 6):
        flip(folder / f"step-{step}" / "__1_0.distcp")
    messages = pool(2).run(refusal, RUN, str(folder), 7, 8, start="resume")
    assert messages[0] == messages[1] and 'checkpoint.start = "resume"' in messages[0]
