"""`titanlite doctor`: problems of this machine, with their fixes. It never fails itself.

A check yields status, message and perhaps a fix. What is found is printed at once, so the last line
tells which check a broken driver or file system keeps waiting.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite import exit_codes
from titanlite.assembly.tested_machines import accelerator_warning
from titanlite.cli.argument_parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.dist.interfaces import INTERFACES, interface_problem
from titanlite.resolve.load import check_config
from titanlite.runs.provenance import versions
from titanlite.runs.text_tables import Style
from titanlite.utils import cores, counted, human_bytes, public, sync

if TYPE_CHECKING:
    from titanlite.run.config import RunConfig

OK = "ok"
WARNING = "warning"
ERROR = "error"
#: Longest wait for a program that a check starts.
_COMMAND_SECONDS = 90.0
_GB = 1 << 30

_Found = Iterator[tuple[str, ...]]
Check = Callable[[], _Found]


def add_command(commands: Commands) -> None:
    """Add `titanlite doctor` to argparse."""
    parser = new_command(
        commands,
        _run,
        "doctor",
        "examine this machine: versions, devices, network, folders",
        "Examine this machine and print each finding with its fix. With CONFIG also "
        f"what that config needs, and its folders. {FLAGS}",
        "Exit status: 0, or 1 with an error among the findings, or 2 for a wrong config.",
    )
    add_files(parser)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    argv = [*files_of(arguments), *arguments.flags]
    run = check_config(argv, training=False)[1] if argv else None
    counts: Counter[str] = Counter()
    for name, check in checks(run).items():
        for status, message, *fix in examine(check):
            counts[status] += 1
            print(public(_line(name, status, message, fix, arguments.style)), flush=True)
    code = exit_codes.ERROR if counts[ERROR] else exit_codes.DONE
    return f"{counted(counts[ERROR], 'errors')}, {counted(counts[WARNING], 'warnings')}", code


def _line(name: str, status: str, message: str, fix: list[str], style: Style) -> str:
    paint = style.good if status == OK else style.warn
    lines = [f"{paint(f'{status:8}')}{name:12}{message}"]
    lines += [f"{'':20}{text}" for text in fix if text]
    return "\n".join(lines)


def checks(run: RunConfig | None = None) -> dict[str, Check]:
    """Return all checks by name. run: also the checks of its needs."""
    here = (run.launch.shared_dir if run else "") or os.getcwd()
    found: dict[str, Check] = {
        "versions": _versions,
        "torch": _torch,
        "gpus": _gpus,
        "nccl": _nccl,
        "limits": _limits,
        "network": _network,
        "folder": partial(_folder, here),
    }
    if run:
        found["run folder"] = partial(_folder, run.job.dump_folder)
        found["config"] = partial(_config, run)
    return found


def examine(check: Check) -> _Found:
    """Yield the findings of a check. The command is for odd machines: any error is a finding."""
    try:
        yield from check()
    except Exception as error:
        yield WARNING, f"not examined: {type(error).__name__}: {error}"


def _command(*words: str) -> str | None:
    """Return the output of a program; None: it is not installed or fails."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except OSError:
        return None
    return None if done.returncode else done.stdout


def _versions() -> _Found:
    yield OK, ", ".join(f"{name} {version}" for name, version in versions().items())


def _torch() -> _Found:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield ERROR, f"torch cannot be imported: {error}", "pip install -c constraints.txt torch"
        return
    cuda = torch.version.cuda
    built_for = f"CUDA {cuda}" if cuda else "the CPU"
    if torch.version.hip is not None:
        built_for = f"ROCm {torch.version.hip}"
    yield OK, f"torch {torch.__version__}, built for {built_for}"
    warning = accelerator_warning()
    if warning:
        yield WARNING, warning, "train on NVIDIA GPUs or on CPUs"
    smi = _command("nvidia-smi")
    if not smi:
        return
    if cuda is None:
        message = "this machine has GPUs, but torch is built for the CPU"
        yield ERROR, message, "install torch for CUDA"
        return
    driver = re.search(r"CUDA Version: *(\d+)\.", smi)
    if driver and int(driver[1]) < int(cuda.partition(".")[0]):
        message = f"the driver knows CUDA {driver[1]}, torch needs {cuda}"
        yield ERROR, message, "update the driver, or install torch for an older CUDA"
    elif not torch.cuda.is_available():
        fix = (
            "see nvidia-smi and dmesg; CUDA_VISIBLE_DEVICES may hide them, a container needs "
            "--gpus all"
        )
        yield ERROR, "torch sees none of this machine's GPUs", fix


def _nccl() -> _Found:
    import torch

    if not torch.cuda.is_available():
        yield OK, "not tried: torch sees no GPU"
        return
    count = torch.cuda.device_count()
    ones = [torch.ones(1 << 18, device=f"cuda:{number}") for number in range(count)]
    # An error of NCCL becomes a finding.
    torch.cuda.nccl.all_reduce(ones)
    if all(bool((one == count).all()) for one in ones):
        yield OK, f"a sum over {count} GPU(s) is right"
    else:
        fix = "see dmesg for lines with Xid; leave the machine out"
        yield ERROR, f"a sum over {count} GPU(s) is wrong", fix


def _gpus() -> _Found:
    fields = (
        "index,name,driver_version,memory.total,memory.used,compute_cap,"
        "ecc.errors.uncorrected.volatile.total"
    )
    text = _command("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if text is None:
        if shutil.which("nvidia-smi"):
            yield ERROR, "nvidia-smi fails", "run it by hand, and see dmesg for lines with Xid"
        else:
            yield OK, f"no GPUs (no nvidia-smi); {os.cpu_count()} CPUs"
        return
    for line in text.splitlines():
        yield from _gpu(line)


def _gpu(line: str) -> _Found:
    index, name, driver, total, used, capability, ecc = line.split(", ")
    about = f"{name}, {total} MiB, capability {capability}, driver {driver}"
    yield OK, f"GPU {index}: {about}"
    if ecc.isdigit() and int(ecc):
        message = f"GPU {index}: {ecc} uncorrected memory errors since the driver started"
        fix = "reset the GPU, or replace the machine; dmesg shows Xid 48, 63, 64, 94 or 95"
        yield ERROR, message, fix
    if used.isdigit() and int(used) > 1024:
        message = f"GPU {index}: {used} MiB are in use by others"
        yield WARNING, message, "nvidia-smi lists the processes to end"


def _limits() -> _Found:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = shutil.disk_usage("/dev/shm").total
    yield OK, f"{cores()} CPUs, {files} open files, /dev/shm {human_bytes(shm)}"
    if 0 <= files < 4096:
        yield WARNING, f"only {files} files may be open", "ulimit -n 65536"
    if shm < _GB and shutil.which("nvidia-smi"):
        fix = "docker run --shm-size=16g, or an emptyDir with medium Memory at /dev/shm"
        yield ERROR, f"/dev/shm has {human_bytes(shm)}: NCCL needs more", fix


def _network() -> _Found:
    host = socket.gethostname()
    address = "no address"
    with suppress(OSError):
        address = socket.gethostbyname(host)
    names = ", ".join(name for _, name in socket.if_nameindex())
    yield OK, f"interfaces: {names}; the host name {host} means {address}"
    for variable in INTERFACES:
        if problem := interface_problem(variable):
            yield ERROR if os.environ.get(variable) else WARNING, f"for several machines: {problem}"


def _folder(name: str) -> _Found:
    real = Path(os.path.realpath(name))
    folder = next(one for one in (real, *real.parents) if one.is_dir())
    free = shutil.disk_usage(folder).free
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".titanlite-doctor-") as file:
            began = time.monotonic()
            file.write(bytes(1 << 20))
            sync(file)
            took = time.monotonic() - began
            skew = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError as error:
        message = f"{folder} cannot be written to: {error.strerror}"
        yield ERROR, message, "name another one, or get the right to write"
        return
    speed = f"1 MiB written and synced in {took * 1000:.0f} ms"
    shown = str(folder)
    if not os.path.isdir(name):
        shown += f" (for {name}, which is not there yet)"
    yield OK, f"{shown}: {human_bytes(free)} free, {speed}"
    if free < 10 * _GB:
        message = f"{folder} has only {human_bytes(free)} free"
        yield WARNING, message, "free space: a checkpoint needs it"
    if took > 1:
        message = f"{folder} is slow: {speed}"
        yield WARNING, message, "keep checkpoints on a faster one; save less often"
    if abs(skew) > 2:
        fix = (
            "start chronyd or systemd-timesyncd on all machines; locks of runs compare these times"
        )
        yield WARNING, f"the clock of {folder} differs by {skew:+.0f} s from this machine's", fix


def _config(run: RunConfig) -> _Found:
    from titanlite.assembly.preflight import machine_problems
    from titanlite.data import DataError
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.dist.count_gpus import count_gpus

    ranks = run.launch.gpus_per_node
    gpus = count_gpus()
    if ranks and not run.launch.cpu and ranks > gpus:
        yield WARNING, f"launch.gpus_per_node = {ranks}, and this machine has {gpus} GPUs"
    # It imports torch.
    for one in machine_problems(run):
        yield ERROR, f"{one.key}: {one.message}", one.remedy
    try:
        load_tokenizer(run.model.tokenizer_path, run.model.name)
    except DataError as error:
        yield ERROR, str(error)
