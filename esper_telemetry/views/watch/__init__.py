"""`esper-telemetry watch`: runs as they go on, in a terminal. `pages` and `charts` turn views of runs into lines; `app` shows them."""
