"""Runs a user's training script unchanged and makes it emit events.

Nothing here imports torch before the script does: a script may set what torch reads when it is imported.
"""
