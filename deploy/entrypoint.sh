#!/bin/sh
# Entry point of the image. As process 1 it passes SIGTERM, SIGINT and SIGUSR1 on, waits for the last checkpoint and ends
# with the command's exit code. `train` is SageMaker's word for the job below /opt/ml. docs/launch/container.md
exec python -m titanlite.launch.container "$@"
