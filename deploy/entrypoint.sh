#!/bin/sh
# Entry point of the image: it becomes the command, which gets the signals. `train` is SageMaker's word for the job below
# /opt/ml. docs/launch/container.md
exec python -m titanlite.launch.container_start "$@"
