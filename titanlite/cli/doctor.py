"""`titanlite doctor`: problems of this machine, with their fixes. It never fails itself.

A check yields status, message and perhaps a fix. All run at once, each in its own thread. The
command ends with the last of them, in some seconds. On a busy machine that takes longer, and it
says what it waits for. A broken driver or network file system may never answer. After two minutes
the check's name is the finding.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from titanlite import exit_codes
from titanlite.assembly.supported import accelerator_warning
from titanlite.cli.parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.dist.interfaces import INTERFACES, interface_problem
from titanlite.plan.plan import checkpoint_disk
from titanlite.resolve.load import check_config
from titanlite.runs.provenance import versions
from titanlite.utils import Style, cores, counted, human_bytes, say, sync

if TYPE_CHECKING:
    from titanlite.run.config import RunConfig

OK = "ok"
WARNING = "warning"
ERROR = "error"
#: Version of the JSON; a field may be added without a new one.
SCHEMA = 1
#: Longest wait for all checks, and for a program that one of them starts. Only what hangs takes so
#: long.
_SECONDS = 120.0
_COMMAND_SECONDS = 90.0
#: Seconds until a line names the checks that are awaited.
_TELL_SECONDS = 8.0
_GB = 1 << 30
_NETWORK_TYPES = (
    "nfs",
    "nfs4",
    "lustre",
    "fuse",
    "cifs",
    "smb3",
    "ceph",
    "gpfs",
    "beegfs",
    "9p",
    "virtiofs",
    "efs",
)


class Finding(NamedTuple):
    """A fact of this machine; the names of checks are part of the JSON."""

    check: str
    status: str
    message: str
    fix: str = ""


_Found = Iterator[tuple[str, ...]]
Check = Callable[[], _Found]


def add_command(commands: Commands) -> None:
    """Add `titanlite doctor` to argparse."""
    parser = new_command(
        commands,
        _run,
        "doctor",
        "examine this machine: versions, devices, network, folders, clock",
        "Examine this machine and print each finding with its fix. With CONFIG also "
        f"what that config needs, and its folders. {FLAGS}",
        "Exit status: 0, or 1 with an error among the findings, or 2 for a wrong config.",
    )
    add_files(parser)
    parser.add("--json", "print one JSON object, with `findings`")


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    argv = [*files_of(arguments), *arguments.flags]
    run = check_config(argv, training=False)[1] if argv else None
    findings = examine(checks(run))
    code = exit_codes.ERROR if any(one.status == ERROR for one in findings) else exit_codes.DONE
    if not arguments.json:
        return _report(findings, arguments.style), code
    result = {
        "schema": SCHEMA,
        "host": socket.gethostname(),
        "findings": [one._asdict() for one in findings],
    }
    return json.dumps(result, indent=2), code


def _report(findings: list[Finding], style: Style) -> str:
    paint = {OK: style.good, WARNING: style.warn, ERROR: style.warn}
    lines = []
    for one in findings:
        status = paint[one.status](f"{one.status:8}")
        lines.append(f"{status}{one.check:12}{one.message}")
        if one.fix:
            lines.append(f"{'':20}{one.fix}")
    statuses = [one.status for one in findings]
    errors = counted(statuses.count(ERROR), "errors")
    warnings = counted(statuses.count(WARNING), "warnings")
    return "\n".join([*lines, f"{errors}, {warnings}"])


def checks(run: RunConfig | None = None) -> dict[str, Check]:
    """Return all checks by name. run: also the checks of its needs."""
    found: dict[str, Check] = {
        "versions": _versions,
        "torch": _torch,
        "gpus": _gpus,
        "nccl": _nccl,
        "limits": _limits,
        "network": _network,
        "efa": _efa,
    }
    folders = [(run.launch.shared_dir if run else "") or os.getcwd()]
    if run:
        folders.append(run.job.dump_folder)
    for folder in folders:
        found[f"folder {folder}"] = partial(_folder, folder)
    found["clock"] = _clock
    found["compiler"] = _compiler
    found["variables"] = _variables
    if run:
        found["config"] = partial(_config, run)
    return found


def examine(all_checks: dict[str, Check], seconds: float = _SECONDS) -> list[Finding]:
    """Run checks at once; return their findings in the order of the checks when all are done.

    seconds: what is not done by then becomes a finding itself.
    """
    results: dict[str, list[Finding]] = {name: [] for name in all_checks}

    def work(name: str, check: Check) -> None:
        try:
            for one in check():
                results[name].append(Finding(name.split()[0], *one))
        # The command is for odd machines: any error is a finding.
        except Exception as error:
            message = f"not examined: {type(error).__name__}: {error}"
            results[name].append(Finding(name.split()[0], WARNING, message))

    threads = {}
    for name, check in all_checks.items():
        threads[name] = threading.Thread(target=work, args=(name, check), daemon=True)
        threads[name].start()
    began = time.monotonic()
    for limit in (_TELL_SECONDS, seconds):
        for thread in threads.values():
            thread.join(max(began + min(limit, seconds) - time.monotonic(), 0))
        late = [name for name, thread in threads.items() if thread.is_alive()]
        if late and limit < seconds:
            say(f"waiting for {', '.join(late)} ({seconds:.0f} s at most; Ctrl-C ends)")
    found = []
    for name in all_checks:
        found += results[name]
        if name in late:
            status = ERROR if name.startswith(("gpus", "folder")) else WARNING
            message = f"no answer within {seconds:.0f} s ({name})"
            fix = "a device or file system hangs, or the machine is very busy: try again"
            found.append(Finding(name.split()[0], status, message, fix))
    return found


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
    found = versions()
    for name in metadata.distributions():
        if (title := name.metadata["Name"] or "").startswith("nvidia-nccl"):
            found["nccl"] = f"{name.version} ({title})"
    yield OK, ", ".join(f"{name} {version}" for name, version in found.items())
    torch = [int(number) for number in re.findall(r"\d+", found.get("torch", ""))[:2]]
    if torch and torch < [2, 13]:
        message = (
            "torch before 2.13 may not know TORCH_ELASTIC_SHUTDOWN_TIMEOUT: a save has 30 s after "
            "SIGTERM"
        )
        yield WARNING, message, "torch 2.13 or later gives it more time"


def _torch() -> _Found:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield ERROR, f"torch cannot be imported: {error}", "pip install -c constraints.txt torch"
        return
    cuda = torch.version.cuda
    yield OK, f"torch {torch.__version__}, built for {_built_for()}"
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


def _built_for() -> str:
    import torch

    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"


def _nccl() -> _Found:
    """Sum a vector over all GPUs of this machine."""
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
    """Judge a GPU by a line of nvidia-smi."""
    index, name, driver, total, used, capability, ecc = line.split(", ")
    float8 = "float8 products" if float(capability) >= 8.9 else "no float8 products"
    about = f"{name}, {total} MiB, capability {capability} ({float8}), driver {driver}"
    yield OK, f"GPU {index}: {about}"
    if ecc.isdigit() and int(ecc):
        message = f"GPU {index}: {ecc} uncorrected memory errors since the driver started"
        fix = "reset the GPU, or replace the machine; dmesg shows Xid 48, 63, 64, 94 or 95"
        yield ERROR, message, fix
    if used.isdigit() and int(used) > 1024:
        message = f"GPU {index}: {used} MiB are in use by others"
        yield WARNING, message, "nvidia-smi lists the processes to end"


def _limits() -> _Found:
    efa = bool(_efa_devices())
    cpus = cores()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if locked == resource.RLIM_INFINITY else human_bytes(locked)
    shm = shutil.disk_usage("/dev/shm").total
    memory = f"{shown} of locked memory, /dev/shm {human_bytes(shm)}"
    yield OK, f"{cpus} CPUs, {files} open files, {memory}"
    if 0 <= files < 4096:
        yield WARNING, f"only {files} files may be open", "ulimit -n 65536"
    if efa and locked != resource.RLIM_INFINITY:
        fix = (
            "ulimit -l unlimited; in a container --ulimit memlock=-1, in Slurm "
            "PropagateResourceLimitsExcept=MEMLOCK"
        )
        yield ERROR, f"EFA locks memory, and only {shown} may be locked", fix
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


def _efa_devices() -> list[str]:
    names = []
    for path in Path("/sys/class/infiniband").glob("*"):
        driver = (path / "device" / "driver").resolve()
        if driver.name == "efa":
            names.append(path.name)
    return sorted(names)


def _efa() -> _Found:
    devices = _efa_devices()
    if not devices:
        return
    yield OK, f"{len(devices)} EFA devices: {', '.join(devices)}"
    libraries = _command("ldconfig", "-p") or ""
    searched = os.environ.get("LD_LIBRARY_PATH", "")
    if "libnccl-net" not in libraries and "ofi" not in searched:
        fix = (
            "install aws-ofi-nccl (the EFA installer has it) and put its lib folder on "
            "LD_LIBRARY_PATH"
        )
        yield WARNING, "NCCL's plugin for EFA is not found: traffic would go over TCP", fix


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder that exists."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        point, kind = line.split()[1:3]
        point = point.replace("\\040", " ")
        if folder.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def _existing(name: str) -> Path:
    """Return a folder, or the first above it that is there."""
    folder = Path(os.path.realpath(name))
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def _folder(name: str) -> _Found:
    folder = _existing(name)
    kind = file_system(folder)
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
    place = "seen by this machine alone, unless it is a shared disk"
    if kind.startswith(_NETWORK_TYPES):
        place = "a network file system"
    shown = str(folder)
    if not os.path.isdir(name):
        shown += f" (for {name}, which is not there yet)"
    yield OK, f"{shown}: {kind} ({place}), {human_bytes(free)} free, {speed}"
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


def _clock() -> _Found:
    text = _command("timedatectl", "show", "--property=NTPSynchronized") or ""
    if "=no" in text:
        yield WARNING, "the clock is not synchronized", "timedatectl set-ntp true, or start chronyd"
    else:
        state = "synchronized" if "=yes" in text else "whether it is synchronized is not known here"
        yield OK, f"{time.strftime('%F %T %Z')}, {state}"


def _compiler() -> _Found:
    from titanlite.dist import ParallelismError
    from titanlite.parallel.compile import check_backend

    try:
        check_backend("inductor")
        yield OK, "torch.compile has what inductor needs"
    except ParallelismError as error:
        yield WARNING, str(error), "without it: training.compile = false"


def _variables() -> _Found:
    """Never print a value: it may be a secret."""
    has_login = "HF_TOKEN" in os.environ or Path("~/.cache/huggingface/token").expanduser().exists()
    said = "no token for Hugging Face: private and gated files are closed"
    if has_login:
        said = "a token for Hugging Face"
    names = [name.lower() for name in os.environ]
    kinds = ("http_proxy", "https_proxy", "all_proxy")
    proxies = [name for name in os.environ if name.lower() in kinds]
    if proxies:
        said += f"; proxy by {', '.join(proxies)}"
    yield OK, said
    if proxies and "no_proxy" not in names:
        fix = "set NO_PROXY to localhost and your hosts, and to 169.254.169.254 on AWS"
        yield WARNING, f"{proxies[0]} holds for all hosts", fix
    if os.environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield WARNING, "NCCL_DEBUG writes much, and slows a run", "unset it, or NCCL_DEBUG=WARN"


def _config(run: RunConfig) -> _Found:
    """Check whether this machine fits a config."""
    from titanlite.assembly.preflight import machine_problems
    from titanlite.data import DataError
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.dist.process import count_gpus

    ranks = run.launch.gpus_per_node
    gpus = count_gpus()
    if ranks and not run.launch.cpu and ranks > gpus:
        yield WARNING, f"launch.gpus_per_node = {ranks}, and this machine has {gpus} GPUs"
    saves_here = run.checkpoint.enable_checkpoint and "://" not in run.checkpoint.folder
    # Without a size of the vocabulary the model has no size.
    if saves_here and run.model_args().vocab_size is not None:
        yield from _checkpoint_space(run)
    if run.features.local_saves is not None:
        yield from _local_folder(run.checkpoint.local_folder or "")
    # It imports torch.
    for one in machine_problems(run):
        yield ERROR, f"{one.key}: {one.message}", one.remedy
    try:
        load_tokenizer(run.model.tokenizer_path, run.model.name)
    except DataError as error:
        yield ERROR, str(error)


def _local_folder(name: str) -> _Found:
    from titanlite.features.local_saves.checks import KEY, PLACE

    name = name.replace(PLACE, "0")
    yield from _folder(name)
    if file_system(_existing(name)).startswith(_NETWORK_TYPES):
        message = f"{KEY} = {name} is on a network file system, which all nodes wait for"
        yield WARNING, message, "name a disk of this machine, or /dev/shm"


def _checkpoint_space(run: RunConfig) -> _Found:
    size = checkpoint_disk(run, 1.0).checkpoint
    folder = _existing(os.path.join(run.job.dump_folder, run.checkpoint.folder))
    free = shutil.disk_usage(folder).free
    message = f"a checkpoint takes about {human_bytes(size)}; {human_bytes(free)} are free"
    if free > 3 * size:
        yield OK, message
    else:
        yield WARNING, message, "free space, or set checkpoint.keep_latest_k"
