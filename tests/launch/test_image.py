"""The Dockerfile's steps by buildah on a Debian of this machine's mirror: the image works, without
its torch.
"""

from __future__ import annotations

import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from tests.support.processes import ROOT

#: What only torch.compile needs takes minutes from a slow mirror; pip has to find the rest without
#: the 3 GB of torch.
LEFT_OUT = (" g++ git libnuma1", " python3-dev")
#: Certificates of this machine, which may have a proxy.
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
ARGUMENTS = [
    "BASE=localhost/base",
    "EXTRAS=",
    "PIP_OPTIONS=--no-deps",
    "REQUIREMENTS=msgspec>=0.19 jinja2>=3.1.6 markupsafe",
]


@pytest.mark.soak
def test_the_image_is_built_and_trains(tmp_path: Path) -> None:
    if lacks := [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]:
        warnings.warn(
            message := f"no {' and '.join(lacks)} here: apt-get install buildah mmdebstrap",
            stacklevel=1,
        )
        pytest.skip(message)

    def buildah(*words: object, code: int = 0) -> str:
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
    (base / "Dockerfile").write_text(
        "FROM scratch\nADD base.tar /\nCOPY ca.crt /\nENV PIP_CERT=/ca.crt\n"
    )
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
        ).split() == ["1000", "/workspace", "/usr/local/bin/titanlite"]
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
    finally:
        buildah("rm", "--all")
        buildah("rmi", "--all", "--force")
