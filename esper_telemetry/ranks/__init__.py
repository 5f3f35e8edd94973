"""The ranks of a distributed run, which report as one: what each has measured is merged in one exchange per flush."""
