"""From a config and ranks to what a run needs before its first step."""
