"""docs/from-aws-fsdp.md: machines, jobs, arguments and log of the AWS FSDP samples."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.test_kubernetes import fits
from tests.support.processes import ROOT, python
from titanlite import exit_codes
from titanlite.cli import main as cli
from titanlite.config.load import load_file
from titanlite.plan.hardware import cluster_of, find_instance, ranks_of
from titanlite.plan.parts import GIB
from titanlite.plan.plan import make_plan
from titanlite.resolve.load import check_config

PAGE = (ROOT / "docs" / "from-aws-fsdp.md").read_text()
FOLDER = ROOT / "train_configs" / "platforms"
#: The page's TOML files: the job on EKS, and the array of the text.
FILES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
#: The text's minimum platforms: model, number of machines, type.
PLATFORMS = {
    "llama3_1_8b_g6e": ("Llama 3.1 8B", 1, "g6e.12xlarge"),
    "llama3_2_1b_g5": ("Llama 3.2 1B", 2, "g5.8xlarge"),
    "llama3_2_3b_g5": ("Llama 3.2 3B", 1, "g5.12xlarge"),
    "llama3_2_3b_g6e": ("Llama 3.2 3B", 1, "g6e.12xlarge"),
    "llama2_13b_g6e": ("Llama 2 13B", 2, "g6e.12xlarge"),
    "llama2_70b_p5en": ("Llama 2 70B", 2, "p5en.48xlarge"),
    "llama2_70b_p5": ("Llama 2 70B", 4, "p5.48xlarge"),
    "llama3_1_70b_p5en": ("Llama 3.1 70B", 4, "p5en.48xlarge"),
    "llama3_1_70b_p5": ("Llama 3.1 70B", 4, "p5.48xlarge"),
}
#: Its table of sizes: intermediate_size, num_key_value_heads, hidden_width, num_layers, num_heads.
#: The 11,008 of Llama 3.2 3B is a slip (see the page).
SHAPES = {
    "Llama 2 7B": (11008, 32, 4096, 32, 32),
    "Llama 2 13B": (13824, 40, 5120, 40, 40),
    "Llama 2 70B": (28672, 8, 8192, 80, 64),
    "Llama 3.1 8B": (14336, 8, 4096, 32, 32),
    "Llama 3.1 70B": (28672, 8, 8192, 80, 64),
    "Llama 3.2 1B": (8192, 8, 2048, 16, 32),
    "Llama 3.2 3B": (8192, 8, 3072, 28, 24),
}


def shape(name: str, config: str) -> None:
    args = check_config([f"--job.config_file={config}"], 1, training=False)[1].model_args()
    kv_heads = args.n_kv_heads or args.n_heads
    found = (args.ffn_width, kv_heads, args.dim, args.n_layers, args.n_heads)
    assert found == SHAPES[name]


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_model_fits_the_smallest_platform_of_the_text(name):
    model, nodes, instance = PLATFORMS[name]
    file = FOLDER / f"{name}.toml"
    launch = load_file(file).sections.launch
    assert (launch.nodes, launch.instance_type) == (nodes, instance)
    run = check_config([f"--job.config_file={file}"], ranks_of(launch), training=False)[1]
    plan = make_plan(run, cluster_of(run))
    assert plan.fits
    assert (run.batch.seq_len, run.batch.global_batch_size) == (4096, ranks_of(launch))
    shape(model, str(file))
    size = f"{plan.needed / GIB:.1f} of {plan.cluster.gpu.memory / GIB:.1f}"
    assert f"| {model} | {nodes} × {instance} | `platforms/{name}.toml` | {size} |" in PAGE
    stated = size.replace(" of", " GiB of")
    assert f"# Fits {nodes} x {instance}: {stated} per GPU" in file.read_text()


def test_every_platform_has_a_file_and_7b_is_that_of_the_text():
    assert {file.stem for file in FOLDER.glob("*.toml")} == {*PLATFORMS, "aws_fsdp"}
    shape("Llama 2 7B", "llama2_7b.toml")


@pytest.mark.parametrize(
    ("words", "nodes", "gpus"),
    [
        ("platforms/llama3_1_8b_g6e.toml", 1, 4),
        (
            "platforms/llama3_1_8b_g6e.toml --launch.instance_type '' --launch.gpus_per_node 8 "
            "--training.mixed_precision_param float32",
            1,
            8,
        ),
        (
            "mixtral_8x7b.toml platforms/aws_fsdp.toml --launch.nodes 4 "
            "--launch.instance_type p5.48xlarge",
            4,
            8,
        ),
    ],
)
def test_a_job_of_the_page_has_the_nodes_and_gpus(words, nodes, gpus, capsys):
    assert cli.main(["launch", "slurm", *shlex.split(words), "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert f"#SBATCH --nodes={nodes}\n" in script
    assert f"#SBATCH --gpus-per-node={gpus}\n" in script
    assert ("export FI_PROVIDER=efa" in script) == (nodes > 1)


MODEL = "mixtral_8x7b.toml"


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [MODEL, "platforms/llama3_2_1b_g5.toml", "platforms/llama3_2_3b_g6e.toml"]
)
def test_the_job_of_each_model_on_eks_is_as_the_operator_has_it(
    config, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("kubeflow.training")
    monkeypatch.setenv("REGISTRY", "1.dkr.ecr.us-west-1.amazonaws.com/")
    file = tmp_path / "job.toml"
    text = FILES[0].replace("llama3_1_8b.toml", config)
    nodes, instance = 4, "p5.48xlarge"
    if config != MODEL:
        _, nodes, instance = PLATFORMS[Path(config).stem]
        text = re.sub(r"^(nodes|instance_type) = .*\n", "", text, flags=re.MULTILINE)
    file.write_text(text)
    assert cli.main(["launch", "kubernetes", str(file), "--dry-run"]) == 0
    manifest = capsys.readouterr().out
    _, job = yaml.safe_load_all(manifest)
    assert fits(manifest)
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    machine = find_instance(instance)
    limits = {"nvidia.com/gpu": str(machine.gpus)}
    if nodes > 1:
        limits["vpc.amazonaws.com/efa"] = str(machine.efa)
    assert (worker["replicas"], container["resources"]["limits"]) == (nodes, limits)
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": instance}
    assert container["image"] == "1.dkr.ecr.us-west-1.amazonaws.com/fsdp:titanlite"
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes[mounts["/local"]]["hostPath"] == {"path": "/mnt/k8s-disks/0"}
    assert volumes[mounts["/fsx"]]["persistentVolumeClaim"] == {"claimName": "fsx-claim"}


def test_the_folder_of_a_run_is_not_on_a_path_of_the_nodes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REGISTRY", "r/")
    file = tmp_path / "job.toml"
    file.write_text(FILES[0].replace("/fsx/runs", "/local/runs"))
    assert cli.main(["launch", "kubernetes", str(file), "--dry-run"]) == exit_codes.CONFIG
    assert "'/local/runs/8b' is not on a volume of the pods (/fsx)" in capsys.readouterr().err


#: The array TRAINING_ARGS as the text prints it, but for the sizes of the model, which are the
#: flavor's, and `--max_context_width`, which its loader passes over.
ARGUMENTS = {
    "tokenizer": ("model.tokenizer_path", "assets/llama"),
    "checkpoint_freq": ("checkpoint.interval", 5000),
    "validation_freq": ("validation.freq", 500),
    "max_steps": ("training.steps", 5000),
    "dataset": ("training.dataset", "c4"),
    "train_batch_size": ("training.batch_size", 1),
    "val_batch_size": ("validation.batch_size", 1),
    "offload_activations": ("activation_checkpoint.offload", True),
    "lr": ("optimizer.lr", 1e-4),
}


def test_the_array_of_the_text_is_the_file_of_the_page(tmp_path):
    file = tmp_path / "8b.toml"
    file.write_text(FILES[1])
    config, run = check_config([f"--job.config_file={file}"], 16, training=False)
    for key, value in ARGUMENTS.values():
        assert config.value(key) == value, key
    # "Created model with total parameters" of the text.
    assert run.spec.count_parameters(run.model_args()) == 7_392_727_040
    shape("Llama 3.1 8B", str(file))


def arguments() -> list[tuple[str, str]]:
    """Each argument of the page's table, with the keys of its row."""
    section = PAGE.partition("## Arguments\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    return [(name, keys) for left, keys in rows for name in re.findall(r"`(\w+)", left)]


def test_each_argument_of_the_samples_is_refused_with_its_key(capsys):
    found = arguments()
    assert len(found) > 30
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", *(f"--{name}=1" for name, _ in found)])
    said = re.findall(r"unknown option --(\w+): .*?, as --(\S+)", capsys.readouterr().err)
    assert [name for name, _ in said] == [name for name, _ in found]
    for (name, key), (_, row) in zip(said, found, strict=True):
        assert key.rpartition(".")[2] in re.findall(r"[\w.]+", row.replace(".", " ")), (name, key)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    flags: dict[str, Any] = {
        "job.dump_folder": folder / "run",
        "training.seq_len": 64,
        "training.steps": 2,
        "training.compile": "false",
        "training.dataset": "c4_test",
        "validation.dataset": "c4_test",
        "validation.freq": 2,
        "validation.steps": 1,
        "checkpoint.enable_checkpoint": "false",
        "metrics.enable_tensorboard": "false",
    }
    words = ["debug_model.toml", "platforms/aws_fsdp.toml"]
    given = [f"--{key}={value}" for key, value in flags.items()]
    done = python("-m", "titanlite", "train", *words, *given, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_log_has_the_lines_of_the_samples(log):
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d I "
    lines = re.findall(rf"{stamp}(\[train\.py:\d+\] .*)", log)
    number = r"\d+\.\d+"
    figures = rf"Loss: \d\.\d{{5}}, Speed: {number} samples/sec, lr: 0\.\d{{6}}"
    step = rf"\[train\.py:103\] Batch \d {figures}"
    wanted = [
        r"\[train\.py:156\] Creating Model",
        r"\[train\.py:172\] Created model with total parameters: (\d+) \(0\.01 B\)",
        step,
        step,
        rf"\[train\.py:116\] Batch 2 Validation loss: {number}",
    ]
    assert len(lines) == len(wanted), log
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.fullmatch(pattern, line), line
    # The start report counts the tensors.
    count = re.search(wanted[1], lines[1])
    assert count and f"{int(count[1]):,} parameters" in log


def test_the_cluster_of_parallelcluster_has_the_queues_types_and_folders_of_its_page():
    cluster = yaml.safe_load((ROOT / "deploy" / "examples" / "slurm" / "cluster.yaml").read_text())
    page = (ROOT / "docs" / "launch" / "parallelcluster.md").read_text()
    types = {}
    for queue in cluster["Scheduling"]["SlurmQueues"]:
        (resource,) = queue["ComputeResources"]
        types[queue["Name"]] = resource["InstanceType"]
        assert resource["Efa"]["Enabled"]
        assert find_instance(resource["InstanceType"]).efa
        assert queue["ComputeSettings"]["LocalStorage"]["EphemeralVolume"]["MountDir"] == "/local"
    assert types == {"p5": "p5.48xlarge", "p4d": "p4d.24xlarge"}
    assert [one["MountDir"] for one in cluster["SharedStorage"]] == ["/fsx"]
    assert f"--launch.queue p5 --launch.nodes 4 --launch.instance_type {types['p5']}" in page
