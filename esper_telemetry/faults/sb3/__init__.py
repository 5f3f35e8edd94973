"""The fault bed over Stable-Baselines3: what can be broken there from outside, and who notices through `TelemetryCallback`."""
