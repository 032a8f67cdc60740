"""The experience store: the durable log of everything that happened."""
