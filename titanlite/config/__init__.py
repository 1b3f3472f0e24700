"""TOML files and the command line, read into a `LoadedConfig`.

- `sections` (with `data_sections`, `model_sections`, `run_sections`) defines each key once.
- `load` reads the layers: `toml` and `variables` find values, `aliases` and `dialect` turn names of
  torchtitan into ours, `value_types` and `value_problems` judge each value by itself.
- `checks` and `idle_keys` compare keys with each other; `errors` has `Problem` and `ConfigError`.
- `trust` says what a file of somebody else may not do; `import_path_keys` and `own_functions` name
  code of the user.
"""
