"""Weights with a model card on the Hugging Face hub: `titanlite push`, and uploads from a run."""
