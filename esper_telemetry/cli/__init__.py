"""The commands: a function of the command's name returns the exit code; `main` says in which module it is.

Nothing is imported here: `run` must not import torch before the script does.
"""
