"""Runs held against one another."""
