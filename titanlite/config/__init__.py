"""From a TOML file to plans: `load.load`, `resolve.resolve`; with every check, `titanlite.prepare.checked_plans`."""
