"""How a run is shown: terminal, Markdown, JUnit, HTML."""
