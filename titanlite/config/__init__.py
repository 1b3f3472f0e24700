"""From a TOML file to a run: `load.load`, then `derive.derive`; with every check,
`fit.check_config`.
"""
