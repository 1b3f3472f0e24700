"""`titanlite doctor`: problems of this machine, with their fixes. It never fails itself.

A check yields status, message and perhaps a fix. All run at once, each in its own thread. The
command ends with the last of them, in some seconds; on a busy machine that takes longer, and it
says what it waits for. A broken driver or network file system may never answer: after two minutes
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
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from titanlite import exit_codes
from titanlite.plan.plan import checkpoint_disk
from titanlite.runs.provenance import versions
from titanlite.start.fit import check_config
from titanlite.tools.cli import FLAGS, Commands, add_files, files_of
from titanlite.utils import Style, counted, human_bytes

if TYPE_CHECKING:
    from titanlite.start.derive import RunConfig

OK, WARNING, ERROR = "ok", "warning", "error"
#: Version of the JSON; a field may be added without a new one.
SCHEMA = 1
#: Longest wait for all checks, and for a program that one of them starts. Only what hangs takes so
#: long.
_SECONDS = 120.0
_COMMAND_SECONDS = 90.0
#: Seconds between two lines about the checks that are awaited.
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
    parser = commands.add_parser(
        "doctor",
        help="examine this machine: versions, devices, network, folders, clock",
        description="Examine this machine and print each finding with its fix. With CONFIG also "
        f"what that config needs, and its folders. {FLAGS}",
        epilog="Exit status: 0, or 1 with an error among the findings, or 2 for a wrong config.",
        allow_abbrev=False,
    )
    add_files(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, with `findings`"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, flags: list[str], style: Style) -> tuple[str, int]:
    argv = [*files_of(arguments), *flags]
    run = check_config(argv, training=False)[1] if argv else None
    findings = examine(checks(run))
    code = exit_codes.ERROR if any(one.status == ERROR for one in findings) else exit_codes.DONE
    if arguments.json:
        found = [one._asdict() for one in findings]
        return json.dumps(
            {"schema": SCHEMA, "host": socket.gethostname(), "findings": found}, indent=2
        ), code
    paint = {OK: style.good, WARNING: style.warn, ERROR: style.warn}
    lines = []
    for one in findings:
        lines.append(f"{paint[one.status](f'{one.status:8}')}{one.check:12}{one.message}")
        lines += [f"{'':20}{one.fix}"] if one.fix else []
    counts = [
        counted(sum(one.status == status for one in findings), f"{status}s")
        for status in (ERROR, WARNING)
    ]
    return "\n".join([*lines, ", ".join(counts)]), code


def checks(run: RunConfig | None = None) -> dict[str, Check]:
    """Return all checks by name. run: also the checks of its needs."""
    shared = (run.launch.shared_dir if run else "") or os.getcwd()
    folders = dict.fromkeys([shared, *([run.job.dump_folder] if run else [])])
    found: dict[str, Check] = {
        "versions": _versions,
        "torch": _torch,
        "gpus": _gpus,
        "nccl": _nccl,
        "limits": _limits,
        "network": _network,
        "efa": _efa,
        **{f"folder {folder}": partial(_folder, folder) for folder in folders},
        "clock": _clock,
        "compiler": _compiler,
        "variables": _variables,
    }
    return found | ({"config": partial(_config, run)} if run else {})


def examine(all_checks: dict[str, Check], seconds: float = _SECONDS) -> list[Finding]:
    """Run checks at once; return their findings in the order of the checks when all are done.

    seconds: what is not done by then becomes a finding itself.
    """
    results: dict[str, list[Finding]] = {name: [] for name in all_checks}

    def work(name: str, check: Check) -> None:
        try:
            for one in check():
                results[name].append(Finding(name.split()[0], *one))
        except Exception as error:  # the command is for odd machines
            results[name].append(
                Finding(name.split()[0], WARNING, f"not examined: {type(error).__name__}: {error}")
            )

    threads = {}
    for name, check in all_checks.items():
        threads[name] = threading.Thread(target=work, args=(name, check), daemon=True)
        threads[name].start()
    late = _wait(threads, seconds)
    found = []
    for name in all_checks:
        found += results[name]
        if name in late:
            status = ERROR if name.startswith(("gpus", "folder")) else WARNING
            fix = "a device or file system hangs, or the machine is very busy: try again"
            found.append(
                Finding(name.split()[0], status, f"no answer within {seconds:.0f} s ({name})", fix)
            )
    return found


def _wait(threads: dict[str, threading.Thread], seconds: float) -> list[str]:
    """Wait until all threads have ended, `seconds` at most; return the names of the others.

    Say what is awaited.
    """
    began = time.monotonic()
    tell = began + _TELL_SECONDS
    while late := [name for name, thread in threads.items() if thread.is_alive()]:
        now = time.monotonic()
        if now >= began + seconds:
            break
        if now >= tell:
            tell = now + _TELL_SECONDS
            left = f"{began + seconds - now:.0f} s at most; Ctrl-C ends"
            print(f"waiting for {', '.join(late)} ({left})", file=sys.stderr, flush=True)
        threads[late[0]].join(min(tell, began + seconds) - now)
    return late


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


def _installed(name: str) -> tuple[int, ...]:
    """Return the version of a package, or nothing."""
    try:
        return tuple(map(int, re.findall(r"\d+", metadata.version(name))[:2]))
    except metadata.PackageNotFoundError:
        return ()


def _versions() -> _Found:
    found = versions()
    for name in metadata.distributions():
        if (title := name.metadata["Name"] or "").startswith("nvidia-nccl"):
            found["nccl"] = f"{name.version} ({title})"
    yield OK, ", ".join(f"{name} {version}" for name, version in found.items())
    torch = _installed("torch")
    if (
        torch >= (2, 12)
        and _installed("hyperpod-elastic-agent")
        and _installed("hyperpod-elastic-agent") < (1, 2)
    ):
        fix = "take a newer agent, or start with `titanlite run`"
        yield (
            ERROR,
            "hyperpodrun of hyperpod-elastic-agent 1.1 fails with torch 2.12 and later",
            fix,
        )
    if (2, 0) < torch < (2, 13):
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
    yield OK, f"torch {torch.__version__}, built for {f'CUDA {cuda}' if cuda else 'the CPU'}"
    if not (smi := _command("nvidia-smi")):
        return
    if cuda is None:
        yield (
            ERROR,
            "this machine has GPUs, but torch is built for the CPU",
            "install torch for CUDA",
        )
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
    """Sum a vector over all GPUs of this machine."""
    import torch

    if not torch.cuda.is_available():
        yield OK, "not tried: torch sees no GPU"
        return
    count = torch.cuda.device_count()
    ones = [torch.ones(1 << 18, device=f"cuda:{number}") for number in range(count)]
    torch.cuda.nccl.all_reduce(ones)  # an error of NCCL becomes a finding
    if all(bool((one == count).all()) for one in ones):
        yield OK, f"a sum over {count} GPU(s) is right"
    else:
        yield (
            ERROR,
            f"a sum over {count} GPU(s) is wrong",
            "see dmesg for lines with Xid; leave the machine out",
        )


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
        index, name, driver, total, used, capability, ecc = (
            word.strip() for word in line.split(",")
        )
        float8 = "float8 products" if float(capability) >= 8.9 else "no float8 products"
        yield (
            OK,
            (
                f"GPU {index}: {name}, {total} MiB, capability {capability} ({float8}), driver "
                f"{driver}"
            ),
        )
        if ecc.isdigit() and int(ecc):
            fix = "reset the GPU, or replace the machine; dmesg shows Xid 48, 63, 64, 94 or 95"
            yield (
                ERROR,
                f"GPU {index}: {ecc} uncorrected memory errors since the driver started",
                fix,
            )
        if used.isdigit() and int(used) > 1024:
            yield (
                WARNING,
                f"GPU {index}: {used} MiB are in use by others",
                "nvidia-smi lists the processes to end",
            )


def _limits() -> _Found:
    efa = bool(_efa_devices())
    cpus, files = len(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if locked == resource.RLIM_INFINITY else human_bytes(locked)
    shm = shutil.disk_usage("/dev/shm").total
    yield (
        OK,
        f"{cpus} CPUs, {files} open files, {shown} of locked memory, /dev/shm {human_bytes(shm)}",
    )
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


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one."""
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    one.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0")
                )  # SIOCGIFADDR
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _network() -> _Found:
    found, host = interfaces(), socket.gethostname()
    names = ", ".join(f"{name} {address}" for name, address in found.items())
    yield OK, f"interfaces: {names}"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        wanted = [
            name for name in value.lstrip("=").split(",") if name and not value.startswith("^")
        ]
        if lost := [name for name in wanted if not any(one.startswith(name) for one in found)]:
            fix = (
                f"set it to one of {', '.join(name for name in found if name != 'lo')}, or unset it"
            )
            yield ERROR, f"{variable}={value}: no interface {' or '.join(lost)} has an address", fix
    others = [name for name, address in found.items() if not address.startswith("127.")]
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = ""
    taken = next((name for name, own in found.items() if own == address), None)
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    if taken and not address.startswith("127."):
        yield OK, f"gloo takes {taken}: the host name {host} means {address}"
    elif others:
        said = f"means {address}" if address else "does not resolve"
        fix = (
            f"for several machines set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME={others[0]}, in "
            "[launch] environment"
        )
        yield WARNING, f"gloo takes a local interface: the host name {host} {said}", fix


def _efa_devices() -> list[str]:
    return sorted(
        path.name
        for path in Path("/sys/class/infiniband").glob("*")
        if (path / "device" / "driver").resolve().name == "efa"
    )


def _efa() -> _Found:
    devices = _efa_devices()
    if not devices:
        return
    yield OK, f"{len(devices)} EFA devices: {', '.join(devices)}"
    if "libnccl-net" not in (_command("ldconfig", "-p") or "") and "ofi" not in os.environ.get(
        "LD_LIBRARY_PATH", ""
    ):
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
    kind, free = file_system(folder), shutil.disk_usage(folder).free
    is_network = kind.startswith(_NETWORK_TYPES)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".titanlite-doctor-") as file:
            began = time.monotonic()
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            took, skew = time.monotonic() - began, os.fstat(file.fileno()).st_mtime - time.time()
    except OSError as error:
        yield (
            ERROR,
            f"{folder} cannot be written to: {error.strerror}",
            "name another one, or get the right to write",
        )
        return
    speed = f"1 MiB written and synced in {took * 1000:.0f} ms"
    place = (
        "a network file system"
        if is_network
        else "seen by this machine alone, unless it is a shared disk"
    )
    shown = str(folder) if os.path.isdir(name) else f"{folder} (for {name}, which is not there yet)"
    yield OK, f"{shown}: {kind} ({place}), {human_bytes(free)} free, {speed}"
    if free < 10 * _GB:
        yield (
            WARNING,
            f"{folder} has only {human_bytes(free)} free",
            "free space: a checkpoint needs it",
        )
    if took > 1:
        yield (
            WARNING,
            f"{folder} is slow: {speed}",
            "keep checkpoints on a faster one; save less often",
        )
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
    from titanlite.parallel import ParallelismError
    from titanlite.parallel.compile import check_backend

    try:
        check_backend("inductor")
        yield OK, "torch.compile has what inductor needs"
    except ParallelismError as error:
        yield WARNING, str(error), "without it: training.compile = false"


def _variables() -> _Found:
    """Never print a value: it may be a secret."""
    has_login = "HF_TOKEN" in os.environ or Path("~/.cache/huggingface/token").expanduser().exists()
    proxies = [
        name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")
    ]
    said = (
        "a token for Hugging Face"
        if has_login
        else "no token for Hugging Face: private and gated files are closed"
    )
    yield OK, said + (f"; proxy by {', '.join(proxies)}" if proxies else "")
    if proxies and not any(name.lower() == "no_proxy" for name in os.environ):
        fix = "set NO_PROXY to localhost and your hosts, and to 169.254.169.254 on AWS"
        yield WARNING, f"{proxies[0]} holds for all hosts", fix
    if os.environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield WARNING, "NCCL_DEBUG writes much, and slows a run", "unset it, or NCCL_DEBUG=WARN"


def _config(run: RunConfig) -> _Found:
    """Check whether this machine fits a config."""
    from titanlite.data import DataError
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.start.preflight import machine_problems
    from titanlite.tools.commands.run import count_gpus

    ranks = run.launch.gpus_per_node
    gpus = count_gpus()
    if ranks and not run.launch.cpu and ranks > gpus:
        yield WARNING, f"launch.gpus_per_node = {ranks}, and this machine has {gpus} GPUs"
    args = run.model_args()
    if (
        args.vocab_size is not None
        and run.checkpoint.enable_checkpoint
        and "://" not in run.checkpoint.folder
    ):
        size = checkpoint_disk(run, 1.0).checkpoint
        free = shutil.disk_usage(
            _existing(os.path.join(run.job.dump_folder, run.checkpoint.folder))
        ).free
        status, fix = (
            (OK, "")
            if free > 3 * size
            else (WARNING, "free space, or set checkpoint.keep_latest_k")
        )
        yield (
            status,
            f"a checkpoint takes about {human_bytes(size)}; {human_bytes(free)} are free",
            fix,
        )
    # It imports torch.
    for one in machine_problems(run):
        yield ERROR, f"{one.key}: {one.message}", one.hint
    try:
        load_tokenizer(run.model.tokenizer_path, run.model.name)
    except DataError as error:
        yield ERROR, str(error)
