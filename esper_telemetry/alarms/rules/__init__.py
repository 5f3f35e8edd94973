"""The built-in alarms, one file per family.

An alarm compares values with the run's own history if absolute bounds from the literature misjudge healthy runs. With unscaled returns,
the critic's gradient is a thousand times the clip limit from the first update. Rewards per step are constant if survival is the task.
Explained variance turns negative when all returns become equal. Exact checks, such as identities and missing gradients, work without a
history. Most alarms about magnitudes need an extreme value, or two unusual ones in a row, because clipping absorbs a single spike. Each
rule explains its bounds in `source`.
"""
