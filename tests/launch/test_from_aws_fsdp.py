"""docs/from-aws-fsdp.md: machines, jobs, arguments and log of the AWS FSDP samples."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import venv
from pathlib import Path

import pytest
import yaml

from tests.launch.test_kubernetes import fits
from tests.support.processes import ROOT, titanlite
from titanlite import exit_codes
from titanlite.cli import main as cli
from titanlite.config.load import load_file
from titanlite.config.loaded import LoadedConfig
from titanlite.plan.hardware import cluster_of, find_instance, ranks_of
from titanlite.plan.parts import GIB
from titanlite.plan.plan import make_plan
from titanlite.resolve.load import check_config
from titanlite.run.config import RunConfig

PAGE = (ROOT / "docs" / "from-aws-fsdp.md").read_text()
CLUSTER = (ROOT / "deploy" / "examples" / "slurm" / "cluster.yaml").read_text()
FOLDER = ROOT / "train_configs" / "platforms"
#: The page's TOML file, the job on EKS.
(FILE,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
SCRIPT = runpy.run_path(str(ROOT / "examples" / "from_aws_fsdp.py"))
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


def shape(run: RunConfig) -> tuple[int, ...]:
    args = run.model_args()
    kv_heads = args.n_kv_heads or args.n_heads
    return args.ffn_width, kv_heads, args.dim, args.n_layers, args.n_heads


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
    assert shape(run) == SHAPES[model]
    size = f"{plan.needed / GIB:.1f} of {plan.cluster.gpu.memory / GIB:.1f}"
    assert f"| {model} | {nodes} × {instance} | `platforms/{name}.toml` | {size} |" in PAGE
    stated = size.replace(" of", " GiB of")
    assert f"# Fits {nodes} x {instance}: {stated} per GPU" in file.read_text()


def test_every_platform_has_a_file_and_7b_is_that_of_the_text():
    assert {file.stem for file in FOLDER.glob("*.toml")} == {*PLATFORMS, "aws_fsdp"}
    _, run = check_config(["--job.config_file=llama2_7b.toml"], 1, training=False)
    assert shape(run) == SHAPES["Llama 2 7B"]


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
    text = FILE.replace("llama3_1_8b.toml", config)
    nodes, instance = 4, "p5.48xlarge"
    if config != MODEL:
        _, nodes, instance = PLATFORMS[Path(config).stem]
        text = re.sub(r"^(nodes|instance_type) = .*\n", "", text, flags=re.MULTILINE)
    file.write_text(text)
    assert cli.main(["launch", "kubernetes", str(file), "--dry-run"]) == 0
    manifest = capsys.readouterr().out
    assert fits(manifest)
    _, job = yaml.safe_load_all(manifest)
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
    file.write_text(FILE.replace("/fsx/runs", "/local/runs"))
    assert cli.main(["launch", "kubernetes", str(file), "--dry-run"]) == exit_codes.CONFIG
    assert "'/local/runs/8b' is not on a volume of the pods (/fsx)" in capsys.readouterr().err


#: The array as the text prints it.
ARRAY = """+ declare -a TORCHRUN_ARGS
+ TRAINING_ARGS=('--max_context_width=128256' '--num_key_value_heads=8' \
'--intermediate_size=14336' '--hidden_width=4096' '--num_layers=32' '--num_heads=32' \
'--model_type=llama_v3' '--tokenizer=hf-internal-testing/llama-tokenizer' \
'--checkpoint_freq=5000' '--validation_freq=500' '--max_steps=5000' \
'--checkpoint_dir=./checkpoints' '--dataset=allenai/c4' '--dataset_config_name=en' \
'--resume_from_checkpoint=./checkpoints' '--train_batch_size=1' '--val_batch_size=1' \
'--sharding_strategy=full' '--offload_activations=1')
+
"""
#: What it says, and the defaults of train.py.
VALUES = {
    "model.tokenizer_path": "assets/llama-tokenizer",
    "training.seq_len": 4096,
    "training.steps": 5000,
    "training.dataset": "c4",
    "training.batch_size": 1,
    "training.seed": 12345,
    "training.mixed_precision_param": "bfloat16",
    "activation_checkpoint.mode": "full",
    "activation_checkpoint.offload": True,
    "optimizer.lr": 1e-4,
    "optimizer.weight_decay": 0.2,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.style": "fsdp",
    "lr_scheduler.min_lr": 1e-5,
    "validation.freq": 500,
    "validation.steps": 10,
    "validation.batch_size": 1,
    "checkpoint.enable_checkpoint": True,
    "checkpoint.folder": "./checkpoints",
    "checkpoint.interval": 5000,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
}


def converted(tmp_path: Path, text: str, *words: str) -> tuple[LoadedConfig, RunConfig, str]:
    """The config of a file with arguments, checked for 16 ranks, and the file that was written."""
    (tmp_path / "job.sbatch").write_text(text)
    written: str = SCRIPT["main"]([str(tmp_path / "job.sbatch"), *words])
    file = tmp_path / "job.toml"
    file.write_text(written)
    assert cli.main(["config", "check", str(file), "--world-size=16"]) == 0
    return *check_config([f"--job.config_file={file}"], 16, training=False), written


def test_the_array_of_the_text_becomes_its_run(tmp_path):
    config, run, written = converted(tmp_path, ARRAY)
    assert {key: config.value(key) for key in VALUES} == VALUES
    # "Created model with total parameters" of the text.
    assert run.spec.count_parameters(run.model_args()) == 7_392_727_040
    assert shape(run) == SHAPES["Llama 3.1 8B"]
    assert "# hf download hf-internal-testing/llama-tokenizer " in written
    assert "# --max_context_width: their loader cuts sequences of 4,096 tokens" in written


TOKENIZER = str(ROOT / "titanlite" / "data" / "assets" / "tokenizer.tiktoken")
SIZES = ("intermediate_size", "num_key_value_heads", "hidden_width", "num_layers", "num_heads")
FLAVORS = {
    **dict(zip(SHAPES, ("7B", "13B", "70B", "3.1-8B", "3.1-70B", "3.2-1B", "3.2-3B"), strict=True)),
    "Mathstral": "mathstral-7B",
    "Mixtral": "8x7B",
}


@pytest.mark.parametrize("model", FLAVORS)
def test_the_arguments_of_each_model_become_its_config(model, tmp_path):
    kind = {"Llama 2": "llama_v2", "Llama 3": "llama_v3", "Mathstr": "mistral"}.get(model[:7])
    sizes = SHAPES.get(model, (14336, 8, 4096, 32, 32))
    lines = [f"--{name}={size}" for name, size in zip(SIZES, sizes, strict=True)]
    lines += [f"--model_type={kind or 'mixtral'}", "--sharding_strategy=full  # (a link)"]
    head = "#SBATCH --nodes=2 # number\nGPUS_PER_NODE=8 # 4 for G5\ndeclare -a TRAINING_ARGS=(\n"
    text = head + "".join(f"    {line} \n" for line in lines) + '\n)\nsrun x "${ARGS[@]}"\n'
    config, run, _ = converted(tmp_path, text)
    assert config.value("model.flavor") == FLAVORS[model]
    assert config.value("training.batch_size") == 2
    assert (config.value("launch.nodes"), config.value("launch.gpus_per_node")) == (2, 8)
    assert shape(run) == sizes
    assert run.model_args().vocab_size == 50432


@pytest.mark.parametrize(
    ("words", "values"),
    [
        # As the sample's own script for Llama 3.2 3B has it, and a model of no file.
        ("--num_key_value_heads=2", {"model.overrides": {"n_kv_heads": 2}}),
        ("--num_layers=2", {"model.overrides": {"n_layers": 2}}),
        (
            "--dataset_path=/fsx/mine",
            {"training.dataset_path": "/fsx/mine", "validation.dataset_path": "/fsx/mine"},
        ),
        (
            "--dataset=me/text --dataset_config_name=de",
            {"training.dataset": "me/text", "data.subset": "de", "validation.dataset": "me/text"},
        ),
        ("--bf16=0", {"training.mixed_precision_param": "float32"}),
        (f"--tokenizer={TOKENIZER}", {"model.tokenizer_path": TOKENIZER}),
        ("--lr_decay_style=plateau --plateau=0.1", {"lr_scheduler.plateau_ratio": 0.1}),
        ("--max_training_steps=7", {"training.steps": 7}),
    ],
)
def test_an_argument_reaches_its_key(words, values, tmp_path):
    config = converted(tmp_path, ARRAY, *words.split())[0]
    assert {key: config.value(key) for key in values} == values


def test_hybrid_sharding_is_a_copy_for_each_machine(tmp_path):
    config, *_ = converted(tmp_path, f"#SBATCH --nodes=4\n{ARRAY}", "--sharding_strategy=hybrid")
    assert config.value("training.data_parallel_replicate_degree") == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model_type=llama_v3 --no_such=1", "unrecognized arguments: --no_such=1"),
        ("--model_type=gpt_neox", "--model_type=gpt_neox: titanlite has llama_v2, llama_v3, "),
        ("--model_type=mistral --tokenizer=mine", "--tokenizer=mine: neither a path that exists"),
        ("--model_type=mistral --sharding_strategy=hybrid", "no line '#SBATCH --nodes=N'"),
    ],
)
def test_what_has_no_config_is_refused_by_name(words, said, capsys):
    with pytest.raises(SystemExit) as found:
        SCRIPT["main"](words.split())
    assert said in f"{found.value} {capsys.readouterr().err}"


def arguments() -> list[tuple[str, str]]:
    """Each argument of the page's table, with the keys of its row."""
    section = PAGE.partition("## Arguments\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    return [(name, keys) for left, keys in rows for name in re.findall(r"`(\w+)", left)]


def test_the_table_of_the_page_is_that_of_the_script():
    found = dict(arguments())
    only_page = {"model_type", "max_context_width", "epochs"}
    assert set(found) == {*SCRIPT["KEYS"], *only_page}
    for name, (_, key) in SCRIPT["KEYS"].items():
        *section, last = key.split(".")
        words = re.findall(r"\w+", found[name])
        assert last in words and section[0] in words, name
    section = PAGE.partition("No key follows")[2].partition("\n## ")[0]
    for name in set(SCRIPT["WITHOUT_KEY"]) - only_page:
        assert f"`{name}`" in section or name.endswith("_pdrop"), name


def test_each_argument_of_the_samples_is_refused_with_its_key(capsys):
    found = arguments()
    assert len(found) > 30
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", *(f"--{name}=1" for name, _ in found)])
    said = re.findall(r"unknown option --(\w+): .*?, as --(\S+)", capsys.readouterr().err)
    assert [name for name, _ in said] == [name for name, _ in found]
    for (name, key), (_, row) in zip(said, found, strict=True):
        assert key.rpartition(".")[2] in re.findall(r"[\w.]+", row.replace(".", " ")), (name, key)


def test_the_log_has_the_lines_of_the_samples(tmp_path):
    flags = {
        "job.dump_folder": tmp_path,
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
    given = [f"--{key}={value}" for key, value in flags.items()]
    done = titanlite("train", "debug_model.toml", "platforms/aws_fsdp.toml", *given)
    log = done.stdout
    assert done.returncode == 0, log + done.stderr
    lines = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d I (\[train\.py:\d+\] .*)", log)
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
    (count,) = re.findall(wanted[1], lines[1])
    assert f"{int(count):,} parameters" in log


def test_the_cluster_of_parallelcluster_has_the_queues_types_and_folders_of_its_page():
    cluster = yaml.safe_load(CLUSTER)
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


@pytest.mark.soak
def test_parallelcluster_itself_takes_the_cluster_and_no_misspelt_key(tmp_path):
    # Its packages exclude titanlite's, so it gets an environment of its own.
    venv.create(tmp_path, with_pip=True)
    own = tmp_path / "bin" / "python"
    install = [own, "-m", "pip", "install", "--quiet", "aws-parallelcluster==3.16.1"]
    subprocess.run(install, check=True)
    code = """
import sys, yaml
from pcluster.schemas.cluster_schema import ClusterSchema
cluster = ClusterSchema(cluster_name="x").load(yaml.safe_load(sys.stdin))
print([queue.name for queue in cluster.scheduling.queues])
"""
    environment = {**os.environ, "AWS_DEFAULT_REGION": "us-east-1"}
    for text, found in ((CLUSTER, "['p5', 'p4d']"), (CLUSTER.replace("Efa:", "Efo:", 1), "Efo")):
        done = subprocess.run(
            [own, "-c", code], input=text, text=True, capture_output=True, env=environment
        )
        lines = done.stdout if done.returncode == 0 else done.stderr
        assert found in lines.splitlines()[-1], lines
        assert (done.returncode == 0) == (text == CLUSTER)
