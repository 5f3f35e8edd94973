"""Somebody's training script, run as it is and made to emit events.

Nothing here imports torch before the script does: a script may set what torch reads when it is imported.
"""
