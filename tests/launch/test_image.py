"""The Dockerfile's steps by buildah on a Debian of this machine's mirror with the layout of the AWS
samples' base: the image works, with this machine's torch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import warnings

import pytest

from tests.support.processes import ROOT

#: What only torch.compile needs takes minutes from a slow mirror; pip has to find the rest without
#: the 3 GB of torch.
LEFT_OUT = (" g++ git libnuma1", " python3-dev")
#: Certificates of this machine, which may have a proxy.
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
#: Variables of the nccl-tests image, on which AWS's FSDP image is built.
LAYOUT = {
    "LD_LIBRARY_PATH": (
        "/opt/gdrcopy/lib:/usr/local/cuda/extras/CUPTI/lib64:/opt/amazon/openmpi/lib:"
        "/opt/nccl/build/lib:/opt/amazon/efa/lib:/opt/aws-ofi-nccl/install/lib:/usr/local/lib:"
    ),
    "PATH": "/opt/amazon/openmpi/bin:/opt/amazon/efa/bin:/usr/bin:/usr/local/bin:/usr/sbin:/bin",
    "OPAL_PREFIX": "/opt/amazon/openmpi",
    "NCCL_SOCKET_IFNAME": "^docker,lo,veth",
}
#: It also loads its own NCCL into each process. A stand-in that cannot be loaded shows who tries.
NCCL = "/opt/nccl/build/lib/libnccl.so"
#: Where the container sees this machine's packages, which have a torch for CPUs.
PACKAGES = "/packages"
#: The name of the container means nothing here.
HERE = f"PYTHONPATH={PACKAGES} GLOO_SOCKET_IFNAME=lo"
TRAIN = [
    "--nproc_per_node=2",
    "--local_addr=127.0.0.1",
    "-m",
    "titanlite",
    "train",
    "debug_model.toml",
    "--training.steps=2",
    "--training.seq_len=64",
    "--no-validation.enable",
]
ARGUMENTS = [
    "BASE=localhost/base",
    "EXTRAS=",
    "PIP_OPTIONS=--no-deps",
    "REQUIREMENTS=msgspec>=0.19 jinja2>=3.1.6 markupsafe",
]
#: A public PyTorch image has its own Python, before that of the distribution.
OWN_PYTHON = "apt-get update && apt-get install -y python3-venv && python3 -m venv /opt/conda"


@pytest.mark.soak
@pytest.mark.parametrize("scripts", ["/usr/local/bin", "/opt/conda/bin"])
def test_the_image_is_built_and_trains(scripts, tmp_path):
    if lacks := [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]:
        warnings.warn(
            message := f"no {' and '.join(lacks)} here: apt-get install buildah mmdebstrap",
            stacklevel=1,
        )
        pytest.skip(message)

    def buildah(*words, code=0):
        stores = [
            "--storage-driver=overlay",
            f"--root={tmp_path}/images",
            f"--runroot={tmp_path}/run",
        ]
        done = subprocess.run(
            ["buildah", *stores, *map(str, words)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout.strip()

    base = tmp_path / "base"
    file = tmp_path / "Dockerfile"
    base.mkdir()
    for name in ("amazon/openmpi/bin/mpirun", "amazon/efa/bin/fi_info", NCCL[5:]):
        place = base / "opt" / name
        place.parent.mkdir(parents=True)
        place.write_text("#!/bin/sh\n")
        place.chmod(0o755)
    lines = ["FROM scratch", "ADD base.tar /", "COPY ca.crt /", "COPY opt /opt"]
    has_own = "conda" in scripts
    layout = {**LAYOUT, "PATH": f"{scripts}:{LAYOUT['PATH']}"} if has_own else LAYOUT
    variables = {"PIP_CERT": "/ca.crt", **layout, "LD_PRELOAD": NCCL}
    lines += [f"ENV {name}={value}" for name, value in variables.items()]
    lines += [f"RUN {OWN_PYTHON}"] if has_own else []
    (base / "Dockerfile").write_text("\n".join(lines))
    shutil.copy(CERTIFICATES, base / "ca.crt")
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "bookworm", str(base / "base.tar")]
    assert subprocess.run(command, capture_output=True).returncode == 0
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    for words in LEFT_OUT:
        assert words in text
        text = text.replace(words, "")
    file.write_text(text)
    bud = ["bud", "--isolation=chroot", "--quiet", "--pull-never", "--format=docker"]
    try:
        buildah(*bud, "--tag=localhost/base", base)
        arguments = [f"--build-arg={argument}" for argument in ARGUMENTS]
        buildah(*bud, *arguments, f"--file={file}", "--tag=t", ".")
        container = buildah("from", "--pull-never", "localhost/t")
        start = ["run", "--isolation=chroot", container, "--", "/usr/local/bin/entrypoint.sh"]
        assert buildah(
            *start, "sh", "-c", "id -u; pwd; touch here; command -v titanlite; ls -A /opt/titanlite"
        ).split() == ["1000", "/workspace", f"{scripts}/titanlite"]
        assert "#SBATCH" in buildah(
            *start,
            "titanlite",
            "launch",
            "slurm",
            "llama3_8b.toml",
            "--dry-run",
            "--launch.gpus_per_node=8",
        )
        assert buildah(*start, "sh", "-c", "exit 42", code=42) == ""
        variables = dict(line.partition("=")[::2] for line in buildah(*start, "env").splitlines())
        assert layout.items() <= variables.items()
        assert buildah(*start, "sh", "-c", "command -v mpirun") == "/opt/amazon/openmpi/bin/mpirun"
        if sys.version_info[:2] == (3, 11):  # the base's Python
            start.insert(1, f"--volume={sysconfig.get_path('purelib')}:{PACKAGES}:ro")
            train = " ".join(["python -m titanlite.torchrun", *TRAIN])
            said = buildah(*start, "sh", "-c", f"{HERE} exec {train} 2>&1")
            assert "step:  2  loss:" in said and "cannot be preloaded" not in said
    finally:
        buildah("rm", "--all")
        buildah("rmi", "--all", "--force")
