"""`esper-telemetry watch`: live views of runs in a terminal. `pages` and `charts` turn views of runs into lines; `app` shows them."""
