"""Shows a run: terminal, Markdown, JUnit, HTML."""
