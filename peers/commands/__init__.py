"""The commands of `swarm-peer`: one module each, with a frozen dataclass of options and `run(options)`.

Option modules import nothing heavy, so that `--help` answers at once; torch and transformers are imported
inside `run`.
"""
