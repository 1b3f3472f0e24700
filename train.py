"""Train a model from a TOML file.

torchrun --nproc_per_node 8 train.py --job.config_file train_configs/llama3_8b.toml [--section.key
value ...]
"""

from titanlite.main import main

if __name__ == "__main__":
    main()
