"""The hardware layer: interfaces, limits and resources of robots. It imports nothing of the other packages."""
