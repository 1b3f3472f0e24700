"""`titanlite launch`: jobs for Slurm, Kubernetes, SageMaker, SkyPilot and local machines."""
