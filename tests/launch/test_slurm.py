"""Jobs of `titanlite launch slurm`: as text, with stand-ins for Slurm's programs and for Python,
and on a real Slurm, where a run that is stopped or loses a node ends with the same weights.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import lost_nodes
from tests.launch.examples import EXAMPLES
from tests.launch.slurm_jobs import ENDS, STEPS, read_log, submit, until_step
from tests.support.processes import ROOT
from tests.support.tiny import TWO_LAYERS
from tests.support.train_runs import rows, unequal
from titanlite import exit_codes
from titanlite.cli import main as cli
from titanlite.cli.launch import prepare
from titanlite.config.errors import ConfigError
from titanlite.launch import slurm as launch_slurm
from titanlite.launch.job import limit_seconds
from titanlite.runs.read_jsonl import read_lines

FOLDER = ROOT / "deploy" / "examples" / "slurm"


@pytest.mark.slow
def test_a_job_that_is_asked_to_stop_saves_and_goes_on_later(slurm, undisturbed, tmp_path):
    """Stop the job by the signal that Slurm sends before a time limit."""
    folder = tmp_path / "run"
    umask = os.umask(0o022)
    try:
        job = submit(slurm, folder)
    finally:
        os.umask(umask)
    until_step(folder, 3)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert slurm.wait(job, *ENDS) == "COMPLETED", read_log(folder, job)
    assert rows(folder) == rows(undisturbed)
    assert unequal(undisturbed, folder, STEPS) == []
    assert "SIGUSR1: stopping" in read_log(folder, job)
    assert slurm.field(job, "Restarts") == "1"
    launch = folder / "launch"
    modes = {file.name: file.stat().st_mode & 0o777 for file in [launch, *launch.iterdir()]}
    names = ("config.toml", "job.sbatch", "failures.log", f"slurm-{job}.log")
    assert modes == {"launch": 0o700, **dict.fromkeys(names, 0o600)}


@pytest.mark.slow
def test_a_node_that_computes_wrong_is_excluded_from_the_restart(slurm, tmp_path):
    folder = tmp_path / "run"
    more = ["--sdc.freq=2", "--training.steps=6", "--checkpoint.interval=2"]
    job = submit(slurm, folder, *more, "--job.callbacks=tests.launch.slow_steps:WrongNode")
    assert slurm.wait(job, *ENDS) == "COMPLETED", read_log(folder, job)
    assert (slurm.field(job, "Restarts"), slurm.field(job, "ExcNodeList")) == ("1", "n2")
    assert slurm.field(job, "NodeList") == "n[1,3]"
    steps = [row["step"] for row in read_lines(folder / "metrics.jsonl") if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    (event,) = read_lines(folder / "guard.jsonl")
    assert (event["step"], event["kind"], event["hosts"]) == (4, "corruption", ["n2"])


@pytest.mark.soak
def test_a_spare_node_replaces_one_that_is_lost_without_the_queue(slurm, undisturbed, tmp_path):
    """Lose a node and its disk in a step: the other node has a copy of its part."""
    loss = lost_nodes.lose_one(slurm, tmp_path, lost_nodes.MOMENTS[1], undisturbed)
    # As `Held` stops there.
    assert (loss.done, loss.resumed) == (10, 8)
    assert 0 < loss.ended <= loss.started < loss.stepped < 300
    assert loss.told == pytest.approx(loss.stepped, abs=5)


def _render(*flags: str) -> str:
    return launch_slurm.files(prepare(list(flags)))[launch_slurm.FILE]


def _example(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Render an example as on a cluster whose shared folder has a checkout and its virtual
    environment. A name may end with _spare: with one spare node.
    """
    model = name.removesuffix("_spare")
    monkeypatch.setattr(Path, "cwd", lambda: Path("/fsx/titanlite"))
    monkeypatch.setattr(sys, "executable", "/fsx/titanlite/.venv/bin/python")
    return _render(
        *EXAMPLES[model],
        "--launch.shared_dir=/fsx",
        f"--job.dump_folder=/fsx/runs/{name}",
        "--launch.time_limit=2-0",
        f"--launch.spare_nodes={int(name != model)}",
    )


#: The job of each model, and one with a spare node.
_STORED = [*EXAMPLES, "llama3_1_8b_spare"]


@pytest.mark.parametrize("name", _STORED)
def test_examples(name, monkeypatch):
    stored = (FOLDER / f"{name}.sbatch").read_text()
    assert _example(name, monkeypatch) == stored, "run: python scripts/generate.py"


def test_a_container_mounts_the_shared_folder_and_starts_python_of_its_own():
    folders = ["--job.dump_folder=/fsx/runs/8b", "--launch.shared_dir=/fsx"]
    probe = "--launch.environment.NCCL_DEBUG=INFO"
    text = _render(*EXAMPLES["llama3_1_8b"], *folders, _IMAGE, probe)
    (mounts,) = re.findall("^mounts=(.*)", text, re.M)
    assert set(mounts.split(",")) == {"/fsx:/fsx", f"{ROOT}:{ROOT}"}
    assert re.search(r"^variables=\S*,NCCL_DEBUG ", text, re.M)
    assert "exec python -m" in text


_FOLDERS = [
    "--launch.gpus_per_node=8",
    "--launch.shared_dir=/fsx",
    "--job.dump_folder=/fsx/run",
    "--checkpoint.enable_checkpoint",
]
_IMAGE = "--launch.image=/fsx/my image.sqsh"


@pytest.mark.parametrize(
    ("flags", "key", "text"),
    [
        ([], "launch.gpus_per_node", "not known"),
        (
            ["--launch.instance_type=ml.p5.48xlarge", "--launch.gpus_per_node=16"],
            "launch.gpus_per_node",
            "has 8 GPU",
        ),
        (["--launch.environment.HF_TOKEN=(removed)"], "launch.environment.HF_TOKEN", "secret"),
        (
            ["--launch.gpus_per_node=8", "--launch.shared_dir=/fsx"],
            "job.dump_folder",
            "/fsx: not all machines",
        ),
        (
            [*_FOLDERS, "--checkpoint.folder=/tmp/x"],
            "checkpoint.folder",
            "outside of launch.shared_dir",
        ),
        (
            [*_FOLDERS, "--launch.shared_dir=", _IMAGE, "--checkpoint.folder=/x"],
            "checkpoint.folder",
            "the container's",
        ),
        (
            ["--launch.gpus_per_node=8", "--launch.time_limit=0:03:59"],
            "launch.notice_seconds",
            "120 s",
        ),
    ],
)
def test_a_job_that_cannot_work_is_refused(flags, key, text):
    with pytest.raises(ConfigError, match=f"(?s){key}: .*{text}"):
        _render("--job.config_file=llama3_8b.toml", *flags)


GROUPS = '[[optimizer.groups]]\nparameters = "nothing"\nlr = 1.0\n'


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--training.fsdp_units=Nope", "training.fsdp_units: no FSDP group can be made of Nope"),
        ("groups.toml", "optimizer.groups"),
        ("--training.tensor_parallel_degree=3", "does not divide the world size 16"),
    ],
)
def test_a_check_refuses_what_the_launch_does(word, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("groups.toml").write_text(GROUPS)
    machines = ["--launch.nodes=2", "--launch.instance_type=p5.48xlarge"]
    for command in (["config", "check"], ["launch", "slurm", "--dry-run"]):
        code = cli.main([*command, "debug_model.toml", word, *machines])
        assert code == exit_codes.CONFIG
        assert said in capsys.readouterr().err
    assert cli.main(["config", "check", "debug_model.toml", *machines]) == exit_codes.DONE
    assert re.search(r"ranks +16 \(of section \[launch\]", capsys.readouterr().out)


def test_variables_of_a_job():
    flags = ["--job.config_file=llama3_8b.toml", "--launch.instance_type=ml.p5.48xlarge"]
    text = _render(*flags, "--launch.environment.TORCH_ELASTIC_SHUTDOWN_TIMEOUT=60")
    assert re.findall("SHUTDOWN_TIMEOUT=(.*)", text) == ["60"]
    assert "export FI_" not in text
    assert "gpus-per-node=8" in text
    assert "export FI_EFA_USE_DEVICE_RDMA=1" in _render(*flags, "--launch.nodes=2")
    text = _render(*flags, "--launch.nodes=2", "--no-launch.efa")
    assert "export FI_" not in text and "export NCCL_SOCKET_IFNAME=" in text


def test_a_folder_with_the_job_of_another_config_is_refused_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, flavor in (("One", "debugmodel"), ("two", "3.1-debugmodel")):
        text = f'[job]\ndump_folder = "./outputs"\n[model]\nflavor = "{flavor}"\n'
        Path(f"{name}.toml").write_text(f"{text}[training]\ndataset_path = 'missing.txt'\n")
    words = ["launch", "slurm", "One.toml", "--launch.gpus_per_node=1"]
    assert cli.main(words) == exit_codes.DONE
    warning = 'One.toml:6: training.dataset_path: no file or folder "missing.txt"'
    assert f"warning: not there: {warning}" in capsys.readouterr().err
    script = Path("outputs/launch/job.sbatch")
    assert "\n#SBATCH --job-name=one\n" in script.read_text()
    first = script.read_bytes()
    assert cli.main([*words, "--job.config_file=two.toml"]) == exit_codes.CONFIG
    assert f"another config, {tmp_path / 'One.toml'}" in capsys.readouterr().err
    assert script.read_bytes() == first
    assert cli.main([*words, "--launch.nodes=2"]) == exit_codes.DONE
    assert script.read_bytes() != first
    kept = ["launch", "slurm", "outputs/launch/config.toml"]
    assert cli.main(kept) == exit_codes.DONE
    assert "\n#SBATCH --job-name=one\n" in script.read_text()
    for damaged in (b"\xff", b"model = 1"):
        Path("outputs/launch/config.toml").write_bytes(damaged)
        assert cli.main(words) == exit_codes.DONE
    for flag, key in (
        ("--job.dump_folder=/not-mounted/run", "job.dump_folder: /not-mounted does"),
        (f"--launch.shared_dir={tmp_path}/shared", f"launch.shared_dir: {tmp_path}/shared does"),
    ):
        folder = f"--job.dump_folder={tmp_path}/shared/run"
        code = cli.main([*words, "--launch.shared_dir=/", folder, "--submit", flag])
        assert code == exit_codes.CONFIG
        assert key in capsys.readouterr().err and not Path("/not-mounted").exists()
    assert cli.main([*words, "--job.dump_folder=One.toml"]) == exit_codes.ERROR
    assert "--dry-run prints the job instead" in capsys.readouterr().err


def test_a_time_limit_is_read_as_slurm_does():
    seconds = {"": None, "1:30": 90, "01:30:00": 5400, "2:00:00": 7200}
    seconds |= {"1-0": 86400, "2-00": 172800, "1-2:30": 95400, "0-0:00:07": 7}
    assert {text: limit_seconds(text) for text in seconds} == seconds


def test_a_dry_run_prints_the_job_and_writes_nothing(tmp_path, capsys):
    flags = [
        "llama3_8b.toml",
        f"--job.dump_folder={tmp_path / 'run'}",
        "--launch.gpus_per_node=8",
        "--launch.nodes=2",
        "--model.tokenizer_path=bundled",
    ]
    assert cli.main(["launch", "slurm", *flags, "--dry-run"]) == exit_codes.DONE
    assert "#SBATCH --nodes=2\n" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert cli.main(["launch", "slurm", *flags, "--no-checkpoint.enable_checkpoint"]) == 0
    assert "begins at step 0" in capsys.readouterr().err


#: Stand-ins for Slurm's programs and for Python. The ranks end with the codes of the file `codes`,
#: one after the other. A node runs nothing if a file has its name, and one GPU is missing if a file
#: `gpu-NAME` is there.
_PROGRAMS = {
    "scontrol": """
if [ "$1" = requeue ]; then echo "$2" >requeued; exit; fi
if [ "$1" = update ]; then echo "$3" >excluded; exit; fi
if [ "$2" = job ]; then echo "ReqNodeList=(null) ExcNodeList=z[1-2]"; exit; fi
if [ "$2" = hostnames ]; then printf '%s\\n' a b c; exit; fi
echo "NodeAddr=10.0.0.1 NodeHostName=host-$3.lab"
""",
    "squeue": 'echo "$JOBS"\n',
    "sleep": """
if [ "$1" = 10 ]; then exec /bin/sleep 20 >/dev/null 2>&1; fi
/bin/sleep 0.1
exit 1
""",
    "timeout": 'shift 2; exec "$@"\n',
    "nvidia-smi": """
echo "GPU 0: H100"
if [ ! -e "gpu-$SLURMD_NODENAME" ]; then echo "GPU 1: H100"; fi
""",
    "srun": """
export SLURM_NODEID=0 SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST
for word; do case $word in --nodelist=*) SLURM_STEP_NODELIST=${word#*=} ;; esac; done
export SLURMD_NODENAME=$SLURM_STEP_NODELIST
if [ -e "$SLURMD_NODENAME" ]; then exit 1; fi
case "$*" in --overlap*--nodes=2*) if [ -e b ]; then exit 1; fi ;; esac
while [ "$1" != bash ] && [ "$1" != true ]; do shift; done
exec "$@"
""",
    "python": """
echo "$SLURM_STEP_NODELIST $* lost: $TITANLITE_LOST_HOSTS" >>started
code=$(head -n 1 codes)
sed -i 1d codes
if [ "$code" -gt 128 ]; then touch b; fi
if [ "$code" -eq 9 ]; then echo '{"hosts": ['"$WRONG"'], "losses": []}' >>"$RUN/guard.jsonl"; fi
exit "$code"
""",
}


def _run(place: Path, codes: list[int], nodes: str = "a,b,c", **variables: str) -> tuple[int, str]:
    """Run the script of a job of two nodes with the stand-ins on node a; a third node is a spare.

    Return its exit code and its output.
    """
    (place / "programs").mkdir()
    for name, body in _PROGRAMS.items():
        program = place / "programs" / name
        program.write_text(f"#!/bin/bash\n{body}")
        program.chmod(0o755)
    (place / "codes").write_text("".join(f"{code}\n" for code in codes))
    folder = place / "run"
    (folder / "launch").mkdir(parents=True, exist_ok=True)
    script = _render(
        "--job.config_file=debug_model.toml",
        *TWO_LAYERS,
        "--training.global_batch_size=32",
        "--launch.nodes=2",
        "--launch.gpus_per_node=2",
        f"--launch.spare_nodes={nodes.count(',') // 2}",
        "--launch.shared_dir=/",
        "--launch.image=image",
        f"--job.dump_folder={folder}",
    )
    own = {
        "PATH": f"{place / 'programs'}:/usr/bin:/bin",
        "SLURMD_NODENAME": "a",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(len(nodes.split(","))),
        "JOBS": "",
    }
    words = ["bash", "-c", script]
    done = subprocess.run(
        words, env=own | variables, cwd=place, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def _starts(place: Path) -> list[str]:
    return [line.split()[0] for line in (place / "started").read_text().splitlines()]


@pytest.mark.parametrize(
    ("nodes", "codes", "missing", "starts", "end", "queued", "said"),
    [
        # A node that does not see all its GPUs gets no ranks.
        ("a,b,c", [0], "gpu-a", ["b,c"], 0, False, ["== node a is lost"]),
        ("a,b,c", [137, 0], "gpu-a", ["b,c"], 137, True, ["== 1 healthy nodes are too few"]),
        # A spare node that is dead replaces none.
        ("a,b,c", [137, 0], "c", ["a,b"], 137, True, ["== node c is lost", "== node b is lost"]),
        ("a,b,c", [137, 0], "", ["a,b", "a,c"], 0, False, ["== node b is lost"]),
        # An error, and a third end at the same step, are final. A stopped job starts later.
        ("a,b,c", [2], "", ["a,b"], 2, False, []),
        ("a,b,c", [7, 7, 7, 0], "", ["a,b"] * 3, 7, False, ["for the third time"]),
        ("a,b,c", [5, 0], "", ["a,b"], 5, True, []),
        # Without a spare node ranks start on the same ones, and a lost node leads to the queue.
        ("a,b", [7, 7, 0], "", ["a,b"] * 3, 0, False, []),
        ("a,b", [137, 0], "", ["a,b"], 137, True, []),
    ],
)
def test_ranks_start_on_healthy_nodes_while_there_are_enough(
    tmp_path, nodes, codes, missing, starts, end, queued, said
):
    """The stand-in loses node b with a code above 128."""
    if missing:
        (tmp_path / missing).touch()
    code, output = _run(tmp_path, codes, nodes)
    assert (code, _starts(tmp_path)) == (end, starts), output
    ids = re.findall("--rdzv_id (.*?) ", (tmp_path / "started").read_text())
    assert ids == [f"7-0-{start}" for start in range(len(starts))]
    assert (tmp_path / "requeued").exists() == queued
    for words in said:
        assert words in output


@pytest.mark.parametrize(
    ("wrong", "nodes", "codes", "starts", "excluded"),
    [
        ('"a", "b"', "a,b", [9, 0], ["a,b"], "ExcNodeList=z[1-2],a,b\n"),
        ("", "a,b", [9, 0], ["a,b"], ""),
        ('"a"', "a,b,c", [9, 0], ["a,b", "b,c"], ""),
        ('"a"', "a,b,c", [9, 2], ["a,b", "b,c"], ""),
        ('"a"', "a,b,c", [9, 5], ["a,b", "b,c"], "ExcNodeList=z[1-2],a\n"),
        ('"a", "b"', "a,b,c", [9, 0], ["a,b"], "ExcNodeList=z[1-2],a,b\n"),
    ],
)
def test_nodes_that_computed_wrong_get_no_ranks_any_more(
    tmp_path, wrong, nodes, codes, starts, excluded
):
    _, said = _run(tmp_path, codes, nodes, WRONG=wrong)
    assert _starts(tmp_path) == starts, said
    file = tmp_path / "excluded"
    assert (file.read_text() if file.exists() else "") == excluded, said
    assert (tmp_path / "requeued").exists() == bool(excluded)


def test_a_third_notice_before_the_first_step_ends_the_job(tmp_path):
    failures = tmp_path / "run" / "launch" / "failures.log"
    failures.parent.mkdir(parents=True)
    failures.write_text("job 7 failed after no step\n" * 2)
    code, said = _run(tmp_path, [5, 0], "a,b", SLURM_RESTART_COUNT="2")
    assert code == 5 and not (tmp_path / "requeued").exists()
    assert "raise launch.time_limit or lower launch.notice_seconds" in said


def test_a_task_of_a_job_array_alone_goes_back_into_the_queue(tmp_path):
    _run(tmp_path, [5], "a,b", JOBS="7 6_1")
    assert (tmp_path / "requeued").read_text() == "6_1\n"


@pytest.mark.parametrize(
    ("nodes", "variables", "said"),
    [
        ("a", {}, "for 2 nodes, and Slurm gave it 1"),
        ("a,b", {"SLURM_NTASKS_PER_NODE": "2"}, "for one task per node, and Slurm gave it 2"),
        ("a,b", {"SLURM_GPUS_ON_NODE": "0"}, "for 2 GPUs per node, and Slurm gave it 0"),
    ],
)
def test_another_allocation_than_the_job_was_written_for_is_refused_at_once(
    tmp_path, nodes, variables, said
):
    code, output = _run(tmp_path, [], nodes, **variables)
    assert code == exit_codes.CONFIG
    assert said in output
    assert not (tmp_path / "started").exists() and not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(("start", "ends"), [("7-0-0", ["137", "0"]), ("6-1-0", ["0"])])
def test_a_lost_rank_of_an_earlier_start_ends_no_later_one(tmp_path, monkeypatch, start, ends):
    """Lines of another start come before that of this one and after it."""
    lines = f"echo '6-1-0 2' >>$file; echo '{start} 3' >>$file; echo '6-1-0 2' >>$file"
    late = f"file=$RUN/launch/lost-rank; {lines}; exec /bin/sleep 2"
    monkeypatch.setitem(_PROGRAMS, "python", late)
    monkeypatch.setitem(_PROGRAMS, "sleep", "/bin/sleep 0.1; [ $1 -ne 15 ]\n")
    code, said = _run(tmp_path, [])
    assert code == 0, said
    assert re.findall("the ranks ended with code (.*?) ", said) == ends, said


if __name__ == "__main__" and "--write" in sys.argv:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for one in _STORED:
        with pytest.MonkeyPatch.context() as patch:
            (FOLDER / f"{one}.sbatch").write_text(_example(one, patch))
