"""Networks of the policy: hidden layers, recurrent cores and encoders of observations."""
