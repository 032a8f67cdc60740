"""What hardware is, where it is, who may drive it, and what it must never do."""
