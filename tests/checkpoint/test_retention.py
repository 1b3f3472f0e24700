"""How checkpoints come and go, in folders and stores alike: what a kill leaves, and which ones
stay.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import MANIFEST, SHARD, edit, names, options, sign, write
from titanlite.checkpoint import retention
from titanlite.checkpoint.choice import Chooser
from titanlite.checkpoint.manifest import (
    FORMAT,
    REASON,
    CheckpointError,
    fault_of,
    find,
    marked_folder,
    steps_in,
)
from titanlite.checkpoint.retention import (
    Deleter,
    begin,
    clear_leftovers,
    delete,
    leftovers,
    pinned,
    prune,
    publish,
    quarantine,
    unpublish,
)
from titanlite.checkpoint.store_paths import AnyPath, StorePath
from titanlite.cli.checkpoint_folders import list_checkpoints


def _pruned(
    root: AnyPath, newest: int, keep: tuple[int, ...] = (), bad: tuple[int, ...] = (), **fields: Any
) -> list[int]:
    """Prune, delete, and return the steps that are left."""
    prints = MANIFEST.fingerprints
    for mark in prune(root, newest, options(root, **fields), keep, bad, prints):
        delete(mark)
    assert leftovers(root) == []
    return steps_in(root)


def _bytes(folder: AnyPath) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names(folder)}


class _KilledError(BaseException):
    pass


def _kill_at(monkeypatch: pytest.MonkeyPatch, call: int, action: Any, root: AnyPath) -> bool:
    """Run `action(root)` as a process that is killed before its `call`-th change of the storage;
    return whether it was.
    """
    calls = 0

    def counting(real: Any) -> Any:
        def change(*arguments: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                raise _KilledError
            return real(*arguments, **more)

        return change

    with monkeypatch.context() as patch:
        for kind in (Path, StorePath):
            for name in ("mkdir", "unlink", "rename", "write_bytes"):
                if hasattr(kind, name):
                    patch.setattr(kind, name, counting(getattr(kind, name)))
        for name in ("write_new", "remove_folder", "copy_folder"):
            patch.setattr(retention, name, counting(getattr(retention, name)))
        try:
            action(root)
        except _KilledError:
            return True
    return False


def _save(root: AnyPath) -> None:
    clear_leftovers(root, 6, Deleter())
    write(root, 6)


def _delete(root: AnyPath) -> None:
    delete(unpublish(root / "step-4"))


def _set_aside(root: AnyPath) -> None:
    quarantine(root / "step-4", "why")


@pytest.mark.parametrize(
    ("action", "step", "end"), [(_save, 6, [2, 4, 6]), (_delete, 4, [2]), (_set_aside, 4, [2])]
)
def test_a_kill_at_any_moment_loses_nothing(root, monkeypatch, action, step, end):
    """Afterwards the step is whole or gone, no other has changed, and the next start and save leave
    no trace.
    """
    for call in range(1, 100):
        here = root / str(call)
        write(here, 2, 4)
        killed = _kill_at(monkeypatch, call, action, here)
        assert steps_in(here) in ([2, 4], end), call
        assert all(find(here, one) == (replace(MANIFEST, step=one), []) for one in steps_in(here))
        assert find(here)[1] == [], "an unfinished one is not even mentioned"
        states = {"valid", "partial", "being deleted", "set aside"}
        assert {entry.state for entry in list_checkpoints(here)} <= states
        for mark in leftovers(here):
            delete(mark)
        left = steps_in(here)
        write(here, *({2, 4, 6} - {*left}))
        assert steps_in(here) == [2, 4, 6]
        assert leftovers(here) == []
        assert all(name.startswith("step-") for name in names(here))
        if not killed:
            assert left == end
            assert call > 2
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("kind", [".partial-", ".deleted-"])
def test_a_mark_deletes_no_folder_but_that_of_a_checkpoint(root, kind):
    """A checkpoint may come from somebody else, with files of any name beside it."""
    write(root, 8)
    if isinstance(root, Path):
        (root / "notes").mkdir()
    (root / "notes" / "mine").write_bytes(b"kept")
    (root.parent / "beside").write_bytes(b"kept")
    for name in ("notes", "..", "step-8-more"):
        mark = root / f"{kind}{name}-1f0c77aa"
        mark.write_bytes(b"")
        assert marked_folder(mark) is None
    for leftover in leftovers(root):
        delete(leftover)
    assert (root / "notes" / "mine").read_bytes() == b"kept"
    assert (root.parent / "beside").read_bytes() == b"kept"
    assert steps_in(root) == [8]


def test_a_valid_checkpoint_is_never_overwritten_and_an_invalid_one_is_kept(root):
    write(root, 2, 4)
    before = _bytes(root / "step-4")
    with pytest.raises(CheckpointError, match="already holds a valid checkpoint"):
        begin(root, 4)
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        publish(root / "step-4", replace(MANIFEST, step=4, train={"another": 1}))
    assert _bytes(root / "step-4") == before
    (root / "step-4" / "shard").write_bytes(b"12345")
    folder = begin(root, 4)
    assert names(root / "step-4.invalid-0") == [REASON, *before]
    assert b"has 5 bytes, the manifest says 4" in (root / "step-4.invalid-0" / REASON).read_bytes()
    assert (root / "step-4.invalid-0" / "shard").read_bytes() == b"12345"
    (folder / "shard").write_bytes(SHARD)
    publish(folder, replace(MANIFEST, step=4))
    begin(root, 4, known_bad={4: "a hash differs"})
    assert (root / "step-4.invalid-1" / REASON).read_bytes() == b"a hash differs\n"
    assert steps_in(root) == [2]


def test_a_suspect_checkpoint_is_set_aside_before_its_step_comes_again(root):
    write(root, 2, 4)
    chooser = Chooser(options(root), {}, {})
    rejected = chooser.reject_newest(lambda step: f"suspect since step {step}")
    chooser.set_aside(rejected)
    assert steps_in(root) == [2]
    assert (root / "step-4.invalid-0" / REASON).read_bytes() == b"suspect since step 4\n"


def test_only_valid_ones_of_this_run_count_and_go(root):
    write(root, 1, 2, 3, 4, 5, 9)
    write(root, 6, fingerprints={"model": "another"})
    (root / "step-4" / "shard").write_bytes(b"123")  # cut: takes no place among the latest
    (root / "step-3" / "KEEP").write_bytes(b"")
    (root / "step-notes").mkdir() if isinstance(root, Path) else None
    # The newest three that count: 9, 3 (pinned, but it counts) and 2.
    assert _pruned(root, 9, bad=(5,), keep_latest_k=3) == [2, 3, 4, 5, 6, 9]
    write(root, 10, validation_loss=3.0)
    assert _pruned(root, 10, keep=(2,), keep_latest_k=1) == [2, 3, 6, 10], (
        "2 is resumed from, 3 is pinned"
    )


def test_a_pin_keeps_a_checkpoint_while_it_is_read_and_one_of_the_user_stays(root):
    write(root, 1, 2, 3)
    (root / "step-2" / "KEEP").write_bytes(b"")
    with pinned(root / "step-1"):
        with pinned(root / "step-1"):
            pass
        assert _pruned(root, 3, keep_latest_k=2) == [1, 2, 3]
        if isinstance(root, Path):
            # As a reader that was killed leaves it for more than a day.
            (pin,) = (root / "step-1").glob(".reading-*")
            os.utime(pin, (0, time.time() - 90_000))
            assert _pruned(root, 3, keep_latest_k=2) == [2, 3]
    write(root, 4)
    assert _pruned(root, 4, keep_latest_k=2) == [2, 3, 4]


def test_of_a_link_the_link_goes(tmp_path):
    root = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    write(root, 1, 2, 3)
    (root / "step-1").rename(elsewhere)
    (root / "step-1").symlink_to(elsewhere)
    assert _pruned(root, 3, keep_latest_k=2) == [2, 3]
    assert names(elsewhere) == ["manifest.json", "shard"]


def test_the_last_that_is_known_to_be_good_stays(root):
    """Weights may be finite and the next loss is not: only training on them, or a validation, shows
    them good.
    """
    write(root, 1, 2, 3)
    assert _pruned(root, 3, keep_latest_k=1) == [2, 3]
    write(root, 4, validation_loss=2.5)
    assert _pruned(root, 4, keep_latest_k=1) == [4]
    write(root, 5)
    assert _pruned(root, 5, keep_latest_k=1) == [4, 5]


def test_milestones_stay(tmp_path):
    write(tmp_path, *range(21))
    assert _pruned(tmp_path, 20) == [*range(21)], "by default nothing goes"
    left = _pruned(tmp_path, 20, keep_latest_k=2, milestones="powers_of_two", keep_every=7)
    assert left == [0, 1, 2, 4, 7, 8, 14, 16, 19, 20]
    assert _pruned(tmp_path, 20, keep_latest_k=2, milestones=[4, 100]) == [4, 19, 20]


def test_weights_alone_take_no_place_and_stay(tmp_path):
    write(tmp_path, 1, 2, 3)
    write(tmp_path, 4, weights_only=True)
    assert _pruned(tmp_path, 4, keep_latest_k=1) == [1, 2, 3, 4], (
        "no run can resume from the newest"
    )
    write(tmp_path, 5, 6)
    assert _pruned(tmp_path, 6, keep_latest_k=2) == [4, 5, 6]


def test_nothing_goes_for_one_that_is_not_whole_or_of_a_later_step(tmp_path):
    write(tmp_path, 1, 2, 3, 900)
    (tmp_path / "step-3" / "shard").unlink()
    with pytest.raises(CheckpointError, match="shard is missing"):
        _pruned(tmp_path, 3, keep_latest_k=1)
    assert steps_in(tmp_path) == [1, 2, 3, 900]
    (tmp_path / "step-3" / "shard").write_bytes(SHARD)
    assert _pruned(tmp_path, 3, keep_latest_k=2) == [2, 3, 900], (
        "one left behind at a higher step takes no place"
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "manifest.json").unlink(), "never finished"),
        (lambda f: (f / "manifest.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "shard").write_bytes(b"123"), "has 3 bytes, the manifest says 4"),
        (lambda f: (f / "shard").unlink(), "shard is missing"),
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), "maximum recursion depth"),
        (lambda f: edit(f, train={"next_sequence": 41}), "is damaged"),
        (lambda f: sign(f, validation_loss=float("nan")), "validation_loss = nan"),
        (lambda f: sign(f, files={"../shard": 4}), "'../shard'"),
        (lambda f: sign(f, hashes={}), "not every file has a hash"),
        (lambda f: sign(f, hashes={"shard": "crc32:1234"}), "is no digest"),
        (lambda f: sign(f, step=4), "renamed"),
    ],
)
def test_damaged_newest_is_named_and_the_one_before_is_used(tmp_path, damage, reason):
    write(tmp_path, 5, 6)
    damage(tmp_path / "step-6")
    manifest, (passed,) = find(tmp_path)
    assert manifest == replace(MANIFEST, step=5)
    assert reason in passed
    assert "step-6" in passed


def test_newer_format_is_neither_passed_over_nor_moved(tmp_path):
    """Otherwise its run would lose steps without a word."""
    write(tmp_path, 5, 6)
    edit(tmp_path / "step-6", format=FORMAT + 1)
    before = _bytes(tmp_path / "step-6")
    for use in (
        lambda: find(tmp_path),
        lambda: find(tmp_path, 6),
        lambda: fault_of(tmp_path / "step-6"),
        lambda: begin(tmp_path, 6),
    ):
        told = f"step-6/manifest.json has format {FORMAT + 1}.* upgrade titanlite"
        with pytest.raises(CheckpointError, match=told):
            use()
    assert _bytes(tmp_path / "step-6") == before
    assert steps_in(tmp_path) == [5, 6]
    assert find(tmp_path, 5)[0] is not None
    assert [entry.state for entry in list_checkpoints(tmp_path)] == ["valid", "newer format"]


def test_newest_is_found_by_number_and_a_demanded_step_by_name(tmp_path):
    write(tmp_path, 9, 10, 100)
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-999").write_text("a file, not a folder")
    assert steps_in(tmp_path) == [9, 10, 100]
    assert find(tmp_path) == (replace(MANIFEST, step=100), [])
    assert find(tmp_path, 10) == (replace(MANIFEST, step=10), [])
    with pytest.raises(CheckpointError, match=r"no step-7 \(steps there: 9, 10, 100\)"):
        find(tmp_path, 7)
    assert find(tmp_path / "nowhere") == (None, [])
