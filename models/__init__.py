"""Models as sequences of layers, and presets of whole runs. They know nothing of pipelines."""
