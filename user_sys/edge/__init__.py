"""The robot's side: driver process, session process, outbox."""
