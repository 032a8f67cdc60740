"""The learning system: edge, tunnel, store, learner, console."""
