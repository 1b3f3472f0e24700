"""Checkpoints and tokenizers of other programs: convert, export, import, fetch."""
