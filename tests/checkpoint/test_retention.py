"""How checkpoints come and go, in folders and stores alike: what a kill leaves, and which ones
stay.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.checkpoints import MANIFEST, SHARD, names, options, write
from titanlite.checkpoint import retention
from titanlite.checkpoint.manifest import (
    REASON,
    CheckpointError,
    find,
    marked_folder,
    steps_in,
)
from titanlite.checkpoint.retention import (
    Deleter,
    begin,
    clear_leftovers,
    delete,
    is_pinned,
    leftovers,
    pinned,
    prune,
    publish,
    quarantine,
    unpublish,
)
from titanlite.checkpoint.schedule import SaveSchedule
from titanlite.checkpoint.store_paths import AnyPath, StorePath
from titanlite.cli.checkpoint_folders import list_checkpoints, remove


def _pruned(
    root: AnyPath, newest: int, keep: tuple[int, ...] = (), bad: tuple[int, ...] = (), **fields: Any
) -> list[int]:
    """Prune, delete, and return the steps that are left."""
    prints = MANIFEST.fingerprints
    for mark in prune(root, newest, options(root, **fields), keep, bad, prints):
        delete(mark)
    assert leftovers(root) == []
    return steps_in(root)


class _KilledError(BaseException):
    pass


def _kill_at(monkeypatch: pytest.MonkeyPatch, call: int, action: Any) -> bool:
    """Run `action` as a process that is killed before its `call`-th change of the storage; return
    whether it was.
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
            action()
        except _KilledError:
            return True
    return False


def _save(root: AnyPath) -> None:
    clear_leftovers(root, 6, Deleter())
    folder = begin(root, 6)
    (folder / "shard").write_bytes(SHARD)
    publish(folder, replace(MANIFEST, step=6))


def _delete(root: AnyPath) -> None:
    delete(unpublish(root / "step-4"))


def _set_aside(root: AnyPath) -> None:
    quarantine(root / "step-4", "why")


@pytest.mark.parametrize(
    ("action", "step", "end"), [(_save, 6, [2, 4, 6]), (_delete, 4, [2]), (_set_aside, 4, [2])]
)
def test_a_kill_at_any_moment_loses_nothing(
    root: AnyPath, monkeypatch: pytest.MonkeyPatch, action: Any, step: int, end: list[int]
) -> None:
    """Afterwards the step is whole or gone, no other has changed, and the next start and save leave
    no trace.
    """
    for call in range(1, 100):
        here = root / str(call)
        write(here, 2, 4)
        killed = _kill_at(monkeypatch, call, lambda here=here: action(here))
        assert steps_in(here) in ([2, 4], end), call
        assert all(find(here, one) == (replace(MANIFEST, step=one), []) for one in steps_in(here))
        assert find(here)[1] == [], "an unfinished one is not even mentioned"
        assert {entry.state for entry in list_checkpoints(here)} <= {
            "valid",
            "partial",
            "being deleted",
            "set aside",
        }
        for mark in leftovers(here):
            delete(mark)
        left = steps_in(here)
        write(here, *({2, 4, 6} - {*left}))
        assert steps_in(here) == [2, 4, 6]
        assert leftovers(here) == []
        assert not [name for name in names(here) if not name.startswith("step-")]
        if not killed:
            assert left == end
            assert call > 2
            return
    raise AssertionError("it never ended")


def test_leftovers_of_a_save_and_of_older_versions_go(root: AnyPath) -> None:
    """Older versions gave a folder itself such a name, and left it without a manifest or
    with one.
    """
    write(root, 2)
    (begin(root, 6) / "shard").write_bytes(SHARD)
    if isinstance(root, Path):
        for name in (
            ".partial-step-8-1f0c77aa",
            ".partial-step-9-123",
            ".deleted-step-1",
            ".deleted-step-1.1",
        ):
            (root / name).mkdir()
            (root / name / "shard").write_bytes(SHARD)
        (root / ".partial-step-8-1f0c77aa" / "manifest.json").write_text(
            replace(MANIFEST, step=8).to_json()
        )
        assert len(leftovers(root)) == 5
    assert steps_in(root) == [2]
    assert [entry.folder.name for entry in list_checkpoints(root)][-1].startswith(".partial-")
    deleter = Deleter()
    deleter.delete(leftovers(root))
    assert deleter.wait(300)
    assert names(root) == ["step-2"]


@pytest.mark.parametrize("kind", [".partial-", ".deleted-"])
def test_a_mark_deletes_no_folder_but_that_of_a_checkpoint(root: AnyPath, kind: str) -> None:
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


def test_a_lost_manifest_is_no_leftover(root: AnyPath) -> None:
    """Without a mark nobody has begun to save or delete it: it is named, and kept when its step is
    saved again.
    """
    write(root, 2, 4)
    (root / "step-4" / "manifest.json").unlink()
    manifest, passed = find(root)
    assert manifest is not None
    assert manifest.step == 2
    assert "step-4 has no manifest" in passed[0]
    assert leftovers(root) == []
    write(root, 4)
    assert steps_in(root) == [2, 4]
    assert names(root / "step-4.invalid-0") == [REASON, "shard"]


def test_a_valid_checkpoint_is_never_overwritten_and_an_invalid_one_is_kept(root: AnyPath) -> None:
    write(root, 2, 4)
    before = {path: (root / "step-4" / path).read_bytes() for path in names(root / "step-4")}
    with pytest.raises(CheckpointError, match="already holds a valid checkpoint"):
        begin(root, 4)
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        publish(root / "step-4", replace(MANIFEST, step=4, train={"another": 1}))
    assert {
        path: (root / "step-4" / path).read_bytes() for path in names(root / "step-4")
    } == before
    (root / "step-4" / "shard").write_bytes(b"12345")
    folder = begin(root, 4)
    assert names(root / "step-4.invalid-0") == [REASON, *before]
    assert b"has 5 bytes, the manifest says 4" in (root / "step-4.invalid-0" / REASON).read_bytes()
    assert (root / "step-4.invalid-0" / "shard").read_bytes() == b"12345"
    (folder / "shard").write_bytes(SHARD)
    publish(folder, replace(MANIFEST, step=4))
    with pytest.raises(CheckpointError):
        begin(root, 4)
    begin(root, 4, known_bad={4: "a hash differs"})
    assert (root / "step-4.invalid-1" / REASON).read_bytes() == b"a hash differs\n"
    assert steps_in(root) == [2]


def test_only_valid_ones_of_this_run_count_and_go(root: AnyPath) -> None:
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


def test_a_pin_keeps_a_checkpoint_while_it_is_read_and_one_of_the_user_stays(
    root: AnyPath,
) -> None:
    write(root, 1, 2, 3)
    with pinned(root / "step-1"):
        assert _pruned(root, 3, keep_latest_k=2) == [1, 2, 3]
        with pytest.raises(CheckpointError, match="is valid, pinned"):
            remove([root / "step-1"])
        with pinned(root / "step-1"):
            pass
        assert is_pinned(root / "step-1")
    assert _pruned(root, 3, keep_latest_k=2) == [2, 3]
    (root / "step-2" / "KEEP").write_bytes(b"")
    with pinned(root / "step-2"):
        pass
    write(root, 4)
    assert _pruned(root, 4, keep_latest_k=2) == [2, 3, 4]
    remove([root / "step-2"], force=True)
    assert steps_in(root) == [3, 4]


def test_of_a_link_the_link_goes(tmp_path: Path) -> None:
    root = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    write(root, 1, 2, 3)
    for go in (lambda: remove([root / "step-1"]), lambda: _pruned(root, 3, keep_latest_k=2)):
        if not elsewhere.exists():
            (root / "step-1").rename(elsewhere)
        (root / "step-1").symlink_to(elsewhere)
        go()
        assert names(root) == ["step-2", "step-3"]
        assert names(elsewhere) == [
            "manifest.json",
            "shard",
        ]


def test_the_last_that_is_known_to_be_good_stays(root: AnyPath) -> None:
    """Weights may be finite and the next loss is not: only training on them, or a validation, shows
    them good.
    """
    write(root, 1, 2, 3)
    assert _pruned(root, 3, keep_latest_k=1) == [2, 3]
    write(root, 4, validation_loss=2.5)
    assert _pruned(root, 4, keep_latest_k=1) == [4]
    write(root, 5)
    assert _pruned(root, 5, keep_latest_k=1) == [4, 5]


def test_milestones_stay(tmp_path: Path) -> None:
    write(tmp_path, *range(21))
    assert _pruned(tmp_path, 20) == [*range(21)], "by default nothing goes"
    assert _pruned(tmp_path, 20, keep_latest_k=2, milestones="powers_of_two", keep_every=7) == [
        0,
        1,
        2,
        4,
        7,
        8,
        14,
        16,
        19,
        20,
    ]
    assert _pruned(tmp_path, 20, keep_latest_k=2, milestones=[4, 100]) == [4, 19, 20]


def test_the_best_by_validation_stay(root: AnyPath) -> None:
    for step, loss in enumerate([5.0, 3.0, 4.0, 2.0, None, 3.0, 9.0], start=1):
        write(root, step, validation_loss=loss)
    write(root, 8, validation_loss=0.1, fingerprints={"model": "another"})
    write(root, 9)
    (root / "step-4" / "shard").unlink()  # the lowest, but nobody can load it
    assert _pruned(root, 9, keep_latest_k=2, keep_best=2) == [2, 6, 7, 8, 9], (
        "of equal ones both have a place here"
    )
    assert _pruned(root, 9, keep_latest_k=2, keep_best=1) == [2, 7, 8, 9], (
        "of equal ones the earlier"
    )


def test_losses_on_another_held_out_text_are_not_compared(tmp_path: Path) -> None:
    """The best on each text stay; a version that noted no text is one more."""
    for step, text, loss in (
        (1, None, 1.5),
        (2, "a", 2.0),
        (3, "a", 1.0),
        (4, "b", 7.0),
        (5, "b", 6.0),
        (6, "b", 8.0),
    ):
        train = {**MANIFEST.train, **({} if text is None else {"held_out": text})}
        write(tmp_path, step, validation_loss=loss, train=train)
    assert _pruned(tmp_path, 6, keep_latest_k=1, keep_best=1) == [1, 3, 5, 6]
    for text, loss, due in (
        ("b", 6.5, False),
        ("b", 5.5, True),
        ("a", 5.5, False),
        ("c", 99.0, True),
    ):
        world: Any = SimpleNamespace(rank=0, broadcast=lambda value: value)
        section = options(tmp_path, keep_latest_k=1, keep_best=1, interval=1000)
        schedule = SaveSchedule(section, world, MANIFEST.fingerprints, held_out=text)
        assert schedule.due(7, loss) is due, text


def test_weights_alone_take_no_place_and_stay(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    write(tmp_path, 4, weights_only=True)
    assert _pruned(tmp_path, 4, keep_latest_k=1) == [1, 2, 3, 4], (
        "no run can resume from the newest"
    )
    write(tmp_path, 5, 6)
    assert _pruned(tmp_path, 6, keep_latest_k=2) == [4, 5, 6]


def test_nothing_goes_for_one_that_is_not_whole_or_of_a_later_step(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 900)
    (tmp_path / "step-3" / "shard").unlink()
    with pytest.raises(CheckpointError, match="shard is missing"):
        _pruned(tmp_path, 3, keep_latest_k=1)
    assert steps_in(tmp_path) == [1, 2, 3, 900]
    (tmp_path / "step-3" / "shard").write_bytes(SHARD)
    assert _pruned(tmp_path, 3, keep_latest_k=2) == [2, 3, 900], (
        "one left behind at a higher step takes no place"
    )
