"""The experience store: a durable log of all episodes and labels."""
