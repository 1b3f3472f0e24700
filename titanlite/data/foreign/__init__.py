"""Token files of other programs: a room that a run imports when it reads such files.

find.py       the files of a path: one, those of a pattern, or of a folder
raw.py        files of ids with or without a header, whose documents ids alone tell apart
megatron.py   Megatron-LM's pairs of `.bin` and `.idx`
"""
