"""A ladder of small models that tells what a large one will learn: `titanlite ladder`.

command.py    the command line
target.py     the config that is predicted
sizes.py      the models
rungs.py      their runs, for `titanlite.contrib.lab.members`
climb.py      makes the runs, and concludes
passes.py     how often a text is read
files.py      points as JSON and CSV
law.py        L(N, D), and its points
fit.py        fits it
predict.py    what it says of a run
report.py     all that as text and JSON
picture.py    and as SVG
"""
