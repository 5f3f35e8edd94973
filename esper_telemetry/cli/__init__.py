"""The commands: each is a function with the command's name that returns the exit code; `main` maps commands to modules.

Nothing is imported here, because `run` must not import torch before the script does.
"""
