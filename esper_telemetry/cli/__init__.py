"""What the commands of the command line do, one file each, with a function of its name that returns the exit code.

Nothing is imported here: `run` must not import torch before the script does.
"""
