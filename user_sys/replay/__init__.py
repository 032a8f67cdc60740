"""The replay buffer: the learner's view of the experience store, cached and sampled."""
