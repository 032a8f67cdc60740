"""The replay buffer: batches for learners from the experience store."""
