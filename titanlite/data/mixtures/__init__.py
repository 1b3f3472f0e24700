"""Mixtures of texts: `[[data.source]]`, each with its share of the tokens, moment by moment.

    mixed_rows.py   the sources as one order of sequences (`Rows`)
    turns.py        which source has each sequence, and how many each has had
    state.py        what a checkpoint says of a mixture: its checks, and its values

`titanlite.data.dataset_builder` calls `open_mixture`, where the text of a run is opened.
All else asks the rows of a run: those of a single text answer in `titanlite.data.rows`. A run
without `[[data.source]]` imports nothing of this. The keys are `DataSource` and `DataPhase` in
`titanlite.config.data_sections`. `[[data.phase]]` also serves single texts:
`titanlite.data.phases` tells which shares hold from which sequence on.
"""
