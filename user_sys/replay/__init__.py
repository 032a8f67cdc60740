"""The replay buffer: the learner's view of the store, held in memory and sampled."""
