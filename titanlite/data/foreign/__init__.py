"""Token files of other programs: a room that a run imports when it reads such files.

find.py       the files of a path: one, those of a pattern, of a folder, or behind URLs
headers.py    what the first bytes of a file tell; the type that none tells
parts.py      a file of tokens as a part of a corpus, with documents that ids alone tell apart
ranges.py     bytes of local files, and of files behind URLs by ranges
megatron.py   Megatron-LM's pairs of `.bin` and `.idx`
opening.py    from the config's keys to the parts, in this order
"""
