"""The problem language: a case is one line, and its data follow from it."""
