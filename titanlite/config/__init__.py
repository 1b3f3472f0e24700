"""From a TOML file to plans: `load.load`, `resolve.resolve`, `unbuilt.refuse_unbuilt`."""
