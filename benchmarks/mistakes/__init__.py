"""Programs with one mistake each, their correct twins, and scores of tools that look for the mistakes."""
