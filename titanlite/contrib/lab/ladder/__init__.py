"""A ladder of small models that tells what a large one will learn: `titanlite ladder`."""
