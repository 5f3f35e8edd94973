"""The commands, one file each, with a function of the command's name that returns the exit code.

Nothing is imported here: `run` must not import torch before the script does.
"""
