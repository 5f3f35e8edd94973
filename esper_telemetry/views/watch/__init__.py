"""`esper-telemetry watch`: runs as they go on, in a terminal. `pages` turns views of runs into lines; `app` shows them with Textual."""
