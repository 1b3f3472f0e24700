"""torchrun that ends with its workers' exit code."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from tests.support.pool import free_port
from tests.support.processes import environment, python
from titanlite import torchrun
from titanlite.exit_codes import (
    CONFIG,
    GUARD,
    LOST_PEER,
    PREEMPTED_UNSAVED,
    ROUND,
    VARIABLE,
    code_of,
    report_code,
)
from titanlite.torchrun import code_after_signal, code_for_scheduler, last_error, worst_code


@pytest.mark.parametrize(
    ("failed", "told", "code"),
    [
        ([], "0 0\n0 0\n", None),
        ([], "0 7\n0 3\n", 3),
        ([], "0 7\n0 7\n", 7),
        ([], "0 1\n0 7\n", 1),
        ([], "0 5\n0 5\n1 6\n1 6\n", 6),
        ([], '0 1 "rank 1 on a: OSError: 1 2"\n0 7 ""\n', 1),
        # A worker that torchrun stops after another failed was not preempted: its code 5 would let
        # a wrapper start a broken installation for ever.
        ([1], "0 5\n", None),
        ([-9], "0 5\n0 5\n", None),
        ([7], "0 7\n0 5\n", 7),
        ([1], '0 1 "words"\n0 5\n', 1),
        ([8], "0 8\n0 5\n0 6\n0 7\n", 8),
        ([], '0 -1\n0 -1 "/run"\n0 0\n0 0\n', None),
        ([-9], "0 7\n1 -1\n1 -1\n", None),
    ],
)
def test_which_code_stands_for_all(failed, told, code):
    assert worst_code(told, failed) == code


@pytest.mark.parametrize(
    ("told", "code"),
    [(None, 5), ("", 1), ("0 -1\n", 1), ("0 0\n0 0\n", 0), ("0 5\n0 0\n", 5), ("0 6\n", 6)],
)
def test_which_code_stands_for_all_after_a_signal_to_torchrun(told, code):
    """Of workers that had not begun, were killed, were done, and had nothing saved."""
    assert code_after_signal(told) == code


def test_a_scheduler_that_restarts_by_codes_gets_its_code(monkeypatch):
    ends: list[tuple[int, list[int]]] = [(1, [-9]), (1, [-9, 1]), (5, []), (6, []), (7, [7])]
    assert [code_for_scheduler(*end) for end in ends] == [137, 1, 5, 6, 7]
    monkeypatch.setenv("TITANLITE_RESTART_CODE", "138")
    assert [code_for_scheduler(*end) for end in ends] == [138, 1, 138, 6, 138]


def test_what_the_last_restart_said_is_kept_for_the_end():
    told = '0 1 "rank 0: first"\n1 7 ""\n1 1 "rank 1 on a: OSError: a\\nb"\n1 1 "rank 2: third"\n'
    assert last_error(told) == "rank 1 on a: OSError: a\nb"
    assert last_error("0 7\n") == last_error("") == ""


def test_a_taken_port_is_a_wrong_setting_and_an_unreachable_store_is_not():
    import torch.distributed as dist

    with socket.create_server(("", 0)) as other, pytest.raises(dist.DistNetworkError) as taken:
        dist.TCPStore("localhost", other.getsockname()[1], 1, True, timeout=timedelta(seconds=1))
    assert code_of(taken.value) == CONFIG
    assert code_of(dist.DistNetworkError("The client socket has timed out")) == LOST_PEER


def test_a_killed_only_rank_ends_as_killed():
    """So that the scripts of `titanlite launch` start it again, as when one of several is
    killed.
    """
    words = ["--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    kills = ["--no-python", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    done = python("-m", "titanlite.torchrun", *words, *kills)
    assert done.returncode == 128 + 9
    assert "Signal 9 (SIGKILL)" in done.stderr


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("first", "stopped", "starts", "end"),
    [
        ("kill -KILL $$", "exit 5", 2, 128 + 9),
        ("exit 1", "exit 5", 2, 1),
        ("exit 7", "exit 2", 1, 1),
        ("exit 5", "exit 7", 1, 1),
    ],
)
def test_what_failed_before_torchrun_stopped_the_others_decides(
    tmp_path, first, stopped, starts, end
):
    """But an end that would come again counts whenever it comes."""
    script = tmp_path / "rank.sh"
    script.write_text(
        f"cd {tmp_path}; echo start >> starts-$RANK\n"
        f"if [ $RANK = 1 ]; then trap '{stopped}' TERM; touch ready; else\n"
        f"until [ -e ready ]; do sleep 0.05; done; rm ready; {first}; fi\n"
        "while :; do sleep 0.05; done\n"
    )
    words = ["--nproc_per_node=2", "--max-restarts=1", "--standalone", "--no-python"]
    done = python("-m", "titanlite.torchrun", *words, "sh", script)
    assert (tmp_path / "starts-0").read_text().split() == ["start"] * starts
    assert done.returncode == end, done.stderr
    # Its table hides no report of a rank.
    blamed = re.findall(r"exitcode +: \S+", done.stderr)
    assert len(blamed) == 1 + (stopped == "exit 2"), done.stderr
    assert "most recent call last" not in done.stderr


@pytest.mark.parametrize(
    ("code", "waiting", "left"), [(5, 0, 0), (5, 1, 2), (6, 1, 2), (2, 1, 0), (7, 1, 2)]
)
def test_a_stop_for_a_machine_that_joins_leaves_the_restarts(monkeypatch, code, waiting, left):
    """The torchrun that sees it first stops its ranks, and they tell the other ones."""
    ended = SimpleNamespace(failures={0: SimpleNamespace(exitcode=code)})
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: ended)
    torchrun._keep_to_codes()
    handler = SimpleNamespace(num_nodes_waiting=lambda: waiting)
    agent: Any = SimpleNamespace(_remaining_restarts=2)
    group: Any = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler))
    assert LocalElasticAgent._monitor_workers(agent, group) is ended
    assert agent._remaining_restarts == left


#: One of two torchruns on this machine; the second one is late with its last words to the store of
#: the first.
LATE = """
import os, time
import torch.distributed.elastic.utils.store as store
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from titanlite.dist import rendezvous_end
rendezvous_end.GOOD_SECONDS = rendezvous_end.BAD_SECONDS = 300.0
Handler = dynamic_rendezvous.DynamicRendezvousHandler
from titanlite.torchrun import main

def late(function):
    return lambda *words, **named: (time.sleep(1), function(*words, **named))[1]

if os.environ["NODE"] == "1":
    Handler.shutdown = late(Handler.shutdown)
    enter = store._barrier_nonblocking
    store._barrier_nonblocking = lambda **named: (enter(**named), time.sleep(1))[0]
main()
"""


def _on_two_machines(kind: str, start: list[str], *program: object) -> tuple[list[int], list[str]]:
    """Start a torchrun for both with a program; return their codes and what they print.

    start: words of Python that start torchrun. NODE: the number of the machine.
    """
    port = free_port()
    processes = []
    for node in range(2):
        options = [f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        if kind == "c10d":
            options = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=x"]
            options += [f"--rdzv_conf=is_host={1 - node}", "--local_addr=127.0.0.1"]
        words = [sys.executable, *start, "--nnodes=2", "--nproc_per_node=1", *options]
        env = environment(NODE=str(node))
        words += map(str, program)
        processes.append(subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=600)[1] for process in processes]
    return [process.returncode for process in processes], said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "program", "code"), [("static", "true", 0), ("c10d", "exit 7", 1)]
)
def test_an_end_on_two_machines_prints_no_stack_of_torch(kind, program, code):
    codes, said = _on_two_machines(kind, ["-c", LATE], "--no-python", "sh", "-c", program)
    assert codes == [code, code], said
    for text in said:
        assert "frame #" not in text
        assert "TCPStore" not in text
        assert "rendezvous" not in text
        assert code or text == ""


#: A rank that meets the others; in the first round the one of the second machine is killed then.
#: In the second one it ends for good.
MEETS = """
import os, signal, sys, time
from titanlite.exit_codes import GUARD, LOST_PEER, end_process
from titanlite.dist.rendezvous import barrier
from titanlite.dist.run_store import register
rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
store = register(rank, size, (os.environ["MASTER_ADDR"], port), limit=20)
barrier(store, rank, size, patience=20, limit=20)
if not os.path.exists(sys.argv[1]):
    time.sleep(1)
    if os.environ["GROUP_RANK"] == "1":
        open(sys.argv[1], "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)
barrier(store, rank, size, patience=20, limit=20)
if os.environ["GROUP_RANK"] == "1":
    end_process(GUARD)
# The other machine's torchrun sees the end before; a busy one needs seconds.
time.sleep(5)
end_process(LOST_PEER)
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_on_one_of_two_machines_starts_again_on_both(tmp_path):
    """torchrun of the other machine follows, and counts no restart. An end for good is the end of
    both.
    """
    (tmp_path / "meets.py").write_text(MEETS)
    program = ("--max-restarts=2", tmp_path / "meets.py", tmp_path / "killed")
    codes, said = _on_two_machines("c10d", ["-m", "titanlite.torchrun"], *program)
    assert sorted(codes) == [GUARD, LOST_PEER], said
    lost = [text for text in said if "another machine has ended, and its output has the" in text]
    assert len(lost) == 1 and "Start again" not in lost[0], said


def test_codes_of_a_round_count_alone(tmp_path, monkeypatch):
    """Also where this machine counts no restart, since it follows another one."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "codes"))
    for number, code in enumerate((PREEMPTED_UNSAVED, LOST_PEER)):
        monkeypatch.setenv(ROUND, str(number))
        report_code(code)
    assert worst_code((tmp_path / "codes").read_text()) == LOST_PEER


@pytest.mark.slow
def test_a_start_that_meets_the_closed_rendezvous_of_an_earlier_one_may_be_repeated():
    """As a new pod whose peers have not ended yet."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    endpoint = f"127.0.0.1:{free_port()}"
    meeting = RendezvousParameters("c10d", endpoint, "x", 2, 2, is_host=True)
    earlier = get_rendezvous_handler(meeting)
    earlier.set_closed()
    words = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=x"]
    words += [f"--rdzv_endpoint={endpoint}", "--rdzv_conf=is_host=0", "--no-python", "true"]
    late = python("-m", "titanlite.torchrun", *words)
    assert late.returncode == LOST_PEER, late.stderr
    assert late.stderr.endswith("which is about to end. Start again\n")


#: A worker that says that it was asked to stop, and its launcher.
WORKER = """
import os, signal, time
from titanlite.dist.parent_death import end_with_parent
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"asked to stop"), os._exit(0)))
end_with_parent(signal.SIGTERM)
os.write(1, b"ready")
time.sleep(120)
"""
LAUNCHER = (
    f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {WORKER!r}]); "
    "time.sleep(120)"
)


def test_a_worker_is_asked_to_stop_when_its_torchrun_is_killed():
    env = environment(TORCHELASTIC_RUN_ID="x")
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], env=env, stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.read(5) == b"ready"
        launcher.kill()
        assert launcher.stdout.read() == b"asked to stop"


def test_a_process_ends_when_its_parent_ended_before_it_asked():
    late = (
        "from titanlite.dist.parent_death import end_with_parent; end_with_parent(9, 2**22 + 1); "
        "print('goes on')"
    )
    assert python("-c", late).returncode == -9


@pytest.mark.slow
def test_its_end_leaves_no_time_to_a_thread_that_talks_to_the_store(tmp_path):
    """Where Python ends such a thread, torch aborts the process, with code 134."""
    script = tmp_path / "rank.py"
    script.write_text("print('done')")
    words = (
        "import atexit; atexit.register(print, 'late'); from titanlite.torchrun import main; main()"
    )
    done = python("-c", words, "--standalone", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
