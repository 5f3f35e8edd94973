"""Events of one update become `Update`, and that becomes metric groups and evidence: pure, so that any process can do it."""
