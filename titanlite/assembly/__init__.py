"""From a config and ranks to the parts of a run, before its first step."""
