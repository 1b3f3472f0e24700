"""The coordinate check of muP: narrow and wide models trained for a few steps, and compared."""
