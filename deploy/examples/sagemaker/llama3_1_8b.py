# llama3-1-8b: 2 x ml.p5.48xlarge. Copy it, and change names, machines and URLs: docs/launch/sagemaker.md.
# It needs: pip install "sagemaker>=3.27,<4"

from sagemaker.core.shapes import TensorBoardOutputConfig
from sagemaker.core.training.configs import (
    CheckpointConfig,
    Compute,
    InputData,
    MetricDefinition,
    RetryStrategy,
    SourceCode,
    StoppingCondition,
)
from sagemaker.train import ModelTrainer

# `exec` gives torchrun the process id 1: it gets SageMaker's SIGTERM and passes it to the ranks, which save.
COMMAND = """
exec python -m titanlite.torchrun
    --nnodes 2 --nproc_per_node 8 --node_rank $SM_CURRENT_HOST_RANK
    --master_addr $SM_MASTER_ADDR --master_port $SM_MASTER_PORT
    -m titanlite train config.toml
"""

trainer = (
    ModelTrainer(
        training_image="123456789012.dkr.ecr.us-east-1.amazonaws.com/titanlite:latest",
        role="arn:aws:iam::123456789012:role/titanlite",
        base_job_name="llama3-1-8b",
        # The folder has config.toml, and all of it goes to the container.
        source_code=SourceCode(
            source_dir="/home/me/llama3_1_8b",
            command=COMMAND,
            args=[
                "--job.dump_folder=/opt/ml/checkpoints",
                "--metrics.save_tb_folder=/opt/ml/output/tensorboard",
            ],
        ),
        compute=Compute(
            instance_type="ml.p5.48xlarge",
            instance_count=2,
            volume_size_in_gb=800,  # of types without NVMe
            enable_managed_spot_training=True,
        ),
        stopping_condition=StoppingCondition(
            max_runtime_in_seconds=259200,
            max_wait_time_in_seconds=518400,  # the wait for spot machines and the run together
        ),
        # SageMaker copies this folder to S3 all along, and back before the job starts again.
        checkpoint_config=CheckpointConfig(
            s3_uri="s3://my-bucket/llama3-1-8b/run",
            local_path="/opt/ml/checkpoints",
        ),
        environment={
            "PYTHONUNBUFFERED": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110",
            "NCCL_SOCKET_IFNAME": "^lo,docker,veth",
            "FI_PROVIDER": "efa",
            "FI_EFA_USE_HUGE_PAGE": "0",
            "FI_EFA_USE_DEVICE_RDMA": "1",
        },
    )
    # Lost machines and SageMaker's own errors.
    .with_retry_strategy(RetryStrategy(maximum_retry_attempts=30))
    .with_metric_definitions(
        [
            MetricDefinition(name="step", regex=r"step: +([0-9]+) "),
            MetricDefinition(name="loss", regex=r"step: .* loss: +([0-9.]+(?:e[-+]?[0-9]+)?)"),
            MetricDefinition(name="grad_norm", regex=r"grad_norm: +([0-9.]+(?:e[-+]?[0-9]+)?)"),
            MetricDefinition(name="learning_rate", regex=r" lr: +([0-9.]+(?:e[-+]?[0-9]+)?)"),
            MetricDefinition(name="mfu", regex=r"mfu: +([0-9.]+(?:e[-+]?[0-9]+)?)%"),
        ]
    )
    .with_tensorboard_output_config(
        TensorBoardOutputConfig(
            s3_output_path="s3://my-bucket/llama3-1-8b/tensorboard",
            local_path="/opt/ml/output/tensorboard",
        )
    )
)

if __name__ == "__main__":
    # The container has each channel as a folder, and its path as SM_CHANNEL_NAME.
    channels = {
        "train": "s3://my-bucket/c4",
    }
    inputs = [InputData(channel_name=name, data_source=url) for name, url in channels.items()]
    trainer.train(input_data_config=inputs, wait=False)
