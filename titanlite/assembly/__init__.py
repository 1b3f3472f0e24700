"""From a config and ranks to the parts of a run, before its first step.

`build` calls the others in order: `datasets`, `model`, `loaders`, `saves`, `callbacks`. `preflight`
and `rank_checks` refuse what cannot work; `start_report` says what runs; `error_exit` is how a rank
ends.
"""
