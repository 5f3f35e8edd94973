"""The built-in alarms, one file per family.

An alarm compares with what is usual for the run where absolute bounds of the literature misjudge healthy runs: critics of unscaled
returns fill the clip limit a thousandfold from the first update on, rewards per step are constant where surviving is the task, explained
variance turns negative where all returns become equal. Exact checks need no history: identities, zeros, missing gradients. Most alarms of
size need a value far out, or two in a row that are out of line, because one spike is absorbed by clipping. Each rule gives the reasons
for its bounds in `source`.
"""
